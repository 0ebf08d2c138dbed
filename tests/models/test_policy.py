import json
import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.models.specs import CATEGORICAL, env, observations, vector
from tiltyard.config.experiment import Experiment
from tiltyard.config.load import resolved_yaml
from tiltyard.config.sections import Env, Memory, Model, Normalise
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs, previous_specs
from tiltyard.errors import TiltyardError, UseError
from tiltyard.models.policy import Policy, load_policy
from tiltyard.models.policy_files import policy_tree
from tiltyard.models.policy_net import PolicyNet
from tiltyard.run.checkpoint import commit
from tiltyard.run.folder import Run
from tiltyard.run.state_file import write_trees
from tiltyard.types import EnvSpec, Progress


def spec_of(observation: gymnasium.Space, action: gymnasium.Space, stack: int = 1, masked: bool = False) -> EnvSpec:
    return EnvSpec(observation_specs(observation, stack), action_spec(action), masked=masked)


def checkpoint(folder: Path, spec: EnvSpec, model: Model | None = None, stack: int = 1, seed: int = 5) -> PolicyNet:
    """Write a checkpoint folder of a new net with nonempty statistics; return the net."""
    experiment = Experiment(env=Env(id="X", frame_stack=stack), model=model or Model(hidden=[16]))
    net = PolicyNet(spec, experiment.model, (folder.parent.parent,), seed=seed)
    net.normaliser.observe(observations(spec, 20, 3), np.ones((20, 3), bool))
    write_trees(folder, policy_tree("main", net, spec, experiment))
    return net


def test_loaded_policy_acts_like_the_saved_one(tmp_path):
    box, choice = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3, start=5)
    spec = spec_of(box, choice)
    model = Model(hidden=[16], memory=Memory(kind="lstm", size=8), normalise=Normalise(obs=True, returns=True))
    net = checkpoint(tmp_path / "run" / "checkpoints" / "000000000001", spec, model)
    policy = load_policy(tmp_path / "run" / "checkpoints" / "000000000001")
    assert policy.spec == spec
    assert policy.net.describe() == net.describe()
    for _ in range(2):  # after reset the same episode gives the same actions
        policy.reset()
        state, first = net.initial_state(1), np.array([True])
        for t in range(6):
            obs = observations(spec, seed=t)["obs"]
            acted = net.act({"obs": obs[None]}, state, first, None, greedy=True)
            state, first = acted.state, np.array([False])
            assert policy.act(obs) == int(acted.action[0, 0]) + 5
            for name in state:
                assert torch.equal(policy._state[name], state[name])


def test_policy_is_loaded_from_the_newest_best_or_named_checkpoint(tmp_path):
    run = Run(tmp_path / "x" / "0001-calm-owl")
    nets = {}
    for steps, score in ((10, 5.0), (20, 1.0)):
        nets[steps] = PolicyNet(env(), Model(hidden=[16]), (), seed=steps)
        experiment = Experiment(env=Env(id="X"), model=Model(hidden=[16]))

        def write(folder, net=nets[steps], experiment=experiment):
            write_trees(folder, policy_tree("main", net, env(), experiment))

        commit(run, steps, Progress(env_steps=steps), score, write, milestone=False)
    (run.folder / "experiment.yaml").write_text(resolved_yaml(experiment))
    for source, at, steps in ((run, None, 20), (run.folder, None, 20), (str(run.folder), "best", 10), (run, 10, 10)):
        found = load_policy(source, at=at).net.arrays()
        assert all((found[name] == array).all() for name, array in nets[steps].arrays().items())


