"""The loop state: which score counts, and which checkpoint becomes the best."""

import math

import pytest

from tiltyard.config.sections import Save
from tiltyard.training.loop_state import LoopState


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_score_that_is_not_finite_never_becomes_best(mode: str, broken: float) -> None:
    save, state = Save(mode=mode), LoopState()
    for step, value, best in ((1, broken, None), (2, 5.0, 5.0), (3, broken, 5.0)):
        state.latest["eval/return"], state.evaluated_at = value, step
        assert state.improves(save, step) == (best == value)
        assert (state.best, state.score(save, step)) == (best, value if math.isfinite(value) else None)


def test_evaluation_of_other_weights_does_not_count_as_score() -> None:
    state = LoopState(latest={"eval/return": 5.0}, evaluated_at=10)
    assert state.score(Save(), 20) is None and not state.improves(Save(), 20)
