"""Settings of an experiment's sections, each with its default and its meaning; experiment.py joins them.

The string after a field is its help text, also on the reference page and in the JSON schema.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

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
)


class Env(Settings):
    """The environment, and how its observations, rewards and episodes are processed."""

    id: str = Field(min_length=1, max_length=500)
    """Gymnasium id, `atari:GAME`, `car-racing:fast`, `doom:SCENARIO`, `envpool:NAME`, a built-in name (identity, basic,
    memory, delay, timeout, CarPass-v0, pennies, visitors), `package.module:Class` or `path/file.py:Class`. PettingZoo
    parallel envs work too."""
    options: Options = {}
    """Keyword arguments of the env's constructor, checked against its signature."""
    wrappers: list[PluginRef] = []
    """Gymnasium wrappers, innermost first: a built-in name or an import string, each with options."""
    frameskip: Whole = Field(default=1, ge=1, le=1000)
    """Calls of the env's step() per env step: the action is repeated and the rewards are summed. Envs that skip frames
    themselves (atari:, car-racing:, doom:, Atari in envpool:) have their own option for that."""
    frame_stack: Whole = Field(default=1, ge=1, le=64)
    """Number of latest observations that are stacked (images along channels, vectors end to end)."""
    time_limit: Count | None = None
    """Env steps after which an episode is truncated. Default: the env's own limit."""
    reward_scale: Finite = 1.0
    """Factor for rewards before learning; reported returns are not scaled."""
    reward_clip: Positive | None = None
    """Clip rewards to [-x, x] before learning, after scaling; reported returns are not clipped."""
    strict: bool = True
    """Refuse an env whose observations do not have the dtype of its observation space, or that prints to stdout in
    reset() or step(). With false, observations are cast and printed text goes to stderr."""
    restore_mode: Literal["auto", "state", "rerun", "fresh"] = "auto"
    """How running episodes continue after a resume: from the env's own saved state, by re-running their actions, or not
    at all (fresh: new episodes begin). Auto takes the first that works."""
    native: bool = True
    """Step all copies in one call if the env has a vectorised version (CartPole, Atari, EnvPool)."""
    isolate: Literal["none", "process", "thread"] = "none"
    """Run each copy of the env in its own process or thread, in training and evaluation: for simulators that allow one
    instance per process or thread, and to step slow envs in parallel. Turns `native` off."""
    decorrelate: CountOrZero = 0
    """Cut the first training episode of each copy after 1 to this many env steps, drawn at random, so that the copies'
    episodes do not end together. Cut episodes are not counted. 0 cuts none."""
    start_timeout: Positive = 60.0
    """Seconds allowed for creating the env and for its first steps."""
    step_timeout: Positive = 60.0
    """Seconds after which a worker is replaced whose env does not return from step()."""
    reset_timeout: Positive = 300.0
    """Seconds after which a worker is replaced whose env does not return from reset()."""


class Memory(Settings):
    """The recurrent core between encoders and heads."""

    kind: Literal["none", "lstm", "gru"] = "none"
    """Type of recurrent layer."""
    size: Whole = Field(default=128, ge=1, le=16384)
    """Units of the recurrent layer."""
    bptt: Whole = Field(default=16, ge=1, le=4096)
    """Env steps of backpropagation through time; `algo.rollout` must be a multiple of it."""


class Normalise(Settings):
    """Normalisation by running statistics, which are saved with the weights."""

    obs: bool = False
    """Normalise observations that are not images to mean 0 and variance 1."""
    images: bool = False
    """Normalise each pixel of images by its own mean and variance, so that moving objects stand out."""
    returns: bool = False
    """Normalise the critic's targets to mean 0 and variance 1."""


