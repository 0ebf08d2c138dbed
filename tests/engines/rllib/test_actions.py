"""Distributions in torch equal those in numpy, and the PPO loss equals the local engine's on the same samples."""

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib", reason="Ray RLlib is not installed: pip install 'tiltyard[ray]'")

from tests.algos.test_ppo import act_out, learner
from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, env
from tiltyard.algos.minibatches import make_chunks
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.experiment import Memory, Model, Normalise
from tiltyard.engines.rllib.actions import ActionsOf, inputs
from tiltyard.engines.rllib.connectors import padded, unpadded
from tiltyard.engines.rllib.learners import Samples, ppo_losses
from tiltyard.models.distributions import ActionDist

KINDS = {
    "categorical": [CATEGORICAL],
    "binary": [BINARY],
    "continuous": [CONTINUOUS],
    "all": [CATEGORICAL, BINARY, CONTINUOUS],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_distributions_equal_numpy(kind, masked):
    if masked and kind not in ("categorical", "all"):
        masked = False
    _, net, spec = learner(spec=env(*KINDS[kind], masked=masked))
    rollout = act_out(net, spec, 16)
    with torch.no_grad():
        params, _ = net.unroll(
            {name: torch.from_numpy(x) for name, x in rollout.obs.items()}, {}, torch.from_numpy(rollout.first)
        )
        mask = None if rollout.mask is None else torch.from_numpy(rollout.mask)
        theirs = ActionsOf(spec).from_logits(inputs(net, params, mask))
        shifted = ActionsOf(spec).from_logits(inputs(net, params + torch.randn(params.shape), mask))
    ours = net.distribution(params.numpy(), rollout.mask)
    assert isinstance(ours, ActionDist)
    np.testing.assert_allclose(theirs.logp(torch.from_numpy(rollout.action)), ours.log_prob(rollout.action), atol=2e-5)
    np.testing.assert_allclose(theirs.entropy(), ours.entropy(), atol=2e-5)
    assert float(theirs.kl(theirs).abs().max()) < 1e-5
    assert bool((theirs.kl(shifted) > -1e-6).all()) and float(theirs.kl(shifted).max()) > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_clip": 0.1, "clip": 0.1},
        {"entropy": 0.05, "kl": 0.3, "normalise_advantage": False},
    ],
)
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_loss_equals_local_engine(settings, memory):
    """Compare each term and the gradient of the sum, on one minibatch of all samples with slightly changed weights."""
    algo = Settings(rollout=16, minibatch=10_000, epochs=1, max_grad_norm=None, **settings)
    model = Model(hidden=[16], memory=Memory(kind=memory, size=8, bptt=16), normalise=Normalise(returns=True))
    ppo, net, spec = learner(algo, model, env(CATEGORICAL, CONTINUOUS))
    rollout = act_out(net, spec, 16, valid=0.8)
    with torch.no_grad():
        for each in net.parameters():
            each.add_(0.05 * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())))
    now = ppo.current_settings()
    advantage, returns = ppo._advantages(rollout, now["gamma"], now["gae_lambda"])
    outputs = net.normaliser.normalise_value(rollout.value)
    net.normaliser.observe_returns(returns[rollout.valid])
    numbers = (rollout.log_prob, advantage, net.normaliser.normalise_value(returns), outputs)
    chunks = make_chunks(net, ppo.bptt, rollout, numbers)
    chosen = np.arange(chunks.first.shape[1])
    (policy, value, entropy), log_ratio = ppo._differentiate(chunks.take(chosen), slice(None), now)

    state0 = {name: torch.from_numpy(x[0]) for name, x in rollout.state0.items()}
    params, values = net.unroll(
        {name: torch.from_numpy(x) for name, x in rollout.obs.items()}, state0, torch.from_numpy(rollout.first)
    )
    dist = ActionsOf(spec).from_logits(inputs(net, params, None))
    samples = Samples(
        log_prob=dist.logp(torch.from_numpy(rollout.action)),
        entropy=dist.entropy(),
        value=values,
        old_log_prob=torch.from_numpy(rollout.log_prob),
        old_value=torch.from_numpy(np.asarray(outputs, np.float32)),
        advantage=torch.from_numpy(np.asarray(advantage, np.float32)),
        target=torch.from_numpy(np.asarray(net.normaliser.normalise_value(returns), np.float32)),
    )
    losses = ppo_losses(samples.select(torch.from_numpy(rollout.valid)), algo, now)
    np.testing.assert_allclose(losses["loss/policy"].item(), policy, rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(losses["loss/value"].item(), value, rtol=2e-4)
    np.testing.assert_allclose(losses["loss/entropy"].item(), entropy, rtol=2e-4)
    parameters = [each for each in net.parameters() if each.numel()]
    theirs = torch.cat([each.flatten() for each in torch.autograd.grad(losses["total"], parameters)])
    ours = torch.cat([part.flatten() for part in ppo.adam.gradient_parts() if part.numel()])
    assert ours.numel() == theirs.numel()
    np.testing.assert_allclose(theirs, ours, rtol=2e-3, atol=2e-6)
    assert float(log_ratio.std()) > 0.01  # otherwise all ratios are 1 and the comparison proves nothing


def test_padding_is_undone():
    lengths = [5, 2, 4]
    array = np.arange(11.0)
    shape = (4, 4)  # two rows for the first episode, one for each other
    rows = padded(array, lengths, shape)
    assert rows.shape == shape
    np.testing.assert_array_equal(unpadded(rows, lengths), array)
    np.testing.assert_array_equal(unpadded(array, lengths), array)
