import pytest

from tiltyard.config.experiment import Experiment
from tiltyard.config.load import load
from tiltyard.config.schedules import KlAdaptive, Linear, Piecewise
from tiltyard.engines.rllib.algorithm_config import option_problems
from tiltyard.engines.rllib.ray_cluster import Needs
from tiltyard.engines.rllib.settings_map import (
    REFUSED,
    envs_per_runner,
    needs,
    problems,
    runner_count,
    schedule,
)
from tiltyard.engines.rllib.worker_spec import WorkerSpec
from tiltyard.envs.probe import probe
from tiltyard.errors import ConfigError, UseError

ALGOS = ("ppo", "impala", "appo", "dqn", "sac", "rllib:PPO", "rllib:TQC")


# Settings that RLlib gets, each by a line of algorithm_config.py, the cluster, or our own runner, module and learner.
_ACTOR_CRITIC = "id rollout batch lr gamma value_coef entropy max_grad_norm adam_eps rho_clip"
_REPLAY = "id rollout batch replays gamma n_step warmup target_every tau replay max_grad_norm lr"
_ENGINE = "kind envs runners envs_per_runner learners threads restarts device cpus gpus object_store temp_dir address"
_PPO = "id rollout minibatch epochs lr gamma gae_lambda clip value_clip value_coef entropy kl normalise_advantage"
TRANSLATED = {"env", "model", "policies", "match", "stop", "eval", "save", "track", "seed"} | {
    f"{section}.{name}"
    for section, names in {
        "engine": f"{_ENGINE} nodes",
        "ppo": f"{_PPO} adam_eps max_grad_norm",
        "impala": _ACTOR_CRITIC,
        "appo": f"{_ACTOR_CRITIC} clip kl kl_target target_every",
        "dqn": f"{_REPLAY} double dueling epsilon adam_eps",
        "sac": f"{_REPLAY} critic_lr alpha_lr alpha target_entropy",
        "rllib": "id rollout options",
    }.items()
    for name in names.split()
}


def all_settings(experiment: Experiment) -> list[str]:
    word = "rllib" if experiment.algo.id.startswith("rllib:") else experiment.algo.id
    own = [f"{word}.{name}" for name in type(experiment.algo).model_fields]
    engine = [f"engine.{name}" for name in type(experiment.engine).model_fields]
    return [*own, *engine, "env", "model", "policies", "match", "stop", "eval", "save", "track", "seed"]


def experiment(algo: str = "ppo", **engine: object) -> Experiment:
    return Experiment(env="CartPole-v1", algo={"id": algo}, engine={"kind": "rllib", **engine})


@pytest.mark.parametrize("algo", ALGOS)
def test_every_setting_is_either_translated_or_refused(algo):
    names = all_settings(experiment(algo))
    assert len(names) == len(set(names)) > 30
    assert [name for name in names if (name in TRANSLATED) == (name in REFUSED)] == []


def test_tables_contain_only_known_settings():
    known = {name for algo in ALGOS for name in all_settings(experiment(algo))}
    assert {*TRANSLATED, *REFUSED} - known == set()


@pytest.mark.parametrize("algo", ALGOS)
def test_defaults_have_no_problem(algo):
    assert list(problems(experiment(algo))) == []


@pytest.mark.parametrize(
    ("algo", "override", "setting"),
    [
        ("ppo", "engine.workers=2", "engine.workers"),
        ("ppo", "engine.mode=async", "engine.mode"),
        ("ppo", "engine.max_lag=3", "engine.max_lag"),
        ("ppo", "engine.affinity=true", "engine.affinity"),
        ("ppo", "engine.inference=batched", "engine.inference"),
        ("ppo", "engine.tune=true", "engine.tune"),
        ("ppo", "algo.kl_stop=0.1", "algo.kl_stop"),
        ("ppo", "algo.advantage=vtrace", "algo.advantage"),
        ("ppo", "algo.rho_clip=2.0", "algo.rho_clip"),
        ("dqn", "model.memory={kind: lstm, bptt: 1}", "model.memory.kind"),
        ("impala", "model.normalise.returns=true", "model.normalise.returns"),
        ("appo", "algo.lr={kind: kl_adaptive, start: 1e-3}", "algo.lr"),
    ],
)
def test_refusal_names_setting_and_reason(algo, override, setting):
    loaded = load("CartPole-v1", [f"algo.id={algo}", "engine.kind=rllib", override])
    (problem,) = problems(loaded.experiment)
    assert problem.setting == setting and problem.message and problem.hint