class Model(Settings):
    """The network: encoders, an optional recurrent layer, a critic and a head for the action space."""

    id: str = Field(default="actor_critic", min_length=1, max_length=500)
    """The built-in `actor_critic` or your own model: `nets/custom.py` (class CustomModel), `file.py:Class` or
    `package.module:Class`."""
    options: Options = {}
    """Keyword arguments of your own model's constructor; the built-in model uses the settings below."""
    encoder: PluginRef = Plugin(id="auto")
    """Encoder for every observation: auto, mlp, simple, nature, impala, resnet, text, or an import string."""
    encoders: dict[str, PluginRef] = {}
    """Encoders for individual observations, by name; they override `encoder`."""
    hidden: list[Width] = Field(default=[64, 64], max_length=64)
    """Widths of the fully connected layers after the encoders (for vectors, instead of an encoder)."""
    activation: Literal["tanh", "relu", "elu", "silu", "gelu", "leaky_relu"] = "tanh"
    """Activation function between layers."""
    memory: Memory = Memory()
    critic: Literal["separate", "shared"] = "separate"
    """separate: the critic has its own encoders, memory and layers. shared: it is a second head of the actor."""
    previous: bool = False
    """Add the previous action and reward to the observations."""
    normalise: Normalise = Normalise()
    log_std: Annotated[float, Field(ge=-20, le=2)] = 0.0
    """Initial log standard deviation of continuous actions."""
    init: str | None = None
    """Run or checkpoint to load initial weights from: weights that fit are loaded, the others are listed."""


class Engine(Settings):
    """The processes that sample and learn. `local`: one machine, as fast as possible. `serial`: the simple reference,
    which steps envs, chooses actions and learns in one process, one after another. `rllib`: Ray RLlib on one machine
    or many (extra `ray`)."""

    kind: Literal["local", "serial", "rllib"] = "local"
    """Which engine. Algorithms that only RLlib has select `rllib` automatically."""
    envs: Whole = Field(default=8, ge=1, le=100_000)
    """Total copies of the env over all workers or runners; an env with several agents counts once."""
    workers: CountOrZero | Literal["auto"] = "auto"
    """Processes that step envs and choose actions, each with an equal share of the envs; 0 uses the learner's process.
    Auto decides by machine and env. The serial engine steps that many groups of envs one after another."""
    mode: Literal["sync", "async"] = "sync"
    """sync: sampling and learning alternate, and workers always use the newest weights. async: workers sample while the
    learner learns, with slightly older weights."""
    inference: Literal["auto", "worker", "batched"] = "auto"
    """Which process chooses actions. worker: each worker, with its own copy of the policy on the CPU. batched: one
    actor process, with a copy on `device`, serves all waiting workers in one batch. Auto: batched with a GPU, workers
    and a single policy; else worker."""
    max_lag: Count = 20
    """Async mode: samples from weights more than this many updates old are discarded and counted."""
    threads: Count | Literal["auto"] = "auto"
    """Torch threads of each learner. Auto decides by the cores that are free."""
    learners: Whole = Field(default=1, ge=1, le=64)
    """Learner processes: each computes gradients for its part of every minibatch, and all take the same gradient step.
    With `device: cuda`, each uses its own GPU."""
    affinity: bool = False
    """Pin each worker to one core, round-robin; the learner may use all cores."""
    tune: bool = False
    """Before the run is created, benchmark for some seconds as `tiltyard tune` does, choose workers, envs, rollout,
    minibatch and (unless it is set) mode for this machine, and write them into the run's settings."""
    restarts: CountOrZero = 1000
    """How many crashed or hung workers may be replaced before the run fails."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device of the network; auto uses a GPU if there is one."""
    runners: CountOrZero | Literal["auto"] = "auto"
    """rllib: processes that step envs and choose actions, on any node; 0 uses the driver's process. Auto uses the CPUs
    that the learners leave, at most one per env."""
    envs_per_runner: Count | None = None
    """rllib: copies of the env in each runner; replaces `envs`."""
    cpus: Count | None = None
    """rllib: CPUs that Ray may use on each of `nodes`. Default: those of this machine."""
    gpus: NotNegative | None = None
    """rllib: GPUs per learner; fractions are allowed. Default: 1 with `device: cuda`."""
    object_store: Positive | None = None
    """rllib: GiB of shared memory for Ray's object store, on each node."""
    temp_dir: str | None = Field(default=None, min_length=1, max_length=60)
    """rllib: folder for Ray's sockets and logs; must be short because socket paths are limited. Default: a system
    temporary folder."""
    address: str | None = Field(default=None, min_length=1, max_length=200)
    """rllib: address of a running Ray cluster (HOST:PORT or `auto`) to use instead of starting one."""
    nodes: Whole = Field(default=1, ge=1, le=64)
    """rllib: number of Ray nodes. Without a job allocation, several nodes are emulated on this machine."""


