"""Every setting of an experiment, its default and its meaning; nothing about files, layers or where it runs.

The string after a field is its help, its text in the reference page and its description in the JSON schema.
Numbers have bounds here; what needs two settings to judge is in combinations.py. Sections:

    env -> model -> algo -> engine      what is learned, by what, how, in which processes
    policies, match                     when it is more than one policy: which, and who of the env's agents plays which
    stop, eval, save, track             when it ends, how it is measured, kept and watched
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SCHEMA: Literal[1] = 1
HUGE = 10**15


def _whole(value: Any) -> Any:
    """2e6 is a count; true is not. (YAML writes counts as floats when they have an exponent.)"""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bare_id(value: Any) -> Any:
    """`env: CartPole-v1` is short for `env: {id: CartPole-v1}`."""
    return {"id": value} if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1, le=HUGE), BeforeValidator(_whole)]
CountOrZero = Annotated[int, Field(ge=0, le=HUGE), BeforeValidator(_whole)]
Width = Annotated[int, Field(ge=1, le=16384), BeforeValidator(_whole)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Options = dict[str, Any]


class Settings(BaseModel):
    # Built when first used: most processes need one section, and building all costs a tenth of a second.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, defer_build=True)


class Plugin(Settings):
    """Something named by an import string: a built-in short name, `package.module:Name` or `path/file.py:Name`."""

    id: str = Field(min_length=1, max_length=500)
    """Built-in short name, `package.module:Name` or `path/file.py:Name`; `path/file.py` has the conventional class."""
    options: Options = {}
    """Keyword arguments, checked against the target's signature before anything starts."""


PluginRef = Annotated[Plugin, BeforeValidator(_bare_id)]


# ------------------------------------------------------------------------------------------------ schedules


class Linear(Settings):
    """From `start` to `end` in a straight line, then `end`."""

    kind: Literal["linear"]
    start: NotNegative
    """Value at env step 0."""
    end: NotNegative = 0.0
    """Value from env step `over` on."""
    over: Count | None = None
    """Env steps the line takes; `stop.env_steps` when left out."""


class Piecewise(Settings):
    """Straight lines between points; constant before the first and after the last."""

    kind: Literal["piecewise"]
    points: list[Annotated[list[NotNegative], Field(min_length=2, max_length=2)]] = Field(min_length=1, max_length=1000)
    """[[env steps, value], ...] with growing env steps."""


class KlAdaptive(Settings):
    """Multiplied or divided by `factor` whenever the measured KL leaves [target / 2, target * 2].

    When the policy moves too fast, what sets its step (lr, clip) shrinks and what holds it back (kl, entropy) grows.
    """

    kind: Literal["kl_adaptive"]
    start: Positive
    """Value before the first update."""
    target: Positive = 0.01
    """KL divergence between the policy before and after an update to aim for."""
    factor: float = Field(default=1.5, gt=1, le=10)
    """How much the value changes at a time."""
    min: NotNegative | None = None
    """Never below this; a hundredth of `start` when left out."""
    max: Positive | None = None
    """Never above this; a hundred times `start` when left out."""

    @property
    def lowest(self) -> float:
        return self.start / 100 if self.min is None else self.min

    @property
    def highest(self) -> float:
        return self.start * 100 if self.max is None else self.max


Schedule = Annotated[Linear | Piecewise | KlAdaptive, Field(discriminator="kind")]
Scheduled = Annotated[NotNegative, Field(strict=True)] | Schedule


# ------------------------------------------------------------------------------------------------ sections