def test_sampling_depends_on_the_seed_of_the_policy(tmp_path):
    spec = spec_of(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3))
    checkpoint(tmp_path, spec)
    drawn = [[load_policy(tmp_path, seed=seed).act(np.zeros(4), greedy=False) for seed in range(30)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {0, 1, 2}


def test_continuous_actions_are_in_the_units_of_the_env(tmp_path):
    space = spaces.Box(np.array([0, -50], np.float32), np.array([10, 50], np.float32))
    checkpoint(tmp_path, spec_of(spaces.Box(-1, 1, (2,), np.float32), space))
    policy = load_policy(tmp_path)
    action = policy.act(np.zeros(2, np.float32))
    assert space.contains(action)
    np.testing.assert_allclose(action, [5, 0], atol=1.5)  # the means of a new policy are near 0, the middle


def test_nested_observations_masks_and_offsets_work(tmp_path):
    space = spaces.Dict(
        {
            "body": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(3))),
            "room": spaces.Discrete(4, start=10),
            "said": spaces.Text(20),
            "action_mask": spaces.MultiBinary(3),
        }
    )
    spec = spec_of(space, spaces.Discrete(3), masked=True)
    checkpoint(tmp_path, spec)
    policy = load_policy(tmp_path, space=space)
    for allowed in range(3):
        mask = np.eye(3, dtype=np.int8)[allowed]
        obs = {**space.sample(), "action_mask": mask}
        assert policy.act(obs, greedy=False) == allowed
        assert policy.act({**obs, "action_mask": np.ones(3, np.int8)}, mask=mask) == allowed
    with pytest.raises(UseError, match="outside 0") as error:
        load_policy(tmp_path).act({**space.sample(), "room": 13})
    assert "space=env.observation_space" in error.value.hint
    with pytest.raises(UseError, match="no 'said'"):
        load_policy(tmp_path).act({"body": (np.zeros(2), np.zeros(3)), "room": 1})


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(0, 255, (16, 20), np.uint8),
        spaces.Box(0, 255, (8, 9, 3), np.uint8),
        spaces.Discrete(7),
    ],
    ids=str,
)
def test_frames_are_stacked_newest_last(tmp_path, space):
    spec = spec_of(space, spaces.Discrete(3), stack=3)
    checkpoint(tmp_path, spec, stack=3)
    policy = load_policy(tmp_path)
    space.seed(0)
    frames = [space.sample() for _ in range(5)]
    for frame in frames:
        policy.act(frame)
    shape = spec.obs["obs"].shape
    axis = -1 if space.shape == (8, 9, 3) else 0
    parts = np.split(policy._frames["obs"], 3, axis)
    for part, frame in zip(parts, frames[2:], strict=True):
        np.testing.assert_array_equal(part.reshape(np.shape(frame)), frame)
    policy.reset()
    policy.act(frames[0])
    assert policy._frames["obs"].shape == shape
    for part in np.split(policy._frames["obs"], 3, axis):
        np.testing.assert_array_equal(part.reshape(np.shape(frames[0])), frames[0])


def test_previous_action_and_reward_are_observed():
    action = action_spec(spaces.Discrete(3))
    spec = EnvSpec({"obs": vector(2), **previous_specs(action)}, action)
    policy = Policy(PolicyNet(spec, Model(), (), seed=0), spec)
    taken = policy.act(np.ones(2), reward=9.0)
    assert policy._frames["previous.reward"].tolist() == [0]  # there is no previous reward in the first step
    policy.act(np.ones(2), reward=9.0)
    assert policy._frames["previous.action"].tolist() == [taken]
    assert policy._frames["previous.reward"].tolist() == [9]
    policy.reset()
    policy.act(np.ones(2))
    assert policy._frames["previous.action"].tolist() == [0]


def test_wrong_observation_or_env_is_reported_with_both_shapes(tmp_path):
    spec = spec_of(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3))
    checkpoint(tmp_path, spec)
    policy = load_policy(tmp_path)
    with pytest.raises(UseError, match=r"shape \(5,\).*\(4,\)"):
        policy.act(np.zeros(5, np.float32))
    policy.require_same(spec)
    with pytest.raises(UseError, match=r"\(4,\).*\(6,\)"):
        policy.require_same(env(CATEGORICAL, obs=vector(6)))
    with pytest.raises(UseError, match=r"of 3 options.*of 4 options"):
        policy.require_same(spec_of(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(4)))


def test_policy_files_are_readable_and_a_newer_schema_is_refused(tmp_path):
    checkpoint(tmp_path, env())
    files = {path.name for path in (tmp_path / "policies").iterdir()}
    assert files == {"main.safetensors", "main.json"}
    file = tmp_path / "policies" / "main.json"
    tree = json.loads(file.read_text())
    assert tree["tree"]["spec"]["obs"]["obs"]["shape"] == [4]
    assert tree["tree"]["model"]["hidden"] == [16]
    tree["tree"]["schema"] = 99
    file.write_text(json.dumps(tree))
    with pytest.raises(UseError, match="schema 99"):
        load_policy(tmp_path)
    with pytest.raises(TiltyardError):
        load_policy(tmp_path / "nowhere")


CODE = """
import torch
from torch import nn
class CustomModel(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.out = nn.Linear(4, outputs)
    def forward(self, obs):
        return self.out(obs["obs"]), obs["obs"].sum(-1) + 4000
"""


def test_model_code_runs_only_from_run_folders_of_this_user(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "plugins").mkdir(parents=True)
    (run / "plugins" / "net.py").write_text(CODE)
    folder = run / "checkpoints" / "000000000001"
    checkpoint(folder, env(), Model(id="plugins/net.py:CustomModel"))
    monkeypatch.chdir(tmp_path)
    obs, first = {"obs": np.zeros((1, 4), np.float32)}, np.zeros(1, bool)
    assert float(load_policy(folder).net.value(obs, {}, first)[0]) == 4000
    if os.getuid() != 0:
        pytest.skip("only root can give files to another user")
    os.chown(folder, 4321, 4321)
    with pytest.raises(UseError, match="belongs to another user") as error:
        load_policy(folder)
    assert "--trust-code" in error.value.hint
    assert load_policy(folder, trust_code=True).net.parameter_count == 4 * 3 + 3
    checkpoint(run / "checkpoints" / "000000000002", env())
    load_policy(run / "checkpoints" / "000000000002")  # a built-in model needs no code from the run folder
