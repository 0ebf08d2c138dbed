import math

import numpy as np
import pytest
import torch
from torch import distributions as td

from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, action
from tiltyard.algos.fast_mlp import distribution_gradient
from tiltyard.models.distributions import ActionDist, continuous_columns, outputs
from tiltyard.types import ActionPart

MIXED = action(CATEGORICAL, CONTINUOUS, BINARY, CATEGORICAL)
LOG_STD = np.array([-0.5, 0.3], np.float32)


def reference(params, log_std):
    """The same mixed distribution, made of torch distributions."""
    return [
        td.Categorical(logits=params[..., 0:3]),
        td.Independent(td.Normal(params[..., 3:5].tanh(), log_std.exp()), 1),
        td.Independent(td.Bernoulli(logits=params[..., 5:7]), 1),
        td.Categorical(logits=params[..., 7:10]),
    ]


def test_outputs_are_the_sum_over_all_parts():
    assert outputs(MIXED) == 3 + 2 + 2 + 3
    assert continuous_columns(MIXED) == 2
    assert outputs(action(BINARY)) == 2


def test_mixed_parts_match_torch_distributions():
    params = np.random.default_rng(0).normal(size=(5, 4, 10)).astype(np.float32)
    dist = ActionDist(MIXED, params, LOG_STD, None)
    drawn = dist.sample()
    assert drawn.shape == (5, 4, 6) and drawn.dtype == np.float32
    columns = [torch.from_numpy(x) for x in (drawn[..., 0], drawn[..., 1:3], drawn[..., 3:5], drawn[..., 5])]
    parts = reference(torch.from_numpy(params), torch.from_numpy(LOG_STD))
    wanted = sum(part.log_prob(x) for part, x in zip(parts, columns, strict=True))
    np.testing.assert_allclose(dist.log_prob(drawn), wanted, atol=1e-5)
    np.testing.assert_allclose(dist.entropy(), sum(part.entropy() for part in parts), atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_match_torch_distributions(with_entropy):
    rng = np.random.default_rng(1)
    params = rng.normal(size=(5, 4, 10)).astype(np.float32)
    by_log_prob, by_entropy = rng.normal(size=(2, 5, 4)).astype(np.float32)
    dist = ActionDist(MIXED, params, LOG_STD, None)
    drawn = dist.sample()
    columns = [torch.from_numpy(x) for x in (drawn[..., 0], drawn[..., 1:3], drawn[..., 3:5], drawn[..., 5])]
    leaves = [torch.from_numpy(x).requires_grad_() for x in (params, LOG_STD.copy())]
    parts = reference(*leaves)
    total = sum(
        (part.log_prob(x) * torch.from_numpy(by_log_prob)).sum() for part, x in zip(parts, columns, strict=True)
    )
    if with_entropy:
        total = total + sum((part.entropy() * torch.from_numpy(by_entropy)).sum() for part in parts)
    for found, wanted in zip(
        distribution_gradient(dist, drawn, by_log_prob, by_entropy if with_entropy else None),
        torch.autograd.grad(total, leaves),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-4)


def test_large_logits_give_finite_and_exact_results():
    params = np.array([[200.0, -200.0, 0.0]], np.float32)
    dist = ActionDist(action(CATEGORICAL), params, LOG_STD[:0], None)
    assert dist.log_prob(np.array([[1.0]])) == pytest.approx([-400])
    assert dist.entropy() == pytest.approx([0], abs=1e-6)
    coins = ActionDist(action(BINARY), params[:, :2], LOG_STD[:0], None)
    assert coins.log_prob(np.array([[0.0, 1.0]])) == pytest.approx([-400])
    many = ActionDist(
        action(ActionPart("categorical", 1, 30)), np.arange(30, dtype=np.float32)[None], LOG_STD[:0], None
    )
    assert many.log_prob(np.array([[29.0]])) == pytest.approx([math.log(1 - math.exp(-1))], abs=1e-5)


def test_mode_is_the_most_likely_action():
    params = np.array([[0.0, 2.0, 1.0, 0.7, -0.7, 3.0, -3.0, 0.0, 0.0, 9.0]], np.float32)
    assert ActionDist(MIXED, params, LOG_STD, None).mode().tolist() == [
        pytest.approx([1, math.tanh(0.7), -math.tanh(0.7), 1, 0, 2])
    ]


def test_means_stay_in_bounds_if_there_are_any():
    spec = action(ActionPart("continuous", 3, low=(-1.0, -math.inf, 0.0), high=(1.0, math.inf, math.inf)))
    fives, none = np.full((1, 3), 5, np.float32), np.zeros(3, np.float32)
    dist = ActionDist(spec, fives, none, None)
    assert dist.mode().tolist() == [pytest.approx([math.tanh(5.0), 5.0, 5.0])]
    by_params, _ = distribution_gradient(dist, dist.mode() + 1, np.ones(1, np.float32), None)
    assert by_params.tolist() == [pytest.approx([1 - math.tanh(5.0) ** 2, 1, 1], rel=1e-3)]
    free = action(ActionPart("continuous", 1, low=(-math.inf,), high=(math.inf,)))
    assert ActionDist(free, fives[:, :1], none[:1], None).mode().tolist() == [[5.0]]


def test_samples_follow_the_probabilities():
    generator = torch.Generator().manual_seed(1)
    params = np.tile(np.float32([0.0, 1.0, 2.0, 0.5, -0.5, 1.5, -1.0, 0.0, 0.0, 0.0]), (200_000, 1))
    drawn = ActionDist(MIXED, params, LOG_STD, None).sample(generator)
    share = np.bincount(drawn[:, 0].astype(int), minlength=3) / len(drawn)
    np.testing.assert_allclose(share, torch.softmax(torch.from_numpy(params[0, :3]), -1), atol=5e-3)
    np.testing.assert_allclose(drawn[:, 1:3].mean(0), np.tanh(params[0, 3:5]), atol=1e-2)
    np.testing.assert_allclose(drawn[:, 1:3].std(0), np.exp(LOG_STD), atol=1e-2)
    np.testing.assert_allclose(drawn[:, 3:5].mean(0), 1 / (1 + np.exp(-params[0, 5:7])), atol=5e-3)


def test_equal_generators_give_equal_samples():
    params = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    one, two = (ActionDist(MIXED, params, LOG_STD, None).sample(torch.Generator().manual_seed(7)) for _ in range(2))
    assert (one == two).all()


def test_masked_options_are_never_sampled_and_have_no_gradient():
    spec = action(CATEGORICAL, CATEGORICAL)
    # Masked options have the largest logits.
    params = np.random.default_rng(0).normal([30.0, 0, 0, 0, 30.0, 0], size=(100_000, 6))
    mask = np.tile([False, True, True, True, False, False], (100_000, 1))
    dist = ActionDist(spec, params.astype(np.float32), LOG_STD[:0], mask)
    drawn = dist.sample(torch.Generator().manual_seed(3))
    assert set(drawn[:, 0].tolist()) == {1.0, 2.0}
    assert set(drawn[:, 1].tolist()) == {0.0}
    assert set(dist.mode()[:, 1].tolist()) == {0.0}
    entropy = dist.entropy()
    assert (entropy >= 0).all() and entropy.max() <= 0.6932  # at most log 2, with two options left
    ones = np.ones(100_000, np.float32)
    by_params, _ = distribution_gradient(dist, drawn, ones, ones)
    assert np.isfinite(by_params).all()
    assert (by_params[:, [0, 4, 5]] == 0).all()