class Env(Settings):
    """The environment and what is done to its steps before anybody sees them."""

    id: str = Field(min_length=1, max_length=500)
    """Gymnasium id, `atari:GAME`, `doom:SCENARIO`, `envpool:NAME`, built-in name (identity, basic, memory, delay,
    timeout, CarPass-v0, pennies, visitors), `package.module:Class` or `path/file.py:Class`; also a parallel env of
    PettingZoo's."""
    options: Options = {}
    """Keyword arguments of the constructor, checked against its signature."""
    wrappers: list[PluginRef] = []
    """Gymnasium wrappers, innermost first: built-in name or import string, each with options."""
    frameskip: Whole = Field(default=1, ge=1, le=1000)
    """Calls of the env's step per env step: the action is repeated and the rewards are added. Envs that skip frames
    themselves (atari:, doom:, Atari of envpool:) have an option for that."""
    frame_stack: Whole = Field(default=1, ge=1, le=64)
    """How many last observations are given together (images: along channels, vectors: end to end)."""
    time_limit: Count | None = None
    """Env steps after which an episode is truncated; the env's own limit when left out."""
    reward_scale: Finite = 1.0
    """Rewards are multiplied by this before learning; reported returns are not."""
    reward_clip: Positive | None = None
    """Rewards are clipped to [-x, x] before learning, after scaling; reported returns are not."""
    strict: bool = True
    """Refuse an env whose observations do not have the dtype that its space declares, or that prints to stdout in
    reset() or step(); false casts them, and sends what is printed to stderr."""
    comes_back: Literal["auto", "state", "replay", "fresh"] = "auto"
    """How running episodes continue after a resume: the env's own state, its actions replayed, or new episodes."""
    native: bool = True
    """Step all rows in one call where the env has a vectorised version (CartPole, Atari, EnvPool)."""
    isolate: Literal["none", "process", "thread"] = "none"
    """Give each copy of the env a process or a thread of its own, in training and evaluation: for simulators of which a
    process or thread takes only one, and to step slow envs side by side. Not stepped in one call then."""
    decorrelate: CountOrZero = 0
    """Cut the first training episode of each copy after a number of env steps drawn from 1 to this, so that copies that
    begin together do not end together; what was cut is not counted as an episode. 0 cuts nothing."""
    start_timeout: Positive = 60.0
    """Seconds that making the env and its first steps may take."""
    step_timeout: Positive = 60.0
    """Seconds after which a worker whose env does not come back from a step is replaced."""
    reset_timeout: Positive = 300.0
    """Seconds after which a worker whose env does not come back from a reset is replaced."""

    def episode_digest(self) -> str:
        """Of the settings that make an episode what it is; the others change only how it is learned from or checked.

        A digest, because options may hold secrets; without defaults, because later versions have more settings.
        """
        told = {"id", "options", "wrappers", "frameskip", "frame_stack", "time_limit"}
        return sha256(self.model_dump_json(include=told, exclude_defaults=True).encode()).hexdigest()


class Memory(Settings):
    """The recurrent core between encoders and heads."""

    kind: Literal["none", "lstm", "gru"] = "none"
    """Kind of the recurrent core."""
    size: Whole = Field(default=128, ge=1, le=16384)
    """Units of the core."""
    bptt: Whole = Field(default=16, ge=1, le=4096)
    """Steps that gradients flow back in time; `algo.rollout` must be a multiple of it."""


class Normalise(Settings):
    """Running statistics kept with the weights."""

    obs: bool = False
    """Observations that are not images are brought to mean 0 and variance 1."""
    images: bool = False
    """Images are, each pixel by itself: what moves stands out from what never changes."""
    returns: bool = False
    """The critic learns returns brought to mean 0 and variance 1."""


class Model(Settings):
    """The network: encoders, an optional memory, a critic and a head for the action space."""

    id: str = Field(default="actor_critic", min_length=1, max_length=500)
    """The built-in `actor_critic`, or a model of yours: `nets/custom.py` (class CustomModel), `file.py:Class` or
    `package.module:Class`."""
    options: Options = {}
    """Keyword arguments of your model's constructor; the built-in model is set by the settings below."""
    encoder: PluginRef = Plugin(id="auto")
    """Encoder for every observation: auto, mlp, simple, nature, impala, resnet, text, or an import string."""
    encoders: dict[str, PluginRef] = {}
    """Encoders for single observations by name, over `encoder`."""
    hidden: list[Width] = Field(default=[64, 64], max_length=64)
    """Widths of the layers after (or, for vectors, instead of) the encoders."""
    activation: Literal["tanh", "relu", "elu", "silu", "gelu", "leaky_relu"] = "tanh"
    """Non-linearity between layers."""
    memory: Memory = Memory()
    critic: Literal["separate", "shared"] = "separate"
    """Whether the critic has encoders, memory and layers of its own or a head on the actor's."""
    previous: bool = False
    """Give the previous action and reward as observations too."""
    normalise: Normalise = Normalise()
    log_std: Annotated[float, Field(ge=-20, le=2)] = 0.0
    """Initial logarithm of the standard deviation of continuous actions."""
    init: str | None = None
    """Run or checkpoint whose weights to start from: those that fit are taken, the others are listed."""


