"""An experiment: every section of settings; nothing about files, layers or where it runs.

Checks that need two settings are in cross_checks.py; the settings themselves are in sections.py, algos.py and
policies.py.

    env -> model -> algo -> engine    policies, match, population    stop, eval, save, track
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tiltyard.config.algos import Algo, Ppo
from tiltyard.config.clone_algo import Clone
from tiltyard.config.fields import Positive, Settings, Whole, bare_id
from tiltyard.config.policies import Past, PolicySettings, Population
from tiltyard.config.rllib_algos import ONLY_RLLIB
from tiltyard.config.sections import Engine, Env, Eval, Model, Save, Stop, Track

SCHEMA: Literal[1] = 1
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}")


def _run_name(value: Any) -> Any:
    if isinstance(value, str) and (not NAME.fullmatch(value) or ".." in value):
        raise ValueError("must be 1 to 80 letters, digits and . _ + -, starting with a letter or digit")
    if isinstance(value, str) and re.fullmatch(r"sweep-\d+", value):
        raise ValueError("must not look like the folder of a sweep")
    return value


def _pool(value: Any) -> Any:
    """`player_0: main` is short for `player_0: {main: 1.0}`."""
    return {value: 1.0} if isinstance(value, str) else value


Pool = Annotated[dict[str, Positive], BeforeValidator(_pool, json_schema_input_type=str | dict[str, Positive])]


def family(algo: Algo) -> str:
    """ppo, a2c, impala, appo, dqn or sac, for RLlib's own names too."""
    word = algo.id.removeprefix("rllib:").lower()
    return "sac" if word == "tqc" else word


def episode_digest(env: Env) -> str:
    """Hash of the settings that define an episode; the others only affect learning and checks.

    A hash, because options may hold secrets; without defaults, because later versions have more settings.
    """
    defining = {"id", "options", "wrappers", "frameskip", "frame_stack", "time_limit"}
    return sha256(env.model_dump_json(include=defining, exclude_defaults=True).encode()).hexdigest()


class Experiment(Settings):
    """What is learned and how. Where it runs is set by a site profile."""

    version: Literal[1] = SCHEMA
    """Version of this file's schema."""
    name: Annotated[str | None, BeforeValidator(_run_name)] = None
    """Folder for the runs, below the runs root. Default: derived from the env's id."""
    seed: Whole = Field(default=0, ge=0, le=2**63 - 1)
    """Root of every random stream of the run."""
    notes: str = Field(default="", max_length=10_000)
    """Free text; `tiltyard ls` shows it and searches in it."""
    tags: list[Annotated[str, Field(min_length=1, max_length=80)]] = Field(default=[], max_length=100)
    """Words to filter `tiltyard ls` by."""
    use: list[str] = Field(default=[], max_length=20)
    """Presets, which this file's own values override: names of built-in presets or paths of YAML files."""
    resume: str = Field(default="auto", min_length=1, max_length=4096)
    """Where a new run starts: `auto` and `never` start from scratch, a path starts from that checkpoint. `tiltyard
    resume RUN` always continues from the run's newest valid checkpoint; with `resume=never` it starts over once."""
    env: Annotated[Env, BeforeValidator(bare_id)]
    model: Annotated[Model, BeforeValidator(bare_id)] = Model()
    algo: Annotated[Algo, BeforeValidator(bare_id)] = Ppo()
    policies: dict[str, PolicySettings] = Field(default={}, max_length=1000)
    """Several policies by name, all with the same model and algo: `{}` learns, `{algo: {lr: 1e-4}}` learns with other
    numbers, `{from: RUN@STEP}` is frozen, `{past: {of: main}}` is a pool of earlier versions of main. The first must
    learn; evaluations measure it. Default: one policy, `main`."""
    match: dict[str, Pool] = Field(default={}, max_length=1000)
    """Which policy plays which agent of the env, by the agent's name or a pattern (`player_*`; the first match counts):
    `main`, or a pool with weights, `{main: 0.2, rival: 0.8}`, drawn again for every episode. Default: the first policy
    plays all agents; in a population, agents are drawn from all policies that learn."""
    population: Population | None = None
    engine: Engine = Engine()
    stop: Stop = Stop()
    eval: Eval = Eval()
    save: Save = Save()
    track: Track = Track()

    @model_validator(mode="before")
    @classmethod
    def _default_engine(cls, values: Any) -> Any:
        """Select the rllib engine for an algorithm that only RLlib has, unless an engine is given."""
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
        """The given name, or one derived from the env's id."""
        if self.name:
            return self.name
        stem = self.env.id.replace("\\", "/").rsplit("/", 1)[-1]
        cleaned = re.sub(r"[^A-Za-z0-9_.+-]+", "-", stem.replace(".py", "")).strip("-.")
        return re.sub(r"\.\.+", ".", cleaned)[:80] or "run"

    @property
    def policy_settings(self) -> dict[str, PolicySettings]:
        """Every policy by name, in order; `main` alone if none is given."""
        return self.policies or {"main": PolicySettings()}

    @property
    def several_policies(self) -> bool:
        return len(self.policy_settings) > 1

    @property
    def learning(self) -> list[str]:
        """Names of the policies that learn; evaluations measure the first."""
        return [name for name, policy in self.policy_settings.items() if policy.from_ is None and policy.past is None]

    @property
    def past(self) -> dict[str, Past]:
        """The pools of past versions, by name."""
        return {name: policy.past for name, policy in self.policy_settings.items() if policy.past is not None}

    def algo_of(self, policy: str) -> Algo:
        """`algo` with the numbers that this policy overrides."""
        changes = self.policy_settings[policy].algo.model_dump(exclude_none=True)
        return self.algo.model_copy(update=changes) if changes else self.algo

    @property
    def squashed(self) -> bool:
        """Whether the policy is a tanh-squashed Gaussian with a state-dependent standard deviation (sac)."""
        return family(self.algo) == "sac"

    @property
    def envs(self) -> int:
        """Copies of the env, summed over all processes."""
        engine = self.engine
        if engine.envs_per_runner is not None and isinstance(engine.runners, int):
            return max(1, engine.runners) * engine.envs_per_runner
        return engine.envs

    @property
    def batch(self) -> int:
        """Env steps per update. With several agents per env this is the minimum: at least one acts at any time."""
        return self.algo.batch if isinstance(self.algo, Clone) else self.algo.rollout * self.envs
