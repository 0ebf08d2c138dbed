import numpy as np
import pytest

from tests.counts import count
from tiltyard.algos.advantages import Steps, clipped_gae, gae, next_values, vtrace


def column(*numbers, dtype=np.float32):
    return np.array(numbers, dtype)[:, None]


def test_gae_matches_a_calculation_by_hand():
    # Step 1 is terminal, so step 2 does not influence it. The last step uses the bootstrap value.
    reward, value = column(1, 2, 3), column(0.5, 1, 2)
    ended, cut = column(0, 1, 0, dtype=bool), column(0, 0, 0, dtype=bool)
    advantage, returns = gae(Steps(reward, value, column(0, 0, 10), ended, cut), 0.9, 0.8)
    second = 2 - 1
    first = 1 + 0.9 * 1 - 0.5 + 0.9 * 0.8 * second
    third = 3 + 0.9 * 10 - 2
    np.testing.assert_allclose(advantage[:, 0], [first, second, third], rtol=1e-6)
    np.testing.assert_allclose(returns, advantage + value, rtol=1e-6)


def test_truncation_bootstraps_and_termination_does_not():
    reward, value, bootstrap = column(1, 1), column(0, 5), column(7, 3)
    no = np.zeros((2, 1), bool)
    end = column(1, 0, dtype=bool)
    cut, _ = gae(Steps(reward, value, bootstrap, no, end), 0.5, 1.0)
    over, _ = gae(Steps(reward, value, bootstrap, end, no), 0.5, 1.0)
    goes_on, _ = gae(Steps(reward, value, bootstrap, no, no), 0.5, 1.0)
    assert cut[0, 0] == 1 + 0.5 * 7  # the bootstrap value of the truncation, not value[1] of the next episode
    assert over[0, 0] == 1
    assert goes_on[0, 0] == 1 + 0.5 * (1 + 0.5 * 3)


def random_case(rng):
    steps, rows = int(rng.integers(1, 12)), 3
    terminated = rng.random((steps, rows)) < 0.2
    return {
        "reward": rng.normal(size=(steps, rows)).astype(np.float32),
        "value": rng.normal(size=(steps, rows)).astype(np.float32),
        "bootstrap": rng.normal(size=(steps, rows)).astype(np.float32),
        "terminated": terminated,
        "truncated": (rng.random((steps, rows)) < 0.2) & ~terminated,
    }


def brute_force(case, ratio, gamma, lam, rho_clip, weigh):
    """Advantages by definition: per step, a sum over all later steps of its episode. weigh(ratios, t, k) is the trace."""
    follows = next_values(Steps(**case))
    steps, rows = case["reward"].shape
    out = np.zeros((steps, rows))
    for b in range(rows):
        for t in range(steps):
            for k in range(t, steps):
                error = case["reward"][k, b] + gamma * follows[k, b] - case["value"][k, b]
                out[t, b] += gamma ** (k - t) * weigh(ratio[:, b], t, k) * error
                if case["terminated"][k, b] or case["truncated"][k, b]:
                    break
    return out


def test_all_estimators_match_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(count(300)):
        case = random_case(rng)
        ratio = rng.lognormal(0, 0.7, case["reward"].shape).astype(np.float32)
        gamma, lam, clip = 0.97, 0.8, float(rng.choice([0.9, 1.3]))
        expected = brute_force(case, ratio, gamma, lam, clip, lambda r, t, k: lam ** (k - t))  # noqa: B023
        advantage, returns = gae(Steps(**case), gamma=gamma, lam=lam)
        np.testing.assert_allclose(advantage, expected, atol=1e-5)
        np.testing.assert_allclose(returns, expected + case["value"], atol=1e-5)

        expected = brute_force(
            case, ratio, gamma, lam, clip,
            lambda r, t, k: lam ** (k - t) * np.prod(np.minimum(r[t + 1 : k + 1], clip)),  # noqa: B023
        )  # fmt: skip
        advantage, _ = clipped_gae(Steps(**case), ratio=ratio, gamma=gamma, lam=lam, clip=clip)
        np.testing.assert_allclose(advantage, expected, atol=1e-4)

        expected = brute_force(
            case, ratio, gamma, lam, clip,
            lambda r, t, k: lam ** (k - t) * np.prod(np.minimum(r[t:k], 1.0)) * min(r[k], clip),  # noqa: B023
        )  # fmt: skip
        _, corrected = vtrace(Steps(**case), ratio=ratio, gamma=gamma, lam=lam, clip=clip)
        np.testing.assert_allclose(corrected - case["value"], expected, atol=1e-4)


def test_vtrace_and_clipped_gae_equal_gae_on_policy():
    case = random_case(np.random.default_rng(5))
    ones = np.ones_like(case["reward"])
    plain, returns = gae(Steps(**case), gamma=0.9, lam=0.7)
    np.testing.assert_allclose(
        clipped_gae(Steps(**case), ratio=ones, gamma=0.9, lam=0.7, clip=1.0)[0], plain, atol=1e-6
    )
    np.testing.assert_allclose(vtrace(Steps(**case), ratio=ones, gamma=0.9, lam=0.7, clip=1.0)[1], returns, atol=1e-6)


def test_vtrace_advantage_uses_the_corrected_value_of_the_next_step():
    no = np.zeros((3, 1), bool)
    case = {"reward": column(1, 2, 3), "value": column(0, 1, 2), "bootstrap": column(0, 0, 4)}
    steps = Steps(**case, terminated=no, truncated=no)
    advantage, corrected = vtrace(steps, ratio=column(0.5, 2, 1), gamma=0.9, lam=1.0, clip=1.0)
    after = [corrected[1, 0], corrected[2, 0], 4]
    expected = [r + 0.9 * a - v for r, a, v in zip((1, 2, 3), after, (0, 1, 2), strict=True)]
    np.testing.assert_allclose(advantage[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_gae_with_lambda_zero_and_one(lam):
    no = np.zeros((3, 1), bool)
    advantage, _ = gae(Steps(column(1, 1, 1), column(0, 0, 0), column(0, 0, 0), no, no), 0.5, lam)
    assert advantage[:, 0].tolist() == ([1, 1, 1] if lam == 0 else [1.75, 1.5, 1])
