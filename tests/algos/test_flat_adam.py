import pytest
import torch
from torch import nn

from tiltyard.algos.flat_adam import Adam
from tiltyard.errors import UseError
from tiltyard.processes.resources import CACHE_LINE


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_steps_equal_those_of_torch():
    ours, theirs = net(), net()
    adam, reference = Adam(ours, 1e-5), torch.optim.Adam(theirs.parameters(), eps=1e-5)
    for step in range(20):
        lr = 1e-2 / (step + 1)
        x = torch.randn(7, 3)
        loss = ours(x).square().mean()
        adam.differentiate(loss)
        norm = adam.step(lr, 0.1)
        reference.param_groups[0]["lr"] = lr
        reference.zero_grad()
        theirs(x).square().mean().backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)), rel=1e-4) and norm > 0.1
        reference.step()
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), atol=1e-6, rtol=1e-5)


def test_parameters_stay_views_of_the_vector_after_loading_weights():
    model = net()
    adam = Adam(model, 1e-8)
    model.load_state_dict({name: torch.ones_like(item) for name, item in model.state_dict().items()})
    assert adam.vector.sum() == sum(parameter.numel() for parameter in model.parameters())
    adam.vector.zero_()
    assert all((parameter == 0).all() for parameter in model.parameters())


def test_parameters_are_aligned_to_cache_lines_and_the_padding_stays_zero():
    """The alignment of a matrix may change the order of sums in a library, and a copy must give the same numbers."""
    model = net()
    adam = Adam(model, 1e-8)
    begin = adam.vector.data_ptr()
    assert [(parameter.data_ptr() - begin) % CACHE_LINE for parameter in model.parameters()] == [0, 0, 0, 0]
    for _ in range(3):
        adam.differentiate(model(torch.ones(1, 3)).sum())
        adam.step(0.1)
    assert torch.count_nonzero(adam.vector) == sum(torch.count_nonzero(parameter) for parameter in model.parameters())


def test_unused_parameters_do_not_change():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    before = model["idle"].weight.clone()
    adam = Adam(model, 1e-8)
    adam.differentiate(model["used"](torch.ones(1, 2)).sum())
    adam.step(0.1)
    assert torch.equal(model["idle"].weight, before)


def test_frozen_parameters_are_not_optimised():
    model = net()
    model[0].weight.requires_grad_(False)
    adam = Adam(model, 1e-8)
    assert adam.names == ["0.bias", "2.weight", "2.bias"]


def test_moments_are_saved_by_name_and_other_shapes_are_refused():
    model = net()
    adam = Adam(model, 1e-8)
    adam.differentiate(model(torch.ones(1, 3)).sum())
    adam.step(0.1)
    tree = adam.save()
    assert set(tree["first"]) == {name for name, _ in model.named_parameters()}
    other = Adam(net(), 1e-8)
    other.load(tree)
    assert torch.equal(other.first, adam.first) and torch.equal(other.second, adam.second) and other.steps == 1
    with pytest.raises(UseError, match=r"0\.weight with shape \(5, 3\).*\(5, 4\)"):
        Adam(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), 1e-8).load(tree)
