import pytest

from tiltyard.algos.schedules import ScheduledValue
from tiltyard.config.schedules import KlAdaptive, Linear, Piecewise


def test_number_is_constant():
    value = ScheduledValue(3e-4, None)
    value.observe_kl(99.0)
    assert value.at(0) == value.at(10**12) == 3e-4


def test_linear_schedule_counts_env_steps_and_stops_at_its_end():
    value = ScheduledValue(Linear(kind="linear", start=1.0, end=0.2), 1000)
    assert [value.at(s) for s in (0, 500, 1000, 5000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert ScheduledValue(Linear(kind="linear", start=1.0, over=10), 1000).at(5) == pytest.approx(0.5)


def test_piecewise_schedule_interpolates_and_is_constant_outside():
    value = ScheduledValue(Piecewise(kind="piecewise", points=[[100, 1.0], [200, 0.5], [400, 0.0]]), None)
    assert [value.at(s) for s in (0, 100, 150, 200, 300, 400, 999)] == pytest.approx([1, 1, 0.75, 0.5, 0.25, 0, 0])


def adaptive(rises=False):
    setting = KlAdaptive(kind="kl_adaptive", start=1e-3, target=0.01, factor=2.0, min=1e-4, max=4e-3)
    return ScheduledValue(setting, None, rises_with_kl=rises)


def test_kl_adaptive_moves_against_the_divergence_and_stays_in_bounds():
    value = adaptive()
    seen = []
    for kl in (0.01, 0.03, 0.001, 0.001, 0.001, 0.001, 0.02):
        value.observe_kl(kl)
        seen.append(value.at(0))
    assert seen == pytest.approx([1e-3, 5e-4, 1e-3, 2e-3, 4e-3, 4e-3, 4e-3])
    for _ in range(20):
        value.observe_kl(1.0)
    assert value.at(0) == pytest.approx(1e-4)


def test_default_bounds_are_100_times_the_start_value():
    value = ScheduledValue(KlAdaptive(kind="kl_adaptive", start=0.2, factor=10.0), None, rises_with_kl=True)
    for _ in range(5):
        value.observe_kl(1.0)
    assert value.at(0) == pytest.approx(20.0)
    for _ in range(9):
        value.observe_kl(0.0)
    assert value.at(0) == pytest.approx(0.002)


def test_kl_adaptive_penalty_moves_in_the_other_direction():
    value = adaptive(rises=True)
    value.observe_kl(0.5)
    assert value.at(0) == pytest.approx(2e-3)


def test_state_is_restored_but_a_changed_setting_wins():
    value = adaptive()
    value.observe_kl(1.0)
    again = adaptive()
    again.load(value.save())
    assert again.at(0) == value.at(0) == pytest.approx(5e-4)
    number = ScheduledValue(7e-4, None)
    number.load(value.save())
    assert number.at(0) == 7e-4


def test_fixed_value_overrides_a_schedule_and_is_saved():
    setting = Linear(kind="linear", start=1.0)
    value = ScheduledValue(setting, 100)
    value.fix(0.3)
    again = ScheduledValue(setting, 100)
    again.load(value.save())
    assert value.at(50) == again.at(50) == 0.3
    moved = adaptive()
    moved.fix(3e-3)
    assert moved.at(0) == 3e-3
    moved.observe_kl(1.0)
    assert moved.at(0) == pytest.approx(1.5e-3)
