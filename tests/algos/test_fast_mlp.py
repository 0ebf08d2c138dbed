import numpy as np
import pytest
import torch

from tests.models.specs import CATEGORICAL, env, observations, vector
from tiltyard.algos.fast_mlp import SINGLE_THREAD
from tiltyard.algos.flat_adam import Adam
from tiltyard.config.experiment import Memory, Model, Normalise
from tiltyard.config.fields import Plugin
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ArraySpec

MIXED = {
    "a": vector(3),
    "room": ArraySpec("discrete", (), "int64", (5,)),
    "on": ArraySpec("multi_binary", (2,), "uint8"),
}
PLAIN = {
    "separate": (env(), Model()),
    "shared relu": (env(), Model(critic="shared", activation="relu", hidden=[32])),
    "no layers": (env(), Model(hidden=[])),
    "normalised": (env(), Model(normalise=Normalise(obs=True))),
    "categories": (env(CATEGORICAL, **MIXED), Model()),
    "bytes": (env(obs=ArraySpec("box", (4,), "uint8")), Model()),
}


@pytest.mark.parametrize(("spec", "model"), PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("rows", [1, 300])
def test_fast_path_matches_the_modules(spec, model, rows):
    """300 rows are too many for numpy, so that both ways to multiply are tested."""
    assert 300 * 64 * 64 > SINGLE_THREAD > 64 * 64
    net = PolicyNet(spec, model, (), seed=1)
    assert net.dense is not None and net.dense.layers() is not None
    obs = observations(spec, rows)
    net.normaliser.observe({name: x * 3 + 1 for name, x in obs.items()}, np.ones(rows, bool))
    params, value = net.dense.forward(net._fast_inputs(obs, net.dense), net.dense.layers())
    with torch.no_grad():
        wanted, worth = net.model(net.normaliser.prepare(obs))
    np.testing.assert_allclose(params, wanted, atol=1e-5)
    np.testing.assert_allclose(value, worth, atol=1e-5)
    np.testing.assert_array_equal(net.value(obs, {}, np.zeros(rows, bool)), value)


def test_fast_path_uses_the_current_parameters():
    net = PolicyNet(env(), Model(), (), seed=1)
    obs, first = observations(env(), 3), np.zeros(3, bool)
    before = net.value(obs, {}, first)
    adam = Adam(net, 1e-5)
    np.testing.assert_array_equal(net.value(obs, {}, first), before)
    adam.vector.zero_()
    assert (net.value(obs, {}, first) == 0).all()


@pytest.mark.parametrize(
    "model",
    [Model(memory=Memory(kind="gru")), Model(activation="gelu"), Model(encoder=Plugin(id="mlp"))],
    ids=["memory", "gelu", "learned encoder"],
)
def test_other_models_do_not_use_the_fast_path(model):
    assert PolicyNet(env(), model, (), seed=0).dense is None
