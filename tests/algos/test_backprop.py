import numpy as np
import pytest
import torch

from tests.models.specs import env, observations
from tiltyard.algos.backprop import Backprop
from tiltyard.algos.flat_adam import Adam
from tiltyard.config.experiment import Model
from tiltyard.models.policy_net import PolicyNet


@pytest.mark.parametrize("sizes", [(7,), (300, 7, 301, 300)])
def test_manual_backprop_and_autograd_give_the_same_gradient(sizes):
    """Also with changing batch sizes, whose buffers are kept. A frozen log_std makes the second net use autograd."""
    hand, auto = (PolicyNet(env(), Model(), (), seed=3) for _ in range(2))
    auto.log_std.requires_grad_(False)
    one, two = Adam(hand, 1e-5), Adam(auto, 1e-5)
    ways = Backprop(hand, one), Backprop(auto, two)
    assert ways[0].dense is not None and ways[1].dense is None
    rng = np.random.default_rng(0)
    for rows in sizes:
        obs = {name: torch.from_numpy(x) for name, x in observations(env(), 1, rows, seed=rows).items()}
        by_params = rng.normal(size=(1, rows, 3)).astype(np.float32)
        by_value = rng.normal(size=(1, rows)).astype(np.float32)
        outs = [way.forward(obs, {}, np.zeros((1, rows), bool)) for way in ways]
        for way in ways:
            way.backward(by_params, by_value, np.zeros(0, np.float32))
        for mine, theirs in zip(*outs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        torch.testing.assert_close(one.gradient, two.gradient, atol=1e-4, rtol=1e-4)