class Stop(Settings):
    """When the run is done. The first condition that is met ends the run and is named in its status."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    env_steps: Count | None = 1_000_000
    """Env steps (decisions), summed over all copies of the env."""
    frames: Count | None = None
    """Simulator frames: env steps times frameskip, including the env's own frameskip."""
    seconds: Positive | None = None
    """Seconds of training, counted across resumes."""
    updates: Count | None = None
    """Updates: passes of the learner over a batch."""
    return_: Annotated[Finite | None, Field(alias="return")] = None
    """Mean return of an evaluation."""
    train_return: Finite | None = None
    """Mean return of the last 100 training episodes."""


class Eval(Settings):
    """Evaluations during training. They use fixed seeds and never training's random streams."""

    every: CountOrZero = 50_000
    """Env steps between evaluations; 0 evaluates only at the end."""
    episodes: Whole = Field(default=10, ge=1, le=1_000_000)
    """Episodes per evaluation."""
    greedy: bool = True
    """Take the most likely action instead of sampling one."""
    at_end: bool = True
    """Evaluate once more when the run is done."""
    envs: Whole = Field(default=8, ge=1, le=10_000)
    """Copies of the env stepped together in an evaluation."""
    seed: CountOrZero = 1_000_003
    """Root of the episodes' seeds; the same for every run, so that runs are comparable."""
    video: bool = False
    """Record the first episode of each evaluation as a video in videos/."""
    time_limit: Count | None = 100_000
    """Env steps after which an evaluation episode is cut if the env does not end it."""


class Save(Settings):
    """Checkpoints: when they are written and which are kept."""

    env_steps: Count | None = None
    """Env steps between checkpoints."""
    seconds: Positive | None = 300.0
    """Seconds between checkpoints."""
    updates: Count | None = None
    """Updates between checkpoints."""
    last: Whole = Field(default=2, ge=1, le=100_000)
    """Number of newest checkpoints to keep."""
    best: Whole = Field(default=1, ge=0, le=100_000)
    """Number of best checkpoints to keep."""
    metric: str = Field(default="eval/return", min_length=1, max_length=200)
    """Metric that ranks checkpoints: its newest value when the checkpoint is written."""
    mode: Literal["max", "min"] = "max"
    """Whether a higher (max) or lower (min) metric is better."""
    milestones: list[Count] = Field(default=[], max_length=10_000)
    """Env steps at which a checkpoint is written and kept forever."""
    async_: Annotated[bool, Field(alias="async")] = True
    """Write a checkpoint of up to 256 MiB from a copy while training continues. Larger ones are always written between
    updates, without a copy."""
    patience: NotNegative = 600.0
    """Seconds for which training continues while no checkpoint can be written (full disk, lost file server)."""


class Wandb(Settings):
    """Weights & Biases tracker (extra `wandb`)."""

    mode: Literal["off", "offline", "online"] = "off"
    """off; offline: written to the run folder for a later `wandb sync`; online: sent while training."""
    entity: str | None = None
    """W&B user or team."""
    project: str = "tiltyard"
    """W&B project."""
    group: str | None = None
    """W&B group. Default: the env's id."""
    job_type: str = "train"
    """W&B job type."""
    tags: list[str] = []
    """W&B tags, added to the experiment's own."""


class Track(Settings):
    """Metric records and trackers. metrics.jsonl is always written; trackers get a copy of it."""

    every: Count = 1
    """Updates between records."""
    tensorboard: bool = True
    """Write TensorBoard events to tb/ in the run folder."""
    wandb: Annotated[Wandb, BeforeValidator(lambda v: {"mode": v} if isinstance(v, str) else v)] = Wandb()
