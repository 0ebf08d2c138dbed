"""Settings that are each fine and impossible together. Pure: asks no file system and no machine.

Every sentence names all settings it is about by their dotted names; `load` relies on that to keep quiet about settings
that are already known to be wrong by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from tiltyard.config.algos import ONLY_RLLIB, Changes, KlAdaptive, Linear, Piecewise, Ppo, family
from tiltyard.config.experiment import NAME, Experiment, Model, Stop
from tiltyard.config.search_space import Choices, Dimension, dimension
from tiltyard.config.validation import validate
from tiltyard.errors import Problem, did_you_mean
from tiltyard.plugins.resolve import kind_of, short

MOST_THREADS = 1024


def cross_check(experiment: Experiment) -> list[Problem]:
    """Problems that only two settings together show."""
    return [
        *_batches(experiment),
        *_schedules(experiment),
        *_policies(experiment),
        *_past(experiment),
        *_population(experiment),
        *_workers(experiment),
        *_rllib(experiment),
        *_ends(experiment),
    ]


# Settings of the built-in model's layers: a model of the user's own makes its own.
LAYERS = ("hidden", "activation", "encoder", "encoders", "critic", "memory.kind", "memory.size")


def makes_own_layers(model_id: str) -> bool:
    """Whether a model is the user's own, by its id."""
    return kind_of(model_id, ("actor_critic",)) not in (None, "builtin")


def ignored_settings(experiment: Experiment) -> Iterator[Problem]:
    """Settings of the built-in model's layers that another model would ignore in silence."""
    model, plain = experiment.model, Model()
    if makes_own_layers(model.id):
        for name in LAYERS:
            value = attrgetter(name)(model)
            if value != attrgetter(name)(plain):
                yield _ignored(f"model.{name}", value, model.id)


def _ignored(setting: str, value: object, model: str) -> Problem:
    hint = "give it to your own model as one of model.options, or leave it out"
    return Problem(setting, short(value), f"is for the built-in model and model.id = {model} is another", hint)


def _batches(experiment: Experiment) -> Iterator[Problem]:
    algo, memory, envs = experiment.algo, experiment.model.memory, experiment.engine.envs
    recurrent = memory.kind != "none"
    if recurrent and algo.rollout % memory.bptt:
        near = max(1, round(algo.rollout / memory.bptt)) * memory.bptt
        message = f"is no multiple of model.memory.bptt = {memory.bptt}"
        yield Problem(
            "algo.rollout", str(algo.rollout), message, f"set algo.rollout={near}, or change model.memory.bptt"
        )
    if not isinstance(algo, Ppo):
        return
    if algo.minibatch > experiment.batch:
        batch = f"{experiment.batch} (algo.rollout {algo.rollout} x engine.envs {envs})"
        hint = f"set algo.minibatch={experiment.batch} or less"
        yield Problem("algo.minibatch", str(algo.minibatch), f"is more than the batch of {batch}", hint)
    if recurrent and algo.minibatch < memory.bptt:
        message = f"is less than model.memory.bptt = {memory.bptt}"
        yield Problem("algo.minibatch", str(algo.minibatch), message, f"set algo.minibatch={memory.bptt} or more")


def _schedules(experiment: Experiment) -> Iterator[Problem]:
    for name in ("lr", "clip", "entropy", "kl"):
        schedule, setting = getattr(experiment.algo, name, None), f"algo.{name}"
        if isinstance(schedule, Piecewise):
            steps = [point[0] for point in schedule.points]
            if steps != sorted(set(steps)):
                hint = "write [[0, 3e-4], [1000000, 0]]"
                yield Problem(
                    f"{setting}.points", short(schedule.points), "env steps must grow from point to point", hint
                )
        elif isinstance(schedule, Linear) and schedule.over is None and experiment.stop.env_steps is None:
            yield Problem(f"{setting}.over", "", "is needed when there is no stop.env_steps", f"set {setting}.over")
        elif isinstance(schedule, KlAdaptive) and not schedule.lowest <= schedule.start <= schedule.highest:
            hint = f"change {setting}.min or {setting}.max"
            message = f"lies outside [{schedule.lowest:g}, {schedule.highest:g}]"
            yield Problem(f"{setting}.start", str(schedule.start), message, hint)


