from pathlib import Path

import pytest
import torch

from tests.algos.test_ppo import act_out, learner
from tests.models.specs import CATEGORICAL, CONTINUOUS, env
from tiltyard import train
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.fields import Plugin
from tiltyard.config.sections import Memory, Model
from tiltyard.errors import ConfigError, DivergedError, UseError
from tiltyard.run.checkpoint import newest_valid
from tiltyard.run.state_file import read_tree

EXAMPLES = Path(__file__).parents[2] / "examples"
KL = f"{EXAMPLES}/kl_to_reference.py:KlToReference"
SHORT = {"env": "CartPole-v1", "stop": {"updates": 1}, "eval": {"at_end": False}, "track": {"tensorboard": False}}


def make(loss, options=None, **more):
    terms = {"rollout": 16, "minibatch": 32, "epochs": 4, "lr": 1e-2, "loss": Plugin(id=loss, options=options or {})}
    return learner(Settings(**terms), **more)


def write(tmp_path, text):
    file = tmp_path / "terms.py"
    file.write_text(text)
    return file


def bandit(ppo, net, spec, updates=8):
    """Learn that option 2 is good; returns the metrics and its probability."""
    metrics = {}
    for update in range(updates):
        rollout = act_out(net, spec, 16, bptt=4, seed=update)
        rollout.reward[:] = rollout.action[..., 0] == 2
        rollout.terminated[:], rollout.truncated[:] = True, False
        metrics = ppo.update(rollout, 0)
    return metrics, float((act_out(net, spec, 64, bptt=4, seed=99).action[..., 0] == 2).mean())


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_term_keeps_the_policy_close_to_its_reference(memory):
    """Without weight the bandit's good option is learned; with a large one the policy stays as it began."""
    model = Model(hidden=[16], memory=Memory(kind=memory, size=8, bptt=4))
    learned = {}
    for weight in (0.0, 100.0):
        metrics, learned[weight] = bandit(*make(KL, {"weight": weight}, model=model, bptt=4))
        assert metrics["loss/KlToReference"] == pytest.approx(weight * metrics["loss/KlToReference/kl"], rel=1e-4)
    assert learned[0.0] > 0.9 and learned[100.0] < 0.5


def test_gradient_is_that_of_the_sum(tmp_path):
    """A function as a term: the gradient of PPO's loss plus that of the term."""
    file = write(tmp_path, "def pull(batch, outputs, settings, *, to=0.0):\n"
                           "    return batch.mean((outputs.value - to).square()) + settings['clip']\n")  # fmt: skip
    spec = env(CATEGORICAL, CONTINUOUS)
    algo = {"rollout": 16, "minibatch": 64, "epochs": 1, "lr": 0.0, "max_grad_norm": None}
    plain, net, _ = learner(Settings(**algo), spec=spec)
    own, _, _ = learner(Settings(**algo, loss=Plugin(id=f"{file}:pull", options={"to": 3.0})), spec=spec)
    assert plain.fast is not None and own.fast is None
    rollout = act_out(net, spec, 16)
    plain.update(rollout, 0)
    metrics = own.update(rollout, 0)
    _, value = net.unroll(rollout.obs, {}, torch.from_numpy(rollout.first))
    term = (value - 3.0).square().mean()
    by_term = torch.autograd.grad(term, plain.adam.parameters, allow_unused=True, materialize_grads=True)
    for found, base, more in zip(own.adam.gradient_parts(), plain.adam.gradient_parts(), by_term, strict=True):
        torch.testing.assert_close(found, base + more, rtol=1e-3, atol=1e-5)
    assert metrics["loss/pull"] == pytest.approx(term.item() + 0.2, rel=1e-4)


def test_reference_is_saved_and_loaded():
    one, net, spec = make(KL, {"weight": 1.0})
    bandit(one, net, spec, 3)
    two, other, _ = make(KL, {"weight": 1.0}, seed=5)
    other.load_arrays(net.arrays())
    two.load(one.save())
    rollout = act_out(net, spec, 16, seed=7)
    assert one.update(rollout, 0) == two.update(rollout, 0)
    assert all((x == y).all() for x, y in zip(net.arrays().values(), other.arrays().values(), strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def term(batch, outputs, settings): return 1.0", "must return a tensor with one number"),
        ("def term(batch, outputs, settings): return outputs.value", "must return a tensor with one number"),
        ("def term(batch, outputs, settings): return 1 / 0", "ZeroDivisionError"),
        ("n = []\ndef term(b, outputs, s):\n n.append(1)\n return outputs.value.sum(), {str(len(n)): b.count}", "must"),
    ],
)
def test_terms_that_fail_are_named(tmp_path, text, message):
    ppo, net, spec = make(f"{write(tmp_path, text)}:term")
    with pytest.raises(UseError, match=message):
        ppo.update(act_out(net, spec, 16), 0)


def test_unknown_options_are_refused_before_training():
    with pytest.raises(ConfigError) as error:
        make(KL, {"wieght": 1.0})[0].save()
    assert error.value.problems[0].setting == "algo.loss.options.wieght"


def test_term_that_is_not_finite_is_named(tmp_path):
    file = write(tmp_path, "def term(batch, outputs, settings): return outputs.value.sum() * float('nan')")
    ppo, net, spec = make(f"{file}:term")
    with pytest.raises(DivergedError, match=r"term of algo\.loss"):
        ppo.update(act_out(net, spec, 16), 0)


def test_reference_is_the_policy_of_model_init(runs):
    """Not the random one that the run was built with."""
    first = train(live=False, **SHORT)
    second = train(live=False, **SHORT | {"seed": 5, "model": {"init": str(first.folder)}, "algo": {"loss": KL}})
    folder = newest_valid(second)[0].folder
    tree = read_tree(folder / "engine", "state")["learner"]["algo"]["loss"]
    wanted = read_tree(newest_valid(first)[0].folder / "policies", "main")["weights"]
    assert {name for name in wanted if (tree[f"reference.{name}"] != wanted[name]).any()} == set()
