import math

import numpy as np
import pytest
import torch

from tests.algos.test_ppo import act_out, learner
from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, env, observations, vector
from tiltyard.algos.flat_adam import Adam
from tiltyard.algos.minibatches import cut_rollout
from tiltyard.algos.ppo_loss import net_outputs, ppo_loss
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.fields import Plugin
from tiltyard.config.sections import Memory, Model, Normalise
from tiltyard.models.dense import SINGLE_THREAD
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ActionPart, ArraySpec

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


ACTIONS = {
    "categorical": (CATEGORICAL,),
    "several categoricals": (CATEGORICAL, CATEGORICAL),
    "binary": (BINARY,),
    "continuous": (CONTINUOUS,),
    "half bounded": (ActionPart("continuous", 2, low=(-1.0, -math.inf), high=(1.0, math.inf)),),
    "mixed": (CATEGORICAL, BINARY, CONTINUOUS),
}
TERMS = [{}, {"value_clip": 0.1, "kl": 0.3, "entropy": 0.05}, {"entropy": 0.1, "normalise_advantage": False}]


@pytest.mark.parametrize("terms", TERMS, ids=["plain", "all terms", "entropy"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", ACTIONS.values(), ids=ACTIONS)
def test_gradient_equals_autograd_of_the_loss(parts, masked, terms):
    """On minibatches of changing size, as whole and as the part of a learner, with and without invalid samples."""
    spec = env(*parts, masked=masked and parts[0].kind == "categorical")
    model = Model(hidden=[16, 12], critic="shared" if masked else "separate", activation="relu" if masked else "tanh")
    ppo, net, _ = learner(Settings(rollout=16, **terms), model, spec)
    rollout = act_out(net, spec, 16, valid=0.8)
    with torch.no_grad():  # so that ratios are on both sides of the clip
        for parameter in net.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    rng = np.random.default_rng(3)
    numbers = (rollout.log_prob, *rng.normal(size=(2, *rollout.reward.shape)), rollout.value)
    for keep_invalid in (False, True):
        chunks, _ = cut_rollout(net, 1, rollout, numbers, keep_invalid=keep_invalid).to(net)
        for rows, part in ((7, slice(None)), (40, slice(None)), (40, slice(5, 31)), (7, slice(None))):
            batch = chunks.take(rng.permutation(45)[:rows], part=part, normalise=ppo.algo.normalise_advantage)
            assert (batch.valid is not None) == keep_invalid
            now = ppo.current_settings()
            found = ppo.fast.differentiate(batch, now)
            gradient = ppo.adam.gradient.clone()
            losses = ppo_loss(batch, net_outputs(net, batch), now)
            ppo.adam.differentiate(losses.total)
            np.testing.assert_allclose(found, torch.stack(losses[1:]).detach(), rtol=2e-4, atol=2e-6)
            torch.testing.assert_close(gradient, ppo.adam.gradient, rtol=2e-4, atol=2e-6)
            assert float(gradient.norm()) > 1e-3