def _policies(experiment: Experiment) -> Iterator[Problem]:
    """Who plays whom is judged by names alone; whether the env has such agents is known when it was probed."""
    names = list(experiment.policy_settings)
    for place, (name, member) in enumerate(experiment.policies.items()):
        setting, algo = f"policies.{name}", experiment.algo
        if not NAME.fullmatch(name) or ".." in name:
            rule = "is no name for a policy: 1 to 80 letters, digits and . _ + -, a letter or digit first"
            yield Problem(setting, "", rule, "give it another name")
        why = "past" if member.past is not None else "from"
        if not member.learns and place == 0:
            hint, given = f"name one that learns before {name}", "" if member.from_ is None else short(member.from_)
            yield Problem(f"{setting}.{why}", given, "the first of policies must learn", hint)
        for number, value in member.algo.given().items():
            if not member.learns:
                message = f"{name} is frozen by {setting}.{why} and never learns"
                yield Problem(f"{setting}.algo.{number}", short(value), message, "leave one of them out")
            elif number not in type(algo).model_fields:
                yield Problem(f"{setting}.algo.{number}", short(value), f"algo.id = {algo.id} has no {number}", "")
    for pattern, pool in experiment.match.items():
        if not pool:
            hint = f"name a policy: {names[0]}"
            yield Problem(f"match.{pattern}", "{}", "is an empty pool: nobody would play", hint)
        for name in [name for name in pool if name not in names]:
            hint = did_you_mean(name, names)
            yield Problem(f"match.{pattern}", short(name), "is none of the policies", hint)


def _past(experiment: Experiment) -> Iterator[Problem]:
    """Past versions are of a policy that learns here."""
    for name, past in experiment.past.items():
        setting = f"policies.{name}.past"
        if past.of not in experiment.learning:
            message = f"is none of the policies that learn, and {setting} is made of those"
            yield Problem(f"{setting}.of", short(past.of), message, did_you_mean(past.of, experiment.learning))
        if experiment.policy_settings[name].from_ is not None:
            yield Problem(f"policies.{name}.from", "", f"is one policy, {setting} are others", "leave one of them out")


_RANKS = ("return", "episode/", "loss/", "learn/")


def _population(experiment: Experiment) -> Iterator[Problem]:
    population, learning = experiment.population, experiment.learning
    if population is None:
        return
    if len(learning) < 2:
        message = f"needs at least two policies that learn, and policies has {len(learning)}"
        yield Problem("population", "", message, "set policies={a: {}, b: {}, c: {}, d: {}}")
    if not population.metric.startswith(_RANKS):
        message = "is nothing that each policy has of its own"
        yield Problem(
            "population.metric", short(population.metric), message, "return, episode/NAME, loss/... , learn/..."
        )
    if not population.space:
        yield Problem("population.space", "", "is empty", "say what differs: algo.lr: {log: [1e-5, 1e-2]}")
    known = [name for name in Changes.model_fields if name in type(experiment.algo).model_fields]
    for line, value in population.space.items():
        keys = tuple(part.strip() for part in line.split(","))
        strange = [key for key in keys if key.removeprefix("algo.") not in known or "." not in key]
        for key in strange:
            hint = did_you_mean(key, [f"algo.{name}" for name in known])
            yield Problem(f"population.space.{line}", "", f"{key} cannot change while training", hint)
        try:
            found = dimension(keys, value)
            if not strange:
                _try_values(found)
        except ValueError as error:
            message, hint = error.args if len(error.args) == 2 else (str(error), "")
            yield Problem(f"population.space.{line}", short(value), message, hint)


def _try_values(found: Dimension) -> None:
    """ValueError for a value that a policy could not have."""
    ends = found.values if isinstance(found, Choices) else ((found.low,), (found.high,))
    for values in ends:
        for key, value in zip(found.keys, values, strict=True):
            name = key.removeprefix("algo.")
            problems = validate(Changes, {name: value})[1]
            for _, problem in problems:
                raise ValueError(f"reaches {value}: {name} {problem.message}", problem.hint)


