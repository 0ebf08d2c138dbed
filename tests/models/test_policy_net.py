import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, env, observations, vector
from tiltyard.config.fields import Plugin
from tiltyard.config.sections import Memory, Model, Normalise
from tiltyard.errors import ConfigError, UseError
from tiltyard.models.normalise import RunningStats
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ArraySpec

KITCHEN = {
    "arm.0.angle": vector(3),
    "eye": ArraySpec("box", (12, 12, 3), "uint8", image=True),
    "bytes": ArraySpec("box", (4,), "uint8"),
    "room": ArraySpec("discrete", (), "int64", (5,)),
    "dice": ArraySpec("multi_discrete", (2,), "int64", (6, 6)),
    "switches": ArraySpec("multi_binary", (3,), "uint8"),
    "words": ArraySpec("text", (32,), "int32", (4096,)),
}
SPECS = {
    "categorical": env(CATEGORICAL),
    "binary": env(BINARY),
    "continuous": env(CONTINUOUS),
    "mixed": env(CATEGORICAL, CONTINUOUS, BINARY),
    "kitchen": env(CATEGORICAL, CONTINUOUS, **KITCHEN),
}
MODELS = {
    "plain": Model(),
    "shared": Model(critic="shared", hidden=[32], activation="relu"),
    "lstm": Model(memory=Memory(kind="lstm", size=8)),
    "gru": Model(memory=Memory(kind="gru", size=8), critic="shared"),
    "normalised": Model(normalise=Normalise(obs=True, returns=True)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_acting_and_unrolling_give_the_same_results(spec, model):
    """Acting step by step and the learner's unroll give the same log probabilities and values."""
    net = PolicyNet(spec, model, (), seed=3)
    steps, rows = 5, 4
    obs = observations(spec, steps, rows)
    first = np.random.default_rng(0).random((steps, rows)) < 0.3
    net.normaliser.observe(obs, np.ones((steps, rows), bool))
    net.normaliser.observe_returns(np.array([3.0, 9.0]))
    state = state0 = net.initial_state(rows)
    acted = []
    generator = torch.Generator().manual_seed(0)
    for t in range(steps):
        row_obs = {name: x[t] for name, x in obs.items()}
        acted.append(net.act(row_obs, state, first[t], None, greedy=False, generator=generator))
        np.testing.assert_allclose(net.value(row_obs, state, first[t]), acted[-1].value, rtol=1e-6)
        state = acted[-1].state
    action = np.stack([one.action for one in acted])
    assert action.shape == (steps, rows, spec.action.columns)
    assert action.dtype == np.float32
    params, value = net.unroll(obs, state0, torch.from_numpy(first))
    found = net.distribution(params.detach().numpy(), None).log_prob(action)
    np.testing.assert_allclose(found, np.stack([one.log_prob for one in acted]), atol=1e-5, rtol=1e-4)
    worth = net.normaliser.denormalise_value(value.detach().numpy())
    np.testing.assert_allclose(worth, np.stack([one.value for one in acted]), atol=1e-5, rtol=1e-4)
    assert all(array.dtype == np.float32 for array in (acted[0].log_prob, acted[0].value))


def test_masked_actions_are_never_taken():
    spec = env(CATEGORICAL, masked=True)
    net = PolicyNet(spec, Model(), (), seed=0)
    mask = np.tile([True, False, True], (5000, 1))
    for greedy in (True, False):
        acted = net.act(observations(spec, 5000), {}, np.zeros(5000, bool), mask, greedy=greedy)
        assert 1.0 not in acted.action.flatten().tolist()


def test_initial_policy_is_nearly_uniform_and_weights_depend_on_the_seed():
    spec = env(CATEGORICAL)
    before = torch.random.get_rng_state()
    one, same, other = (PolicyNet(spec, Model(), (), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert "weight" not in name or not torch.equal(a, c), name
    params, _ = one.unroll(observations(spec, 1, 50), {}, torch.zeros(1, 50, dtype=torch.bool))
    assert one.distribution(params.detach().numpy(), None).entropy().min() > 0.999 * math.log(3)


def test_log_std_starts_at_the_configured_value():
    net = PolicyNet(env(CATEGORICAL, CONTINUOUS), Model(log_std=-0.5), (), seed=0)
    assert net.log_std.tolist() == [-0.5, -0.5]
    assert net.log_std.requires_grad


def test_running_statistics_match_all_data():
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e4, 3, (n, 2)) for n in (1, 5, 0, 200)]
    stats = RunningStats((2,))
    for part in parts:
        stats.observe(part)
    everything = np.concatenate(parts)
    np.testing.assert_allclose(stats.mean, everything.mean(0))
    np.testing.assert_allclose(stats.scale, everything.std(0), rtol=1e-5)
    assert float(stats.count) == 206


def test_observations_are_normalised_but_images_are_not():
    spec = env(obs=vector(2), eye=KITCHEN["eye"], bytes=KITCHEN["bytes"])
    net = PolicyNet(spec, Model(normalise=Normalise(obs=True)), (), seed=0)
    obs = observations(spec, 50, 8)
    obs["obs"] = obs["obs"] * 100 + 7
    valid = np.ones((50, 8), bool)
    valid[0] = False
    obs["obs"][0] = 1e9  # invalid rows do not count
    assert net.normaliser.prepare(obs)["obs"][1:].abs().max() == 10  # empty statistics only clip
    net.normaliser.observe(obs, valid)
    ready = net.normaliser.prepare(obs)
    assert abs(float(ready["obs"][1:].mean())) < 1e-4
    assert abs(float(ready["obs"][1:].std()) - 1) < 1e-2
    assert abs(float(ready["bytes"].mean())) < 0.1
    assert ready["eye"].dtype == torch.uint8  # converted later, for the model
    assert ready["obs"][0].max() == 10


def test_images_are_normalised_per_pixel_if_configured():
    spec = env(obs=vector(2), eye=KITCHEN["eye"])
    net = PolicyNet(spec, Model(normalise=Normalise(images=True)), (), seed=0)
    assert net.normaliser.names == ("eye",)
    obs = observations(spec, 80, 8)
    obs["eye"][...] = 200  # a constant background
    obs["eye"][:, ::2, 0, 0] = 100  # and a pixel that changes
    net.normaliser.observe(obs, np.ones((80, 8), bool))
    ready = net.normaliser.prepare(obs)["eye"]
    assert ready.dtype == torch.float32
    assert ready[:, :, 1:].abs().max() == 0
    assert torch.allclose(ready[:, ::2, 0, 0], torch.tensor(-1.0)) and torch.allclose(
        ready[:, 1::2, 0, 0], torch.tensor(1.0)
    )
    again = PolicyNet(spec, Model(normalise=Normalise(images=True)), (), seed=1)
    again.load_arrays(net.arrays())
    again.normaliser.refresh()
    assert torch.equal(again.normaliser.prepare(obs)["eye"], ready)


def test_values_are_in_units_of_reward():
    net = PolicyNet(env(), Model(normalise=Normalise(returns=True)), (), seed=0)
    net.normaliser.observe_returns(np.array([90.0, 110.0]))
    assert net.normaliser.normalise_value(np.array([110.0])) == pytest.approx([1.0])
    assert net.normaliser.denormalise_value(np.array([-1.0])) == pytest.approx([90.0])


def test_arrays_restore_the_whole_policy():
    spec = env()
    settings = Model(normalise=Normalise(obs=True, returns=True), memory=Memory(kind="gru", size=8))
    net, other = PolicyNet(spec, settings, (), seed=0), PolicyNet(spec, settings, (), seed=9)
    net.normaliser.observe({"obs": observations(spec, 9, 9)["obs"] * 5 + 3}, np.ones((9, 9), bool))
    net.normaliser.observe_returns(np.array([5.0, 8.0]))
    other.load_arrays(net.arrays())
    obs, first = observations(spec, 6), np.ones(6, bool)
    a, b = (one.act(obs, one.initial_state(6), first, None, greedy=True) for one in (net, other))
    assert all((getattr(a, name) == getattr(b, name)).all() for name in ("action", "value", "log_prob"))
    taken = net.arrays()
    taken["log_std"] = np.zeros(0, np.float32)
    next(iter(taken.values()))[...] = 77
    assert not any((array == 77).any() for array in net.arrays().values())  # arrays are copies


def test_weights_of_another_model_are_refused_with_both_shapes():
    net = PolicyNet(env(), Model(hidden=[64]), (), seed=0)
    wide = PolicyNet(env(), Model(hidden=[32]), (), seed=0)
    with pytest.raises(UseError, match=r"\(32, 4\) there, \(64, 4\) here"):
        net.load_arrays(wide.arrays())


def test_encoders_are_selected_by_observation_name():
    spec = env(**KITCHEN)
    net = PolicyNet(spec, Model(encoders={"eye": Plugin(id="resnet", options={"size": 11})}), (), seed=0)
    sizes = {name: part.size for name, part in zip(net.model.actor.names, net.model.actor.encoders, strict=True)}
    assert sizes == {"arm.0.angle": 3, "eye": 11, "bytes": 4, "room": 5, "dice": 12, "switches": 3, "words": 64}
    for_images = PolicyNet(spec, Model(encoder=Plugin(id="simple", options={"size": 13})), (), seed=0)
    assert [part.size for part in for_images.model.actor.encoders] == [3, 13, 4, 5, 12, 3, 64]
    with pytest.raises(UseError, match="'eyes'") as error:
        PolicyNet(spec, Model(encoders={"eyes": Plugin(id="simple")}), (), seed=0)
    assert "'eye'" in error.value.hint
    with pytest.raises(ConfigError) as wrong:
        PolicyNet(spec, Model(encoder=Plugin(id="simple", options={"sice": 3})), (), seed=0)
    assert "model.encoder.options" in wrong.value.details and "size" in wrong.value.details


def test_description_has_the_class_and_the_parameter_count():
    net = PolicyNet(env(obs=vector(4)), Model(), (), seed=0)
    count = sum(p.numel() for p in net.parameters())
    assert net.describe() == f"ActorCritic (tiltyard.models.actor_critic): {count:,} parameters"
    assert count == 2 * (4 * 64 + 64 + 64 * 64 + 64) + 64 * 3 + 3 + 64 + 1


# ------------------------------------------------------------------------------------------------ custom models

CUSTOM = """
import torch
from torch import nn

class CustomModel(nn.Module):
    def __init__(self, spec, outputs, *, width=8, bias=0.0):
        super().__init__()
        size = spec.obs["obs"].shape[0]
        self.body = nn.Linear(size, width)
        self.heads = nn.Linear(width, outputs + 1)
        self.bias = bias

    def forward(self, obs):
        out = self.heads(torch.relu(self.body(obs["obs"])))
        return out[:, 1:], out[:, 0] + self.bias

class Remembering(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.heads = nn.Linear(6, outputs + 1)

    def initial_state(self, rows):
        return {"memory": torch.full((rows, 6), 0.5)}

    def forward(self, obs, state, first):
        memory = self.cell(obs["obs"], state["memory"])
        out = self.heads(memory)
        return out[:, 1:], out[:, 0], {"memory": memory}

class Eye(nn.Module):
    def __init__(self, spec, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, outputs))

    def forward(self, obs):
        brightest = obs["eye"].view(len(obs["eye"]), -1).max(1).values
        return brightest[:, None] * self.weight, brightest

class Column(CustomModel):
    def forward(self, obs):
        params, value = super().forward(obs)
        return params, value[:, None]

def nothing(spec, outputs):
    return {}

class Broken(CustomModel):
    def forward(self, obs):
        return self.body(obs["no such thing"])
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "custom.py").write_text(CUSTOM)
    return tmp_path


def test_model_file_is_used_with_its_options(nets):
    net = PolicyNet(env(), Model(id="custom.py", options={"width": 5, "bias": 1000.0}), (nets,), seed=0)
    acted = net.act(observations(env(), 3), {}, np.zeros(3, bool), None, greedy=True)
    assert (acted.value > 990).all()  # only forward() of this file adds the bias
    assert net.describe() == f"CustomModel (custom.py): {4 * 5 + 5 + 5 * 4 + 4} parameters"


def test_custom_models_and_encoders_get_images_between_0_and_1(nets):
    spec = env(eye=KITCHEN["eye"])
    white = {"eye": np.full((3, 12, 12, 3), 255, np.uint8)}
    net = PolicyNet(spec, Model(id="custom.py:Eye"), (nets,), seed=0)
    assert net.value(white, {}, np.zeros(3, bool)).tolist() == [1, 1, 1]
    _, value = net.unroll({"eye": white["eye"][None]}, {}, torch.zeros(1, 3, dtype=torch.bool))
    assert value.tolist() == [[1, 1, 1]]
    (nets / "seen.py").write_text(
        "from torch import nn\nclass CustomEncoder(nn.Module):\n    size = 1\n    def __init__(self, spec):\n"
        "        super().__init__()\n    def forward(self, x):\n        return x.view(len(x), -1).mean(1, keepdim=True)\n"
    )
    ours = PolicyNet(spec, Model(encoder=Plugin(id="seen.py"), hidden=[]), (nets,), seed=0)
    head = ours.model.value_head.get_submodule("0")
    assert ours.value(white, {}, np.zeros(3, bool)) == pytest.approx([(head.weight + head.bias).item()] * 3)


def test_custom_recurrent_model_is_reset_at_episode_starts(nets):
    net = PolicyNet(env(), Model(id="custom.py:Remembering"), (nets,), seed=0)
    assert net.recurrent
    obs = observations(env(), 4, 2)
    first = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    _, value = net.unroll(obs, {"memory": torch.randn(2, 6)}, first)
    _, again = net.unroll({"obs": obs["obs"][2:]}, {"memory": torch.randn(2, 6)}, first[2:])
    torch.testing.assert_close(value[2:, 0], again[:, 0])  # row 0 is reset at step 2
    assert not torch.allclose(value[2:, 1], again[:, 1])


def test_errors_in_a_custom_model_are_reported_in_one_sentence(nets):
    def build(**settings):
        return PolicyNet(env(), Model(**settings), (nets,), seed=0)

    with pytest.raises(ConfigError) as wrong:
        build(id="custom.py", options={"widht": 3})
    assert "model.options" in wrong.value.details and "width" in wrong.value.details
    with pytest.raises(UseError, match=r"value \(2,\).*\(2, 1\)"):
        build(id="custom.py:Column")
    with pytest.raises(UseError, match="Broken raised KeyError") as error:
        build(id="custom.py:Broken")
    assert "no such thing" in error.value.details and "net.py" not in error.value.details
    with pytest.raises(UseError, match=r"made a dict, not a torch"):
        build(id="custom.py:nothing")
    with pytest.raises(UseError, match="constructor raised TypeError"):
        build(id="custom.py", options={"width": "wide"})
    with pytest.raises(ConfigError):
        build(options={"width": 3})


def test_custom_encoder_is_used_and_must_have_a_size(nets):
    code = "from torch import nn\nclass CustomEncoder(nn.Module):\n    def __init__(self, spec, *, size=3):\n"
    (nets / "encoder.py").write_text(
        code + "        super().__init__()\n        self.size = size\n"
        "    def forward(self, x):\n        return x[:, :1].repeat(1, self.size) * 1e6\n"
    )
    (nets / "sizeless.py").write_text(code + "        super().__init__()\n")
    net = PolicyNet(env(), Model(encoder=Plugin(id="encoder.py"), hidden=[]), (nets,), seed=0)
    values = net.value({"obs": np.ones((1, 4), np.float32)}, {}, np.zeros(1, bool))
    assert np.abs(values).max() > 1e3
    with pytest.raises(UseError, match="has no `size`"):
        PolicyNet(env(), Model(encoder=Plugin(id="sizeless.py")), (nets,), seed=0)
