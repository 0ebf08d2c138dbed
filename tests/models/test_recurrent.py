import pytest
import torch

from tiltyard.models.recurrent import Core


@pytest.fixture(params=["lstm", "gru"])
def core(request):
    torch.manual_seed(0)
    return Core(5, 7, request.param)


def step_by_step(core, x, state, first):
    outs = []
    for t in range(len(x)):
        out, state = core(x[t], state, first[t])
        outs.append(out)
    return torch.stack(outs), state


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_unrolling_a_chunk_equals_single_steps_and_their_gradients(core, share):
    x = torch.randn(12, 6, 5)
    first = torch.rand(12, 6) < share
    found = []
    for run in (core.unroll, lambda *a: step_by_step(core, *a)):
        state = {name: torch.full((6, 7), 0.3, requires_grad=True) for name in core.names}
        out, after = run(x, state, first)
        loss = (out * torch.arange(12.0).view(-1, 1, 1)).sum() + sum(item.sum() for item in after.values())
        core.zero_grad()
        loss.backward()
        found.append((out, after, [p.grad.clone() for p in core.parameters()], [s.grad for s in state.values()]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_state_is_reset_only_in_rows_that_start_an_episode(core):
    x = torch.randn(2, 5)
    full = {name: torch.randn(2, 7) for name in core.names}
    fresh, _ = core(x, core.initial_state(2), torch.tensor([False, False]))
    kept, _ = core(x, full, torch.tensor([False, False]))
    mixed, after = core(x, full, torch.tensor([True, False]))
    torch.testing.assert_close(mixed, torch.stack([fresh[0], kept[1]]))
    assert set(after) == set(core.names)
    assert not torch.equal(fresh, kept)


def test_chunk_without_episode_starts_uses_the_fused_layer_once(core):
    x = torch.randn(9, 3, 5)
    out, _ = core.unroll(x, core.initial_state(3), torch.zeros(9, 3, dtype=torch.bool))
    assert torch.equal(out, core.layer(x)[0])
