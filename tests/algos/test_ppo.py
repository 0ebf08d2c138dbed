import math

import numpy as np
import pytest
import torch
from torch import distributions as td

from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, env, observations
from tiltyard.algos.advantages import Steps, gae
from tiltyard.algos.minibatches import cut_rollout, shuffled
from tiltyard.algos.ppo import Ppo
from tiltyard.config.algos import A2c
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.schedules import KlAdaptive, Linear
from tiltyard.config.sections import Memory, Model, Normalise
from tiltyard.errors import DivergedError, UseError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import EnvSpec, Rollout

ROWS = 4


def act_out(net: PolicyNet, spec: EnvSpec, steps: int, bptt: int = 16, seed: int = 0, valid: float = 1.0) -> Rollout:
    """A rollout of the net on random observations, rewards and episode ends."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    obs = observations(spec, steps, ROWS, seed=seed)
    terminated = rng.random((steps, ROWS)) < 0.1
    truncated = (rng.random((steps, ROWS)) < 0.1) & ~terminated
    first = np.concatenate([np.ones((1, ROWS), bool), (terminated | truncated)[:-1]])
    mask = None
    if spec.masked:
        mask = rng.random((steps, ROWS, spec.action.mask_size)) < 0.7
        mask[..., 0] = True
    state = net.initial_state(ROWS)
    state0 = {name: np.zeros((-(-steps // bptt), *item.shape), np.float32) for name, item in state.items()}
    acted = []
    for t in range(steps):
        if t % bptt == 0:
            for name, item in state.items():
                state0[name][t // bptt] = item
        row_obs = {name: x[t] for name, x in obs.items()}
        row_mask = None if mask is None else mask[t]
        acted.append(net.act(row_obs, state, first[t], row_mask, greedy=False, generator=generator))
        state = acted[-1].state
    return Rollout(
        obs=obs,
        first=first,
        action=np.stack([one.action for one in acted]),
        mask=mask,
        log_prob=np.stack([one.log_prob for one in acted]),
        value=np.stack([one.value for one in acted]),
        reward=rng.normal(1, 2, (steps, ROWS)).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        bootstrap=rng.normal(size=(steps, ROWS)).astype(np.float32),
        valid=rng.random((steps, ROWS)) < valid,
        state0=state0,
        policy_version=np.zeros((steps, ROWS), np.int64),
    )


def learner(algo=None, model=None, spec=None, seed=0, bptt=16, total=100_000):
    spec = spec or env()
    net = PolicyNet(spec, model or Model(hidden=[16]), (), seed=seed)
    return Ppo(algo or Settings(rollout=16, minibatch=64, epochs=1), net, bptt, total, seed), net, spec


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


# ------------------------------------------------------------------------------------------------ the gradient


def torch_log_prob(parts, params, log_std, action):
    """Log probability and entropy from torch's distributions, with gradients: [...]."""
    log_prob = entropy = torch.zeros(())
    at = column = std_at = 0
    for part in parts:
        piece, taken = (
            params[..., at : at + (part.options or part.columns)],
            action[..., column : column + part.columns],
        )
        if part.kind == "categorical":
            dist, taken = td.Categorical(logits=piece), taken[..., 0]
        elif part.kind == "binary":
            dist = td.Independent(td.Bernoulli(logits=piece), 1)
        else:
            scale = log_std[std_at : std_at + part.columns].exp()
            dist, std_at = td.Independent(td.Normal(piece.tanh(), scale), 1), std_at + part.columns
        log_prob, entropy = log_prob + dist.log_prob(taken), entropy + dist.entropy()
        at, column = at + piece.shape[-1], column + part.columns
    return log_prob, entropy


def steps_of(rollout):
    return Steps(rollout.reward, rollout.value, rollout.bootstrap, rollout.terminated, rollout.truncated)


