import math

import pytest
import torch
from torch import distributions as td

from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, action
from tiltyard.models.heads import ActionDist, continuous_columns, outputs
from tiltyard.types import ActionPart

MIXED = action(CATEGORICAL, CONTINUOUS, BINARY, CATEGORICAL)
LOG_STD = torch.tensor([-0.5, 0.3])


def reference(params, log_std):
    """The same mixed distribution from torch's own parts."""
    return [
        td.Categorical(logits=params[..., 0:3]),
        td.Independent(td.Normal(params[..., 3:5].tanh(), log_std.exp()), 1),
        td.Independent(td.Bernoulli(logits=params[..., 5:7]), 1),
        td.Categorical(logits=params[..., 7:10]),
    ]


def test_outputs_count_what_each_part_needs():
    assert outputs(MIXED) == 3 + 2 + 2 + 3
    assert continuous_columns(MIXED) == 2
    assert outputs(action(BINARY)) == 2


def test_mixed_parts_agree_with_torch_distributions():
    torch.manual_seed(0)
    params = torch.randn(5, 4, 10)
    dist = ActionDist(MIXED, params, LOG_STD, None)
    drawn = dist.sample()
    assert drawn.shape == (5, 4, 6)
    columns = [drawn[..., 0], drawn[..., 1:3], drawn[..., 3:5], drawn[..., 5]]
    parts = reference(params, LOG_STD)
    torch.testing.assert_close(
        dist.log_prob(drawn), sum(part.log_prob(x) for part, x in zip(parts, columns, strict=True))
    )
    torch.testing.assert_close(dist.entropy(), sum(part.entropy() for part in parts))


def test_mode_is_the_likeliest():
    params = torch.tensor([[0.0, 2.0, 1.0, 0.7, -0.7, 3.0, -3.0, 0.0, 0.0, 9.0]])
    assert ActionDist(MIXED, params, LOG_STD, None).mode().tolist() == [
        pytest.approx([1, math.tanh(0.7), -math.tanh(0.7), 1, 0, 2])
    ]


def test_means_stay_inside_bounds_where_there_are_any():
    spec = action(ActionPart("continuous", 3, low=(-1.0, -math.inf, 0.0), high=(1.0, math.inf, math.inf)))
    mode = ActionDist(spec, torch.tensor([[5.0, 5.0, 5.0]]), torch.zeros(3), None).mode()
    assert mode.tolist() == [pytest.approx([math.tanh(5.0), 5.0, 5.0])]
    free = action(ActionPart("continuous", 1, low=(-math.inf,), high=(math.inf,)))
    assert ActionDist(free, torch.tensor([[5.0]]), torch.zeros(1), None).mode().tolist() == [[5.0]]


def test_draws_follow_the_probabilities():
    generator = torch.Generator().manual_seed(1)
    params = torch.tensor([0.0, 1.0, 2.0, 0.5, -0.5, 1.5, -1.0, 0.0, 0.0, 0.0]).expand(200_000, 10)
    drawn = ActionDist(MIXED, params, LOG_STD, None).sample(generator)
    share = torch.bincount(drawn[:, 0].long(), minlength=3) / len(drawn)
    torch.testing.assert_close(share, torch.softmax(params[0, :3], -1), atol=5e-3, rtol=0)
    torch.testing.assert_close(drawn[:, 1:3].mean(0), params[0, 3:5].tanh(), atol=1e-2, rtol=0)
    torch.testing.assert_close(drawn[:, 1:3].std(0), LOG_STD.exp(), atol=1e-2, rtol=0)
    torch.testing.assert_close(drawn[:, 3:5].mean(0), torch.sigmoid(params[0, 5:7]), atol=5e-3, rtol=0)


def test_equal_generators_draw_equal_actions():
    params = torch.randn(64, 10)
    one, two = (ActionDist(MIXED, params, LOG_STD, None).sample(torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(one, two)


def test_forbidden_options_are_never_drawn_and_harm_nothing():
    spec = action(CATEGORICAL, CATEGORICAL)
    params = (
        torch.randn(100_000, 6) + torch.tensor([30.0, 0, 0, 0, 30.0, 0])
    ).requires_grad_()  # the forbidden look best
    mask = torch.tensor([False, True, True, True, False, False])
    dist = ActionDist(spec, params, torch.zeros(0), mask.expand(100_000, 6))
    drawn = dist.sample(torch.Generator().manual_seed(3))
    assert set(drawn[:, 0].tolist()) == {1.0, 2.0}
    assert set(drawn[:, 1].tolist()) == {0.0}
    assert set(dist.mode()[:, 1].tolist()) == {0.0}
    assert dist.entropy().isfinite().all()
    assert (dist.entropy() >= 0).all() and dist.entropy().max() <= 0.6932  # two options left: at most log 2
    (dist.log_prob(drawn) + dist.entropy()).sum().backward()
    assert params.grad.isfinite().all()
    assert (params.grad[:, [0, 4, 5]] == 0).all()
