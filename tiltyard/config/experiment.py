"""Every setting of an experiment, its default and its meaning; nothing about files, layers or where it runs.

The string after a field is its help, its text in the reference page and its description in the JSON schema.
Numbers have bounds here; what needs two settings to judge is in combinations.py. Sections:

    env -> model -> algo -> engine      what is learned, by what, how, in which processes
    policies, match, population         when it is more than one policy: which, who plays whom, who copies whom
    stop, eval, save, track             when it ends, how it is measured, kept and watched
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from tiltyard.config.algos import ONLY_RLLIB, Algo, Changes, Ppo, family
from tiltyard.config.fields import (
    Count,
    CountOrZero,
    Finite,
    NotNegative,
    Options,
    Plugin,
    PluginRef,
    Positive,
    Settings,
    Whole,
    Width,
    bare_id,
)
from tiltyard.config.population import Past, Population

SCHEMA: Literal[1] = 1

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
    restore_mode: Literal["auto", "state", "rerun", "fresh"] = "auto"
    """How running episodes continue after a resume: from the env's own state, by re-running their actions, or as new
    episodes."""
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


class PolicySettings(Settings):
    """One of several policies. It learns, unless it comes from elsewhere."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    algo: Changes = Changes()
    """Numbers of `algo` that are others for this policy: lr, clip, entropy, kl, gamma, gae_lambda, value_coef."""
    from_: Annotated[str | None, Field(alias="from", min_length=1, max_length=4096)] = None
    """Frozen: the policy of that run's newest checkpoint (RUN), of the one at an env step (RUN@STEP, RUN@best) or of a
    checkpoint's folder. A copy is kept with the run, and it never learns."""
    past: Past | None = None

    @property
    def learns(self) -> bool:
        """Whether it is neither frozen nor a pool of past versions."""
        return self.from_ is None and self.past is None


class Engine(Settings):
    """What happens inside the processes that learn. `local` is one machine, as fast as it goes; `serial` is the plain
    reference: envs, inference and update in one process, one after another; `rllib` is Ray RLlib on one machine or many
    (extra `ray`)."""

    kind: Literal["local", "serial", "rllib"] = "local"
    """Which engine. Algorithms that only RLlib has choose `rllib` by themselves."""
    envs: Whole = Field(default=8, ge=1, le=100_000)
    """Copies of the env stepped together, over all workers or runners, however many agents each of them has."""
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
    runners: CountOrZero | Literal["auto"] = "auto"
    """rllib: processes that step envs and act in them, on any node; 0 does it in the driver's process. Auto takes the
    CPUs that are left beside the learners, at most one for each env."""
    envs_per_runner: Count | None = None
    """rllib: copies of the env in each runner, instead of `envs` shared out."""
    cpus: Count | None = None
    """rllib: CPUs that Ray may use, on each of `nodes`; those of this machine when left out."""
    gpus: NotNegative | None = None
    """rllib: GPUs for each learner, fractions too; 1 with `device: cuda` when left out."""
    object_store: Positive | None = None
    """rllib: GiB of shared memory for what processes send each other, on each node."""
    temp_dir: str | None = Field(default=None, min_length=1, max_length=60)
    """rllib: a folder for Ray's sockets and logs, short because sockets have short names; one of the system's temporary
    ones when left out."""
    address: str | None = Field(default=None, min_length=1, max_length=200)
    """rllib: a Ray cluster that is already running (HOST:PORT, or `auto`) instead of one of the run's own."""
    nodes: Whole = Field(default=1, ge=1, le=64)
    """rllib: Ray nodes. More than one without an allocation are emulated on this machine."""


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
    if isinstance(value, str) and re.fullmatch(r"sweep-\d+", value):
        raise ValueError("a run's name is not that of a sweep's folder")
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
    env: Annotated[Env, BeforeValidator(bare_id)]
    model: Annotated[Model, BeforeValidator(bare_id)] = Model()
    algo: Annotated[Annotated[Algo, Field(discriminator="id")], BeforeValidator(bare_id)] = Ppo()
    policies: dict[str, PolicySettings] = Field(default={}, max_length=1000)
    """Several policies by name, with the same model and algo: `{}` learns, `{algo: {lr: 1e-4}}` learns with other
    numbers, `{from: RUN@STEP}` is frozen, `{past: {of: main}}` is main as it was earlier. The first must learn, and is
    what evaluations measure. None named: one policy, `main`."""
    match: dict[str, Pool] = Field(default={}, max_length=1000)
    """Which policy plays which agent of the env, by the agent's name or a pattern (`player_*`; the first that fits):
    `main`, or a pool with weights, `{main: 0.2, rival: 0.8}`, drawn anew for every episode. None named: the first
    policy plays everybody; in a population, everybody is drawn from all that learn."""
    population: Population | None = None
    engine: Engine = Engine()
    stop: Stop = Stop()
    eval: Eval = Eval()
    save: Save = Save()
    track: Track = Track()

    @model_validator(mode="before")
    @classmethod
    def _engine_that_has_it(cls, values: Any) -> Any:
        """An algorithm that only RLlib has picks that engine where none is named."""
        if isinstance(values, dict):
            algo, engine = values.get("algo"), values.get("engine")
            word = algo.get("id") if isinstance(algo, dict) else getattr(algo, "id", algo)
            if word in ONLY_RLLIB and (engine is None or (isinstance(engine, dict) and "kind" not in engine)):
                return {**values, "engine": {**(engine or {}), "kind": "rllib"}}
            if word in ONLY_RLLIB and isinstance(engine, Engine) and "kind" not in engine.model_fields_set:
                return {**values, "engine": engine.model_copy(update={"kind": "rllib"})}
        return values

    @property
    def run_name(self) -> str:
        """The name given, or one made from the env's id."""
        if self.name:
            return self.name
        stem = self.env.id.replace("\\", "/").rsplit("/", 1)[-1]
        cleaned = re.sub(r"[^A-Za-z0-9_.+-]+", "-", stem.replace(".py", "")).strip("-.")
        return re.sub(r"\.\.+", ".", cleaned)[:80] or "run"

    @property
    def policy_settings(self) -> dict[str, PolicySettings]:
        """Every policy by name, in order: those named, or `main` alone."""
        return self.policies or {"main": PolicySettings()}

    @property
    def learning(self) -> list[str]:
        """Names of the policies that learn; the first is the one that is measured."""
        return [name for name, member in self.policy_settings.items() if member.learns]

    @property
    def past(self) -> dict[str, Past]:
        """The pools of past versions, by name."""
        return {name: member.past for name, member in self.policy_settings.items() if member.past is not None}

    def algo_of(self, policy: str) -> Algo:
        """`algo` with the numbers that are others for one policy."""
        changes = self.policy_settings[policy].algo.given()
        return self.algo.model_copy(update=changes) if changes else self.algo

    @property
    def squashed(self) -> bool:
        """Whether actions are drawn before they are squashed into their bounds, each with a spread of its own."""
        return family(self.algo) == "sac"

    @property
    def envs(self) -> int:
        """Copies of the env over all processes."""
        engine = self.engine
        if engine.envs_per_runner is not None and isinstance(engine.runners, int):
            return max(1, engine.runners) * engine.envs_per_runner
        return engine.envs

    @property
    def batch(self) -> int:
        """Env steps per update; with several agents in an env, the fewest: at least one of them acts at any time."""
        return self.algo.rollout * self.envs