class Ppo(Settings):
    """Proximal policy optimisation."""

    id: Literal["ppo"] = "ppo"
    rollout: Whole = Field(default=128, ge=1, le=1_000_000)
    """Env steps of each row per update; the batch is this times the rows."""
    minibatch: Count = 256
    """Env steps per gradient step."""
    epochs: Whole = Field(default=10, ge=1, le=1000)
    """Passes over the batch per update."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    gae_lambda: Unit = 0.95
    """Bias against variance of the advantages: 0 is one-step, 1 is Monte Carlo."""
    advantage: Literal["gae", "vtrace", "clipped_gae"] = "gae"
    """How advantages are made: GAE, V-trace, or GAE with clipped importance ratios (for samples of older policies)."""
    rho_clip: Positive = 1.0
    """Cap of the importance ratios of V-trace and clipped GAE."""
    clip: Scheduled = 0.2
    """How far the probability ratio may move before its gradient is cut."""
    value_clip: Positive | None = None
    """How far a value may move per update, in normalised units; off when left out."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    kl: Scheduled = 0.0
    """Weight of the penalty on the KL divergence from the policy that acted."""
    kl_stop: Positive | None = None
    """Leave the remaining epochs out once the KL divergence exceeds this."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; off with null."""
    normalise_advantage: bool = True
    """Bring the advantages of each minibatch to mean 0 and variance 1."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


class A2c(Settings):
    """Advantage actor-critic: the PPO update with one epoch, the whole batch at once and no clipping."""

    id: Literal["a2c"]
    rollout: Whole = Field(default=16, ge=1, le=1_000_000)
    """Env steps of each row per update."""
    lr: Scheduled = 1e-3
    """Learning rate of Adam: a number or a schedule."""
    gamma: Unit = 0.99
    """Discount factor per env step."""
    gae_lambda: Unit = 1.0
    """Bias against variance of the advantages: 0 is one-step, 1 is Monte Carlo."""
    value_coef: NotNegative = 0.5
    """Weight of the value loss."""
    entropy: Scheduled = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; off with null."""
    normalise_advantage: bool = False
    """Bring the advantages of the batch to mean 0 and variance 1."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""


class Changes(Settings):
    """Numbers of `algo` that are others for one policy, over their schedules."""

    lr: NotNegative | None = None
    """Learning rate of this policy; algo.lr when left out."""
    clip: NotNegative | None = None
    """Clip range of this policy (not a2c); algo.clip when left out."""
    entropy: NotNegative | None = None
    """Weight of this policy's entropy bonus; algo.entropy when left out."""
    kl: NotNegative | None = None
    """Weight of this policy's KL penalty (not a2c); algo.kl when left out."""
    gamma: Unit | None = None
    """Discount factor of this policy; algo.gamma when left out."""
    gae_lambda: Unit | None = None
    """Bias against variance of this policy's advantages; algo.gae_lambda when left out."""
    value_coef: NotNegative | None = None
    """Weight of this policy's value loss; algo.value_coef when left out."""

    def made(self) -> dict[str, float]:
        """Those that are."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class Member(Settings):
    """One of several policies. It learns, unless it comes from elsewhere."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    algo: Changes = Changes()
    """Numbers of `algo` that are others for this policy: lr, clip, entropy, kl, gamma, gae_lambda, value_coef."""
    from_: Annotated[str | None, Field(alias="from", min_length=1, max_length=4096)] = None
    """Frozen: the policy of that run's newest checkpoint (RUN), of the one at an env step (RUN@STEP, RUN@best) or of a
    checkpoint's folder. A copy is kept with the run, and it never learns."""