def chunks_of(ppo, rollout):
    nothing = np.zeros((16, ROWS))
    chunks, _ = cut_rollout(ppo.net, ppo.bptt, rollout, (rollout.log_prob, nothing, nothing, nothing)).to(ppo.net)
    return chunks


def textbook_loss(net, algo, rollout):
    """PPO's loss of one rollout as in the paper, written in torch: the reference for the manual gradient."""
    params, value = net.unroll(rollout.obs, state0_of(net, rollout), torch.from_numpy(rollout.first))
    advantage, returns = gae(steps_of(rollout), algo.gamma, algo.gae_lambda)
    valid = torch.from_numpy(rollout.valid)
    advantage, target = torch.from_numpy(advantage)[valid], torch.from_numpy(returns)[valid]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    log_prob, entropy = torch_log_prob(net.spec.action.parts, params, net.log_std, torch.from_numpy(rollout.action))
    log_ratio = (log_prob - torch.from_numpy(rollout.log_prob))[valid]
    ratio = log_ratio.exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(1 - algo.clip, 1 + algo.clip) * advantage).mean()
    value, old = value[valid], torch.from_numpy(rollout.value)[valid]
    errors = (value - target).square()
    if algo.value_clip is not None:
        errors = torch.max(errors, (old + (value - old).clamp(-algo.value_clip, algo.value_clip) - target).square())
    kl = (ratio - 1 - log_ratio).mean()
    return policy + algo.value_coef * errors.mean() / 2 - algo.entropy * entropy[valid].mean() + algo.kl * kl


def state0_of(net, rollout):
    return {name: torch.from_numpy(x[0]) for name, x in rollout.state0.items()}