def _workers(experiment: Experiment) -> Iterator[Problem]:
    engine = experiment.engine
    if isinstance(engine.workers, int) and engine.workers and engine.envs % engine.workers:
        near = max(1, round(engine.envs / engine.workers)) * engine.workers
        message = f"cannot be shared evenly by engine.workers = {engine.workers}"
        yield Problem("engine.envs", str(engine.envs), message, f"set engine.envs={near}, or change engine.workers")
    if isinstance(engine.threads, int) and engine.threads > MOST_THREADS:
        message = f"is more than {MOST_THREADS:,}, which no machine has cores for"
        yield Problem("engine.threads", str(engine.threads), message, "set engine.threads=auto")
    if engine.kind == "serial" or engine.workers == 0:
        other = "engine.kind = serial" if engine.kind == "serial" else "engine.workers = 0"
        none = f"needs workers, and {other} has none"
        if engine.mode == "async":
            hint = "set engine.mode=sync, or engine.kind=local with workers"
            yield Problem("engine.mode", "'async'", none, hint)
        if engine.affinity:
            yield Problem("engine.affinity", "true", none, "leave engine.affinity out")
        if engine.inference == "batched":
            hint = "set engine.inference=auto, or engine.kind=local with workers"
            yield Problem("engine.inference", "'batched'", none, hint)
    if engine.inference == "batched" and len(experiment.policy_settings) > 1:
        message = f"decides for one policy, and policies has {len(experiment.policy_settings)}"
        yield Problem("engine.inference", "'batched'", message, "set engine.inference=worker")


RLLIBS = ("runners", "envs_per_runner", "cpus", "gpus", "object_store", "temp_dir", "address", "nodes")


def _rllib(experiment: Experiment) -> Iterator[Problem]:
    """Settings and algorithms of one engine with another."""
    engine, algo = experiment.engine, experiment.algo
    if engine.kind != "rllib":
        plain = type(engine)()
        for name in RLLIBS:
            value = getattr(engine, name)
            if value != getattr(plain, name):
                message = f"is for engine.kind = rllib, and it is {engine.kind}"
                yield Problem(f"engine.{name}", short(value), message, f"set engine.kind=rllib, or leave {name} out")
        if algo.id in ONLY_RLLIB:
            message = f"is RLlib's, and engine.kind = {engine.kind}"
            yield Problem("algo.id", repr(algo.id), message, "leave engine.kind out, or set engine.kind=rllib")
        return
    if experiment.population is not None:
        message = "needs policies that take over each other's weights, and engine.kind = rllib keeps its learners apart"
        yield Problem("population", "", message, "set engine.kind=local; a sweep can have a population of runs")
    for name in experiment.past:
        message = "has versions that change while training, and the runners of engine.kind = rllib are given none"
        yield Problem(
            f"policies.{name}.past", "", message, "set engine.kind=local, or freeze one with policies.NAME.from"
        )
    runners = engine.runners if isinstance(engine.runners, int) else None
    if engine.envs_per_runner is not None and runners is None:
        message = "needs a number of them: engine.runners is auto"
        yield Problem("engine.envs_per_runner", str(engine.envs_per_runner), message, "set engine.runners=2")
    elif engine.envs_per_runner is None and runners and engine.envs % runners:
        near = max(1, round(engine.envs / runners)) * runners
        message = f"cannot be shared evenly by engine.runners = {runners}"
        yield Problem("engine.envs", str(engine.envs), message, f"set engine.envs={near}, or change engine.runners")
    if runners == 0 and family(algo) in ("appo", "impala"):
        message = f"leaves nobody who acts while the learner learns, which is what algo.id = {algo.id} is for"
        yield Problem("engine.runners", "0", message, "set engine.runners=1 or more")
    if engine.address is not None and engine.nodes > 1:
        hint = "leave engine.nodes out"
        yield Problem("engine.nodes", str(engine.nodes), f"are emulated, and engine.address = {engine.address}", hint)


def _ends(experiment: Experiment) -> Iterator[Problem]:
    stop, save = experiment.stop, experiment.save
    if all(getattr(stop, field) is None for field in Stop.model_fields):
        hint = "set stop.env_steps or stop.seconds"
        yield Problem("stop", "", "has no condition: the run would never end", hint)
    if stop.return_ is not None and experiment.eval.every == 0:
        message = "needs evaluations, and eval.every is 0"
        yield Problem("stop.return", str(stop.return_), message, "set eval.every=10000")
    if save.env_steps is None and save.seconds is None and save.updates is None:
        hint = "set save.seconds or save.env_steps"
        yield Problem("save", "", "has no interval: a killed run would start over", hint)
