"""Distributions in torch equal those in numpy, also as RLlib's learners get them."""

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib", reason="Ray RLlib is not installed: pip install 'tiltyard[ray]'")

from tests.algos.test_ppo import act_out, learner
from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, env
from tiltyard.engines.rllib.rl_modules import Actions, inputs
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
        theirs = Actions(spec, inputs(net, params, mask))
        shifted = Actions(spec, inputs(net, params + torch.randn(params.shape), mask))
    ours = net.distribution(params.numpy(), rollout.mask)
    assert isinstance(ours, ActionDist)
    np.testing.assert_allclose(theirs.logp(torch.from_numpy(rollout.action)), ours.log_prob(rollout.action), atol=2e-5)
    np.testing.assert_allclose(theirs.entropy(), ours.entropy(), atol=2e-5)
    assert float(theirs.kl(theirs).abs().max()) < 1e-5
    assert bool((theirs.kl(shifted) > -1e-6).all()) and float(theirs.kl(shifted).max()) > 1e-4
