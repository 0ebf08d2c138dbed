"""No GPU is at hand: tensors that say they are on another device, and compute on the CPU, stand for one.

Every operation between the CPU and the device is seen by a dispatch mode, which counts copies and refuses the rest.
"""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.algos.test_ppo import act_out
from tests.models.specs import BINARY, CATEGORICAL, CONTINUOUS, env
from tiltyard.algos import ppo as module
from tiltyard.algos.ppo import Ppo
from tiltyard.config.algos import Ppo as Settings
from tiltyard.config.fields import Plugin
from tiltyard.config.schedules import KlAdaptive
from tiltyard.config.sections import Memory, Model, Normalise
from tiltyard.errors import DivergedError
from tiltyard.models.policy_net import PolicyNet
from tiltyard.types import ArraySpec

DEVICE = "meta"  # torch has no driver for it that would be asked; the data is real


class OnDevice(torch.Tensor):
    """A tensor of the device; `data_on_cpu` is what it has in its memory."""

    @staticmethod
    def __new__(cls, x):
        more = {"strides": x.stride(), "storage_offset": x.storage_offset(), "dtype": x.dtype, "device": DEVICE}
        made = torch.Tensor._make_wrapper_subclass(cls, x.size(), requires_grad=x.requires_grad, **more)
        made.data_on_cpu = x
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of the mode")


class Accelerator(TorchDispatchMode):
    """Computes operations of the device, counts copies in and out, and refuses to read numbers or to mix devices."""

    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(isinstance(x, OnDevice) for x in tensors)
        wanted = kwargs.get("device")
        to_device = torch.device(wanted).type == DEVICE if wanted is not None else there
        name = function.overloadpacket.__name__
        if there and name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            raise AssertionError(f"{name} waits for the device")
        if name == "_to_copy" and there != to_device:
            self.copies["in" if to_device else "out"] += 1
        elif name == "copy_" and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            self.copies["in" if isinstance(args[0], OnDevice) else "out"] += 1
        elif there and not all(isinstance(x, OnDevice) or x.dim() == 0 for x in tensors):
            raise AssertionError(f"{name} of tensors of both devices")
        if wanted is not None:
            kwargs["device"] = "cpu"
        out = function(*pytree.tree_map(_unwrapped, args), **pytree.tree_map(_unwrapped, kwargs))
        if function._schema.name.endswith("_") and args and isinstance(args[0], OnDevice):
            return args[0]
        return pytree.tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) and to_device else x, out)


def _unwrapped(x):
    return x.data_on_cpu if isinstance(x, OnDevice) else x


IMAGE = ArraySpec("box", (4, 36, 36), "uint8", (), True)
CASES = {
    "mlp": (env(CATEGORICAL, BINARY, CONTINUOUS), Model(hidden=[8], normalise=Normalise(obs=True, returns=True)), {}),
    "masks": (env(CATEGORICAL, masked=True), Model(hidden=[8]), {"entropy": 0.1, "value_clip": 0.1, "kl": 0.1}),
    "lstm": (env(), Model(hidden=[8], memory=Memory(kind="lstm", size=8, bptt=4)), {"kl_stop": 1e-4, "epochs": 4}),
    "images": (env(obs=IMAGE), Model(encoder=Plugin(id="nature"), hidden=[], critic="shared"), {"epochs": 1}),
    "schedule": (env(CONTINUOUS), Model(hidden=[8]), {"lr": KlAdaptive(kind="kl_adaptive", start=1e-2, target=1e-4)}),
}


def make(spec, model, terms, device):
    net = PolicyNet(spec, model, (), seed=1).to(device)
    if device == DEVICE:
        net.dense = None  # it has the former parameters: tensors of another class cannot be moved in place
    ppo = Ppo(Settings(**{"rollout": 16, "minibatch": 32, "epochs": 2, "lr": 1e-2, **terms}), net, 4, 1000, seed=0)
    for parameter, part in zip(ppo.adam.parameters, ppo.adam.parts(ppo.adam.vector), strict=True):
        if device == DEVICE:
            parameter.data_on_cpu = part.data_on_cpu  # `parameter.data = part` does not know of it
    return ppo


def weights(ppo):
    return torch.cat([_unwrapped(x).detach().flatten() for x in ppo.net.parameters()])


@pytest.mark.parametrize("valid", [1.0, 0.8], ids=["all valid", "some invalid"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_update_copies_once_to_the_device_and_once_back(case, valid):
    """And learns what it learns on the CPU, so that the copies are all that it takes."""
    here = make(*case, "cpu")
    here.fast = None  # autograd, as on the device
    rollout = act_out(here.net, case[0], 16, bptt=4, valid=valid)
    wanted = here.update(rollout, 0)
    with Accelerator() as accelerator:
        there = make(*case, DEVICE)
        accelerator.copies.clear()
        found = there.update(rollout, 0)
        statistics = 5 * len([*there.net.obs_stats, *([there.net.return_stats] if there.net.return_stats else [])])
        assert accelerator.copies == {"in": 1 + statistics, "out": 1}
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)
    torch.testing.assert_close(weights(there), weights(here), rtol=1e-4, atol=1e-5)


READS = {"item": lambda x: x.sum().item(), "bool": lambda x: bool((x > 0).any()), "cpu": lambda x: x.sum().cpu()}


@pytest.mark.parametrize("how", READS)
def test_reading_in_the_loss_is_noticed(monkeypatch, how):
    """The check above fails if somebody reads a number during the update."""
    honest = module.ppo_loss
    monkeypatch.setattr(module, "ppo_loss", lambda batch, *rest: (READS[how](batch.advantage), honest(batch, *rest))[1])
    rollout = act_out(PolicyNet(env(), Model(hidden=[8]), (), seed=1), env(), 16)
    with Accelerator() as accelerator:
        ppo = make(env(), Model(hidden=[8]), {}, DEVICE)
        accelerator.copies.clear()
        with nullcontext() if how == "cpu" else pytest.raises(AssertionError, match="waits for the device"):
            ppo.update(rollout, 0)
        assert how != "cpu" or accelerator.copies["out"] == 1 + 4  # one in each gradient step


def test_divergence_on_a_device_is_reported_and_no_later_step_is_taken():
    with Accelerator():
        ppo = make(env(), Model(hidden=[8]), {"normalise_advantage": False}, DEVICE)
        rollout = act_out(PolicyNet(env(), Model(hidden=[8]), (), seed=1), env(), 16)
        rollout.reward[:] = 1e30
        before = weights(ppo).clone()
        with pytest.raises(DivergedError, match="value loss") as error:
            ppo.update(rollout, 0)
        assert torch.equal(weights(ppo), before)
    assert np.isfinite(error.value.batch["advantage"]).all()