MODELS = {
    "separate": Model(hidden=[16, 12]),
    "shared": Model(hidden=[16, 12], critic="shared", activation="relu"),
    "bare": Model(hidden=[]),
    "gelu": Model(hidden=[16], activation="gelu"),
    "gru": Model(hidden=[16], memory=Memory(kind="gru", size=8)),
}
TERMS = {
    "plain": {},
    "entropy": {"entropy": 0.1},
    "kl": {"kl": 0.7},
    "value clip": {"value_clip": 0.05, "value_coef": 2.0},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "parts", [(CATEGORICAL,), (CONTINUOUS,), (CATEGORICAL, BINARY, CONTINUOUS)], ids=["c", "n", "m"]
)
def test_gradient_matches_the_textbook_loss(parts, model, terms):
    """The first three models use the manual backward pass, the others use autograd."""
    spec = env(*parts)
    algo = Settings(rollout=16, minibatch=64, epochs=1, lr=0.0, max_grad_norm=None, **terms)
    ppo, net, _ = learner(algo, model, spec)
    assert (ppo.fast is not None) == (model.activation != "gelu" and not net.recurrent)
    rng = np.random.default_rng(5)
    with torch.no_grad():  # away from the initial weights, where most values are nearly zero
        for parameter in net.model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    rollout = act_out(net, spec, 16, valid=0.8)
    rollout.log_prob += rng.normal(0, 0.3, rollout.log_prob.shape).astype(
        np.float32
    )  # ratios on both sides of the clip
    rollout.value += rng.normal(0, 0.1, rollout.value.shape).astype(np.float32)
    wanted = torch.autograd.grad(
        textbook_loss(net, algo, rollout), net.parameters(), allow_unused=True, materialize_grads=True
    )
    ppo.update(rollout, 0)
    for name, found, gradient in zip(ppo.adam.names, ppo.adam.gradient_parts(), wanted, strict=True):
        torch.testing.assert_close(found, gradient, atol=2e-6, rtol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("parts", [(CATEGORICAL,), (BINARY,), (CONTINUOUS,), (CATEGORICAL, CONTINUOUS)], ids=str)
def test_first_gradient_is_the_policy_gradient(parts):
    """At ratio 1 and without other terms, the clipped objective has the gradient of log pi times advantage."""
    spec = env(*parts)
    settings = Settings(rollout=16, minibatch=64, epochs=1, normalise_advantage=False, value_coef=0.0)
    ppo, net, _ = learner(settings, spec=spec)
    rollout = act_out(net, spec, 16)
    advantage, _ = gae(steps_of(rollout), 0.99, 0.95)
    params, _ = net.unroll(rollout.obs, {}, torch.from_numpy(rollout.first))
    log_prob = torch_log_prob(parts, params, net.log_std, torch.from_numpy(rollout.action))[0]
    objective = -(log_prob * torch.from_numpy(advantage)).mean()
    expected = torch.autograd.grad(objective, net.parameters(), allow_unused=True, materialize_grads=True)
    metrics = ppo.update(rollout, 0)
    for found, wanted in zip(ppo.adam.gradient_parts(), expected, strict=True):
        scale = min(1.0, 0.5 / metrics["learn/gradient_norm"])  # max_grad_norm
        torch.testing.assert_close(found, wanted * scale, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["none", "lstm", "gru"])
def test_ratios_start_at_one_with_normalisers_and_memory(kind):
    model = Model(hidden=[16], memory=Memory(kind=kind, size=8, bptt=4), normalise=Normalise(obs=True, returns=True))
    ppo, net, spec = learner(model=model, bptt=4)
    for update in range(3):  # every update changes the normalisers, and the next rollout uses them
        metrics = ppo.update(act_out(net, spec, 16, bptt=4, seed=update), 0)
        assert metrics["loss/kl"] == pytest.approx(0, abs=1e-6)
        assert metrics["learn/clip_fraction"] == 0
        assert abs(metrics["loss/policy"]) < 1e-5  # mean of normalised advantages at ratio 1


def test_gradient_is_zero_beyond_the_clip():
    ppo, net, spec = learner(Settings(rollout=16, minibatch=64, epochs=1, value_coef=0.0, normalise_advantage=False))
    rollout = act_out(net, spec, 16)
    rollout.log_prob -= 1.0  # every ratio is e, which is beyond the clip
    rollout.reward[:] = 100.0  # every advantage is positive, so that the gradient is zero
    rollout.bootstrap[:] = 0
    metrics = ppo.update(rollout, 0)
    assert metrics["learn/gradient_norm"] == 0
    assert metrics["learn/clip_fraction"] == 1
    rollout.reward[:] = -100.0  # every advantage is negative, so that the ratio can decrease
    assert ppo.update(rollout, 0)["learn/gradient_norm"] > 0


def test_single_sample_updates_the_policy():
    """A single advantage must not be centred, because that gives zero."""
    ppo, net, spec = learner(Settings(rollout=1, minibatch=1, epochs=1, value_coef=0.0))
    rollout = act_out(net, spec, 1).rows(0, 1)
    before = weights(net)
    ppo.update(rollout, 0)
    assert not torch.equal(weights(net), before)


def test_masked_options_keep_probability_zero_through_updates():
    spec = env(CATEGORICAL, masked=True)
    ppo, net, _ = learner(Settings(rollout=16, minibatch=16, epochs=4, entropy=0.01, lr=1e-2), spec=spec)
    for update in range(5):
        rollout = act_out(net, spec, 16, seed=update)
        allowed = np.take_along_axis(rollout.mask, rollout.action.astype(int), -1)
        assert allowed.all()
        assert all(math.isfinite(x) for x in ppo.update(rollout, 0).values())


def test_a2c_is_ppo_with_one_epoch_one_minibatch_and_no_clip():
    same = {"rollout": 16, "lr": 1e-2, "gamma": 0.9, "gae_lambda": 0.8, "entropy": 0.01, "normalise_advantage": True}
    one, a2c_net, spec = learner(A2c(id="a2c", **same))
    two, ppo_net, _ = learner(Settings(**same, minibatch=64, epochs=1, clip=1e9))
    for update in range(3):
        found = one.update(act_out(a2c_net, spec, 16, seed=update), 0)
        wanted = two.update(act_out(ppo_net, spec, 16, seed=update), 0)
        assert found["loss/policy"] == wanted["loss/policy"] and found["learn/epochs"] == 1
    assert torch.equal(weights(a2c_net), weights(ppo_net))


# ------------------------------------------------------------------------------------------------ learning


def test_value_target_has_the_bootstrap_after_truncation_only():
    """One step with reward 0 and a bootstrap value of 10, which counts only after a truncation."""
    found = {}
    for kind in ("terminated", "truncated"):
        model = Model(hidden=[16], critic="separate")
        ppo, net, spec = learner(Settings(rollout=1, minibatch=4, epochs=1, lr=3e-2, gamma=0.9), model=model)
        for update in range(100):
            rollout = act_out(net, spec, 1, seed=update)
            rollout.obs["obs"][:] = 1.0
            rollout.value[:] = net.value({"obs": rollout.obs["obs"][0]}, {}, rollout.first[0])
            rollout.reward[:] = 0.0
            rollout.bootstrap[:] = 10.0
            rollout.terminated[:], rollout.truncated[:] = kind == "terminated", kind == "truncated"
            ppo.update(rollout, 0)
        found[kind] = float(net.value({"obs": np.ones((1, 4), np.float32)}, {}, np.zeros(1, bool))[0])
    assert found["terminated"] == pytest.approx(0, abs=0.5)
    assert found["truncated"] == pytest.approx(9, abs=0.5)


@pytest.mark.parametrize(
    ("advantage", "kind"), [("gae", "none"), ("vtrace", "none"), ("clipped_gae", "none"), ("vtrace", "lstm")]
)
def test_bandit_task_is_learned(advantage, kind):
    """Reward 1 for option 2, for every observation."""
    model = Model(hidden=[16], memory=Memory(kind=kind, size=8, bptt=4))
    settings = Settings(rollout=16, minibatch=32, epochs=2, lr=2e-2, advantage=advantage)
    ppo, net, spec = learner(settings, model=model, bptt=4)
    for update in range(25):
        rollout = act_out(net, spec, 16, bptt=4, seed=update)
        rollout.reward[:] = rollout.action[..., 0] == 2
        rollout.terminated[:], rollout.truncated[:] = True, False
        ppo.update(rollout, 0)
    final = act_out(net, spec, 16, bptt=4, seed=99)
    assert (final.action == 2).mean() > 0.9


def test_off_policy_samples_are_weighted_by_their_ratios():
    ppo, net, spec = learner(Settings(rollout=16, minibatch=64, epochs=1, advantage="vtrace"))
    rollout = act_out(net, spec, 16)
    np.testing.assert_allclose(ppo._ratios(rollout), 1, atol=1e-5)
    rollout.log_prob[3, 1] -= math.log(2)
    ratios = ppo._ratios(rollout)
    assert ratios[3, 1] == pytest.approx(2, rel=1e-4)
    assert np.delete(ratios.ravel(), 3 * ROWS + 1) == pytest.approx(1, abs=1e-4)


def test_ratios_of_chunks_are_in_the_order_of_the_rollout():
    model = Model(hidden=[16], memory=Memory(kind="gru", size=8, bptt=4))
    ppo, net, spec = learner(model=model, bptt=4)
    rollout = act_out(net, spec, 16, bptt=4)
    shift = np.linspace(-1, 1, 16 * ROWS, dtype=np.float32).reshape(16, ROWS)
    rollout.log_prob += shift
    np.testing.assert_allclose(ppo._ratios(rollout), np.exp(-shift), rtol=1e-4)


@pytest.mark.parametrize("kind", ["none", "gru"])
def test_invalid_rows_do_not_affect_the_update(kind):
    model = Model(hidden=[16], memory=Memory(kind=kind, size=8, bptt=4), normalise=Normalise(obs=True, returns=True))
    found = []
    for garbage in (0.0, 1e3):
        ppo, net, spec = learner(Settings(rollout=16, minibatch=16, epochs=3), model=model, bptt=4)
        rollout = act_out(net, spec, 16, bptt=4, valid=0.7)
        rollout.first[:] = True  # so that the memory does not keep the observation of an invalid row
        rollout.terminated[:] = True  # and advantages do not contain its reward
        bad = ~rollout.valid
        for array in (rollout.reward, rollout.value, rollout.bootstrap, rollout.log_prob, rollout.obs["obs"]):
            array[bad] = garbage
        ppo.update(rollout, 0)
        found.append(weights(net))
    assert torch.equal(*found)


def test_every_sample_is_used_once_per_epoch_in_minibatches_of_similar_size():
    ppo, net, spec = learner(Settings(rollout=16, minibatch=24, epochs=1))
    chunks = chunks_of(ppo, act_out(net, spec, 16))
    parts = [part.tolist() for part in shuffled(chunks, 24, ppo.shuffling)]
    assert sorted(len(part) for part in parts) == [21, 21, 22]
    order = [at for part in parts for at in part]
    assert sorted(order) == list(range(64))
    assert order != list(range(64))


def test_chunks_keep_the_order_of_steps_and_start_from_the_stored_state():
    model = Model(hidden=[16], memory=Memory(kind="gru", size=8, bptt=4))
    ppo, net, spec = learner(Settings(rollout=16, minibatch=16, epochs=1), model=model, bptt=4)
    rollout = act_out(net, spec, 16, bptt=4)
    chunks = chunks_of(ppo, rollout)
    picked = chunks.take(np.array([2 * ROWS + 3]))  # chunk 2 of row 3
    np.testing.assert_array_equal(picked.obs["obs"][:, 0], rollout.obs["obs"][8:12, 3])
    np.testing.assert_array_equal(picked.log_prob[:, 0], rollout.log_prob[8:12, 3])
    np.testing.assert_array_equal(picked.state0["actor.h"][0], rollout.state0["actor.h"][2, 3])
    with pytest.raises(UseError, match=r"algo\.rollout = 16"):
        learner(model=model, bptt=5)


# ------------------------------------------------------------------------------------------------ schedules and stops


def test_schedules_count_env_steps_and_are_reported():
    algo = Settings(rollout=16, minibatch=64, epochs=1, lr=Linear(kind="linear", start=1e-3), entropy=0.02)
    ppo, net, spec = learner(algo, total=1000)
    rollout = act_out(net, spec, 16)
    assert ppo.update(rollout, 0)["setting/lr"] == 1e-3
    before = weights(net)
    metrics = ppo.update(rollout, 1000)
    assert metrics["setting/lr"] == 0 and metrics["setting/entropy"] == 0.02
    assert torch.equal(weights(net), before)


def test_learning_rate_adapts_to_the_kl_divergence():
    lr = KlAdaptive(kind="kl_adaptive", start=1e-2, target=1e-5, factor=2.0)
    ppo, net, spec = learner(Settings(rollout=16, minibatch=16, epochs=4, lr=lr))
    for update in range(4):
        ppo.update(act_out(net, spec, 16, seed=update), 0)
    assert ppo.current_settings()["lr"] == pytest.approx(1e-2 / 16)


@pytest.mark.parametrize(("name", "towards"), [("lr", 1 / 8), ("clip", 1 / 8), ("entropy", 8), ("kl", 8)])
def test_adaptive_settings_move_in_the_right_direction(name, towards):
    """The KL divergence is far above its target of 1e-5: lr and clip must fall, entropy and kl must rise."""
    adaptive = KlAdaptive(kind="kl_adaptive", start=1e-2, target=1e-5, factor=2.0)
    ppo, net, spec = learner(Settings(rollout=16, minibatch=16, epochs=4, **{"lr": 1e-2, name: adaptive}))
    seen = [ppo.update(act_out(net, spec, 16, seed=update), 0)[f"setting/{name}"] for update in range(4)]
    assert seen[0] == 1e-2 and seen[-1] == pytest.approx(1e-2 * towards)


def test_adaptive_settings_use_the_kl_divergence_of_the_whole_update():
    """With a single gradient step the divergence of the minibatch is still 0, and lr would grow without limit."""
    lr = KlAdaptive(kind="kl_adaptive", start=1e-2, target=1e-7, factor=2.0)
    ppo, net, spec = learner(A2c(id="a2c", rollout=16, lr=lr))
    rollout = act_out(net, spec, 16)
    metrics = ppo.update(rollout, 0)
    params, _ = net.unroll(rollout.obs, {}, torch.from_numpy(rollout.first))
    log_ratio = net.distribution(params.detach().numpy(), None).log_prob(rollout.action) - rollout.log_prob
    assert metrics["loss/kl"] == pytest.approx(float((np.exp(log_ratio) - 1 - log_ratio).mean()), rel=1e-2)
    assert ppo.current_settings()["lr"] == pytest.approx(5e-3)


def test_kl_stop_ends_the_update_early():
    free, net, spec = learner(Settings(rollout=16, minibatch=16, epochs=10, lr=1e-2))
    assert free.update(act_out(net, spec, 16), 0)["learn/epochs"] == 10
    held, net, spec = learner(Settings(rollout=16, minibatch=16, epochs=10, lr=1e-2, kl_stop=1e-6))
    assert held.update(act_out(net, spec, 16), 0)["learn/epochs"] < 3


def test_kl_penalty_limits_the_policy_change():
    found = []
    for penalty in (0.0, 10.0):
        ppo, net, spec = learner(Settings(rollout=16, minibatch=64, epochs=10, lr=1e-2, kl=penalty))
        found.append(ppo.update(act_out(net, spec, 16), 0)["loss/kl"])
    assert found[1] < found[0] / 2


def test_entropy_bonus_keeps_the_entropy_high():
    found = []
    for bonus in (0.0, 1.0):
        ppo, net, spec = learner(Settings(rollout=16, minibatch=64, epochs=20, lr=1e-2, entropy=bonus))
        with torch.no_grad():
            net.model.policy_head.get_submodule("0").bias.copy_(torch.tensor([3.0, 0, 0]))
        found.append(ppo.update(act_out(net, spec, 16), 0)["loss/entropy"])
    assert found[1] > found[0] + 0.05


def test_value_clip_limits_the_value_change():
    found = []
    for clip in (None, 0.01):
        ppo, net, spec = learner(Settings(rollout=16, minibatch=64, epochs=30, lr=1e-2, value_clip=clip))
        rollout = act_out(net, spec, 16)
        rollout.reward[:] = 50.0
        ppo.update(rollout, 0)
        now = net.value({"obs": rollout.obs["obs"].reshape(-1, 4)}, {}, np.zeros(64, bool))
        found.append(float(np.abs(now - rollout.value.ravel()).mean()))
    assert found[1] < found[0] / 3


def clipped_and_free(seen: int, clip: float, **algo):
    """Yield two learners with normalised returns, one with value_clip and one without, and a rollout for each.

    Its rewards are 1,000 times as large as those of the `seen` updates before it."""
    model = Model(hidden=[16], normalise=Normalise(returns=True))
    for value_clip in (clip, None):
        settings = Settings(rollout=16, minibatch=64, lr=1e-2, value_clip=value_clip, **algo)
        ppo, net, spec = learner(settings, model=model)
        for update in range(seen):
            ppo.update(act_out(net, spec, 16, seed=update), 0)
        rollout = act_out(net, spec, 16, seed=99)
        rollout.reward *= 1000
        yield ppo, net, rollout


def test_value_clip_has_no_effect_before_the_first_gradient_step():
    """No value has changed yet, although the rollout has values in units of rewards and changes the statistics."""
    clipped, free = (ppo.update(rollout, 0) for ppo, _, rollout in clipped_and_free(seen=3, clip=1e-3, epochs=1))
    for name in ("loss/value", "learn/gradient_norm"):
        assert clipped[name] == pytest.approx(free[name], rel=1e-3), name


def test_value_clip_is_in_normalised_units():
    moved = []
    for ppo, net, rollout in clipped_and_free(seen=0, clip=0.1, epochs=40):
        before = net.normaliser.normalise_value(rollout.value.ravel())
        ppo.update(rollout, 0)
        now = net.value({"obs": rollout.obs["obs"].reshape(-1, 4)}, {}, np.zeros(64, bool))
        moved.append(float(np.abs(net.normaliser.normalise_value(now) - before).mean()))
    # In units of rewards, 0.1 would be 1e-4 of these units, and the values could hardly change.
    assert 0.05 < moved[0] < moved[1] / 2


# ------------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("kind", ["none", "lstm"])
def test_restored_learner_continues_bit_for_bit(kind):
    lr = KlAdaptive(kind="kl_adaptive", start=1e-2, target=1e-4)
    model = Model(hidden=[16], memory=Memory(kind=kind, size=8, bptt=4), normalise=Normalise(obs=True, returns=True))
    algo = Settings(rollout=16, minibatch=16, epochs=3, lr=lr, entropy=Linear(kind="linear", start=0.1))

    one, net, spec = learner(algo, model, bptt=4)
    for update in range(3):
        one.update(act_out(net, spec, 16, bptt=4, seed=update), 64 * update)
    kept, arrays = one.save(), net.arrays()
    two, other, _ = learner(algo, model, seed=77, bptt=4)
    other.load_arrays(arrays)
    two.load(kept)
    assert two.current_settings() == one.current_settings()
    for update in range(3, 6):
        a = one.update(act_out(net, spec, 16, bptt=4, seed=update), 64 * update)
        b = two.update(act_out(other, spec, 16, bptt=4, seed=update), 64 * update)
        assert a == b
    assert all((x == y).all() for x, y in zip(net.arrays().values(), other.arrays().values(), strict=True))


def test_settings_can_change_between_updates():
    ppo, _, _ = learner()
    ppo.change({"lr": 0.5, "gamma": 0.5})
    assert ppo.current_settings() | {"lr": 0.5, "gamma": 0.5} == ppo.current_settings()
    with pytest.raises(UseError, match=r"algo\.rolout"):
        ppo.change({"rolout": 3})
    with pytest.raises(UseError, match="cannot become nan"):
        ppo.change({"clip": 0.9, "lr": math.nan})
    assert ppo.current_settings()["clip"] == 0.2  # all or nothing
    again, _, _ = learner()
    again.load(ppo.save())
    assert again.current_settings()["lr"] == 0.5


# ------------------------------------------------------------------------------------------------ divergence


@pytest.mark.parametrize(("name", "bad"), [("reward", math.nan), ("value", math.inf), ("observation obs", math.nan)])
def test_non_finite_value_in_a_rollout_is_reported(name, bad):
    ppo, net, spec = learner()
    rollout = act_out(net, spec, 16)
    (rollout.obs["obs"] if name == "observation obs" else getattr(rollout, name))[5, 2] = bad
    before = weights(net)
    with pytest.raises(DivergedError, match=f"the {name} of row 2 at step 5") as error:
        ppo.update(rollout, 0)
    assert error.value.batch[name] is not None
    assert torch.equal(weights(net), before)


def test_non_finite_loss_is_reported_and_the_weights_do_not_change():
    ppo, net, spec = learner(Settings(rollout=16, minibatch=64, epochs=1, normalise_advantage=False))
    rollout = act_out(net, spec, 16)
    rollout.reward[:] = 1e30  # finite, but its square is not
    before = weights(net)
    with pytest.raises(DivergedError, match="value loss") as error:
        ppo.update(rollout, 0)
    assert {"obs.obs", "advantage", "target", "action", "log_prob"} <= set(error.value.batch)
    assert torch.equal(weights(net), before)