def test_rllib_options_are_checked_before_anything_starts():
    def output(algo: str, **options: object) -> list[str]:
        settings = Experiment(env="CartPole-v1", algo={"id": algo, "options": options}, engine={"runners": 1})
        worker_spec = WorkerSpec(settings, probe(settings.env, base=(), previous=False), ())
        return [f"{problem.setting}: {problem.message} {problem.hint}" for problem in option_problems(worker_spec)]

    assert output("rllib:PPO", lr=1e-4, num_epochs=3) == []
    assert output("rllib:DQN", num_epoch=3, model={}) == [
        "algo.options.num_epoch: is not an option of rllib:DQN did you mean 'num_epochs'?",
        "algo.options.model: cannot be set: the network is set by `model` remove it",
    ]
    (refused,) = output("rllib:PPO", train_batch_size_per_learner=400, minibatch_size=500)
    assert refused.startswith("algo.options: RLlib refuses them: ") and "minibatch_size" in refused
    (refused,) = output("rllib:PPO", train_batch_size_per_learner=1024, minibatch_size=128)
    assert "algo.rollout" in refused and "to a value of 128" in refused  # 1,024 is not a multiple of 50 x 8 envs


def test_a2c_is_refused():
    (problem,) = problems(Experiment(env="CartPole-v1", algo="a2c", engine={"kind": "rllib"}))
    assert problem.setting == "algo.id"


def test_rllib_algorithm_selects_the_rllib_engine():
    assert load("CartPole-v1", ["algo.id=dqn"]).experiment.engine.kind == "rllib"
    assert Experiment(env="CartPole-v1", algo="impala").engine.kind == "rllib"
    assert load("CartPole-v1", []).experiment.engine.kind == "local"
    with pytest.raises(ConfigError) as refused:
        load("CartPole-v1", ["algo.id=dqn", "engine.kind=local"])
    assert "algo.id" in refused.value.details


def test_rllib_settings_are_refused_by_other_engines():
    with pytest.raises(ConfigError) as refused:
        load("CartPole-v1", ["engine.runners=2", "engine.nodes=3"])
    assert "engine.runners" in refused.value.details and "engine.nodes" in refused.value.details


def test_schedules_become_points_from_env_step_0():
    assert schedule(3e-4, 100) == 3e-4
    assert schedule(Linear(kind="linear", start=1.0, end=0.5), 1000) == [[0, 1.0], [1000, 0.5]]
    assert schedule(Piecewise(kind="piecewise", points=[[10, 2.0], [20, 1.0]]), None) == [
        [0, 2.0],
        [10, 2.0],
        [20, 1.0],
    ]
    assert schedule(KlAdaptive(kind="kl_adaptive", start=0.1), None) == 0.1


def test_envs_are_divided_evenly_among_runners():
    assert runner_count(experiment(runners=2)) == 2 and envs_per_runner(experiment(runners=2)) == 4
    assert envs_per_runner(experiment(runners=2, envs_per_runner=3)) == 3
    assert experiment(runners=2, envs_per_runner=3).envs == 6
    assert envs_per_runner(experiment(runners=0)) == 8
    assert (
        8 % runner_count(experiment(cpus=6)) == 0 and runner_count(experiment(cpus=6)) == 4
    )  # one core is left for the learner


def test_missing_resources_are_refused_with_numbers():
    with pytest.raises(UseError) as refused:
        Needs(runners=7, learners=2, gpus=0).check(4, 0, "this machine")
    assert "9 CPUs" in refused.value.message and "has 4" in refused.value.message
    with pytest.raises(UseError) as refused:
        needs(experiment(runners=1, device="cuda", gpus=0.5)).check(4, 0, "this machine")
    assert "0.5 GPUs" in refused.value.message
    assert needs(experiment(runners=3, learners=2)) == Needs(3, 2, 0.0)