class Engine(Settings):
    """What happens inside the processes that learn. `local` is one machine, as fast as it goes; `serial` is the plain
    reference: envs, inference and update in one process, one after another."""

    kind: Literal["local", "serial"] = "local"
    """Which engine."""
    envs: Whole = Field(default=8, ge=1, le=100_000)
    """Copies of the env stepped together, over all workers, however many agents each of them has."""
    workers: CountOrZero | Literal["auto"] = "auto"
    """Processes that step envs and act in them, each with its share of the envs; 0 does it in the learner's process.
    Auto decides by the machine and the env. The serial engine steps as many groups one after another."""
    mode: Literal["sync", "async"] = "sync"
    """sync: all workers act with the newest weights, then all is learned from. async: workers act on while the learner
    learns, with weights that are a little older."""
    inference: Literal["auto", "worker", "batched"] = "auto"
    """Who chooses actions. worker: each worker, with its own copy of the policy on its core. batched: one process, the
    actor, with a copy on `device`, for all workers that wait, in one batch. Auto: batched where the device is no CPU,
    there are workers and there is one policy."""
    max_lag: Count = 20
    """Asynchronous: samples of weights that are more than this many updates old are thrown away, and counted."""
    threads: Count | Literal["auto"] = "auto"
    """Threads that torch may use for learning, each learner. Auto decides by the cores that are really free."""
    learners: Whole = Field(default=1, ge=1, le=64)
    """Processes that learn: each works through its part of every minibatch, and all take the same gradient step. One
    GPU each with `device: cuda`."""
    affinity: bool = False
    """Pin each worker to one of the usable cores, in turn; the learner may use all of them."""
    tune: bool = False
    """Before a run is made, measure for some seconds as `tiltyard tune` does, choose workers, envs, rollout, minibatch
    and (unless it is set) mode for this machine, and write those numbers into the run's settings."""
    restarts: CountOrZero = 1000
    """Workers that died or hung and may be replaced before the run is given up."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the network lives; auto takes a GPU when there is one."""


class Stop(Settings):
    """When the run is done: the first condition met wins and is named in the status."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    env_steps: Count | None = 1_000_000
    """Decisions taken, over all rows."""
    frames: Count | None = None
    """Simulator frames: env steps times frameskip, that of the env itself included."""
    seconds: Positive | None = None
    """Seconds of training, counted across resumes."""
    updates: Count | None = None
    """Passes of the learner over a batch."""
    return_: Annotated[Finite | None, Field(alias="return")] = None
    """Mean return of an evaluation."""
    train_return: Finite | None = None
    """Mean return of the last 100 training episodes."""


class Eval(Settings):
    """Evaluations during training: fixed seeds of their own, never training's random streams."""

    every: CountOrZero = 50_000
    """Env steps between evaluations; 0 evaluates only at the end."""
    episodes: Whole = Field(default=10, ge=1, le=1_000_000)
    """Episodes per evaluation."""
    greedy: bool = True
    """Take the likeliest action instead of drawing one."""
    at_end: bool = True
    """Evaluate once more when the run is done."""
    envs: Whole = Field(default=8, ge=1, le=10_000)
    """Copies of the env stepped together in an evaluation."""
    seed: CountOrZero = 1_000_003
    """Root of the episodes' seeds, the same for every run so that runs are comparable."""
    video: bool = False
    """Film the first episode of each evaluation into videos/."""
    time_limit: Count | None = 100_000
    """Env steps after which an episode without an end of its own is cut."""


class Save(Settings):
    """Checkpoints: when they are written and which are kept."""

    env_steps: Count | None = None
    """Env steps between checkpoints."""
    seconds: Positive | None = 300.0
    """Seconds between checkpoints."""
    updates: Count | None = None
    """Updates between checkpoints."""
    last: Whole = Field(default=2, ge=1, le=100_000)
    """How many of the newest to keep."""
    best: Whole = Field(default=1, ge=0, le=100_000)
    """How many of the best to keep."""
    metric: str = Field(default="eval/return", min_length=1, max_length=200)
    """Metric that says which is best; the newest value recorded when the checkpoint is written."""
    mode: Literal["max", "min"] = "max"
    """Whether more of the metric is better, or less."""
    milestones: list[Count] = Field(default=[], max_length=10_000)
    """Env steps at which a checkpoint is written and kept for good."""


class Wandb(Settings):
    """Weights & Biases mirror (extra `wandb`)."""

    mode: Literal["off", "offline", "online"] = "off"
    """Off, written to the run folder for a later `wandb sync`, or sent at once."""
    entity: str | None = None
    """User or team."""
    project: str = "tiltyard"
    """Project."""
    group: str | None = None
    """Group; the env's id when left out."""
    job_type: str = "train"
    """Job type."""
    tags: list[str] = []
    """Tags beside the experiment's own."""


