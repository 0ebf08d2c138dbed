"""Settings by env step: a change keeps what was in effect before it and replaces what was planned after it."""

from pathlib import Path

from tiltyard.run.settings_schedule import SettingsSchedule, read


def test_change_keeps_earlier_values_and_replaces_later_ones(tmp_path: Path) -> None:
    first = SettingsSchedule().changed(100, {"algo.lr": 0.1}, {"algo.lr": 0.2})
    both = first.changed(200, {"algo.lr": 0.1, "env.options.level": 3}, {"env.options.level": 1})
    both.write(tmp_path)
    found = read(tmp_path)
    assert found == both and found is not None
    assert found.at(0) == found.at(99) == {"algo.lr": 0.2, "env.options.level": 1}
    assert found.at(100) == {"algo.lr": 0.1, "env.options.level": 1}
    assert found.at(250) == {"algo.lr": 0.1, "env.options.level": 3}
    again = both.changed(150, {"algo.lr": 0.3}, {"algo.lr": 0.1})
    assert again.at(120)["algo.lr"] == 0.1 and again.at(250) == {"algo.lr": 0.3}, "what was not reached is replaced"