class Track(Settings):
    """Records and their mirrors. metrics.jsonl is always written and is the truth."""

    every: Count = 1
    """Updates between records."""
    tensorboard: bool = True
    """Mirror the records as TensorBoard events in tb/."""
    wandb: Annotated[Wandb, BeforeValidator(lambda v: {"mode": v} if isinstance(v, str) else v)] = Wandb()


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}")


def _run_name(value: Any) -> Any:
    if isinstance(value, str) and (not NAME.fullmatch(value) or ".." in value):
        raise ValueError("a run's name has 1 to 80 letters, digits and . _ + -, and starts with a letter or digit")
    return value


def _pool(value: Any) -> Any:
    """`player_0: main` is short for `player_0: {main: 1.0}`."""
    return {value: 1.0} if isinstance(value, str) else value


Pool = Annotated[dict[str, Positive], BeforeValidator(_pool, json_schema_input_type=str | dict[str, Positive])]


class Experiment(Settings):
    """What is learned and how. Where it runs is a site profile and no part of this."""

    version: Literal[1] = SCHEMA
    """Schema of this description."""
    name: Annotated[str | None, BeforeValidator(_run_name)] = None
    """Folder of the runs below the runs root; made from the env's id when left out."""
    seed: Whole = Field(default=0, ge=0, le=2**63 - 1)
    """Root of every random stream of the run."""
    notes: str = Field(default="", max_length=10_000)
    """Free text, shown and searched by `tiltyard ls`."""
    tags: list[Annotated[str, Field(min_length=1, max_length=80)]] = Field(default=[], max_length=100)
    """Words to filter `tiltyard ls` by."""
    use: list[str] = Field(default=[], max_length=20)
    """Presets below this file's own values: names of built-in presets or paths of YAML files."""
    resume: str = Field(default="auto", min_length=1, max_length=4096)
    """What a new run starts from: auto and never from nothing, a path from that checkpoint. Whatever this says,
    `tiltyard resume RUN` goes on from its own newest valid checkpoint; with `resume=never` it starts over, once."""
    env: Annotated[Env, BeforeValidator(_bare_id)]
    model: Annotated[Model, BeforeValidator(_bare_id)] = Model()
    algo: Annotated[Annotated[Ppo | A2c, Field(discriminator="id")], BeforeValidator(_bare_id)] = Ppo()
    policies: dict[str, Member] = Field(default={}, max_length=1000)
    """Several policies by name, with the same model and algo: `{}` learns, `{algo: {lr: 1e-4}}` learns with other
    numbers, `{from: RUN@STEP}` is frozen. The first must learn, and is what evaluations measure. None named: one
    policy, `main`."""
    match: dict[str, Pool] = Field(default={}, max_length=1000)
    """Which policy plays which agent of the env, by the agent's name or a pattern (`player_*`; the first that fits):
    `main`, or a pool with weights, `{main: 0.2, rival: 0.8}`, drawn anew for every episode. None named: the first
    policy plays everybody."""
    engine: Engine = Engine()
    stop: Stop = Stop()
    eval: Eval = Eval()
    save: Save = Save()
    track: Track = Track()

    @property
    def run_name(self) -> str:
        """The name given, or one made from the env's id."""
        if self.name:
            return self.name
        stem = self.env.id.replace("\\", "/").rsplit("/", 1)[-1]
        cleaned = re.sub(r"[^A-Za-z0-9_.+-]+", "-", stem.replace(".py", "")).strip("-.")
        return re.sub(r"\.\.+", ".", cleaned)[:80] or "run"

    @property
    def cast(self) -> dict[str, Member]:
        """Every policy by name, in order: those named, or `main` alone."""
        return self.policies or {"main": Member()}

    @property
    def learning(self) -> list[str]:
        """Names of the policies that learn; the first is the one that is measured."""
        return [name for name, member in self.cast.items() if member.from_ is None]

    def algo_of(self, policy: str) -> Ppo | A2c:
        """`algo` with the numbers that are others for one policy."""
        changes = self.cast[policy].algo.made()
        return self.algo.model_copy(update=changes) if changes else self.algo

    @property
    def batch(self) -> int:
        """Env steps per update; with several agents in an env, the fewest: at least one of them acts at any time."""
        return self.algo.rollout * self.engine.envs
