"""Statistics of datasets: every number is that of numpy on the whole arrays."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from tests.counts import count
from tests.data.episodes import SPEC, episode, new_dataset, writer
from tiltyard.data import statistics
from tiltyard.data.folder import read_episodes
from tiltyard.data.moments import ActionNumbers, Moments, Summary
from tiltyard.data.statistics import describe
from tiltyard.data.writer import DatasetWriter
from tiltyard.envs.actions import action_spec
from tiltyard.envs.spaces import observation_specs
from tiltyard.types import Array, EnvSpec, Episode

OLD = Path(__file__).parents[1] / "old" / "episodes-schema-1"

SPACE = spaces.Dict(
    {
        "first": spaces.Box(0, 255, (2, 6, 7), np.uint8),  # channels first
        "depth": spaces.Box(-9, 9, (5, 6, 3), np.float32),
        "long": spaces.Box(-9, 9, (50,), np.float64),
        "flags": spaces.MultiBinary(4),
    }
)
ACTION = spaces.Tuple((spaces.Discrete(5, start=2), spaces.MultiBinary(2), spaces.Box(0, 9, (1,))))


def assert_summary(found: Summary, values: Array) -> None:
    wide = np.asarray(values, np.float64)
    assert found.count == wide.size and found.min == wide.min() and found.max == wide.max()
    assert found.mean == pytest.approx(wide.mean(), rel=1e-12, abs=1e-12)
    assert found.std == pytest.approx(wide.std(), rel=1e-7, abs=1e-12)


def wide_episode(steps: int, seed: int, spec: EnvSpec) -> Episode:
    rng = np.random.default_rng(seed)
    action = np.stack([rng.integers(0, 4, steps), *rng.integers(0, 2, (2, steps)), rng.uniform(-1, 1, steps)], 1)
    obs = {
        name: rng.integers(0, 256, (steps + 1, *item.shape)).astype(item.dtype)
        if item.dtype == "uint8"
        else (1e4 + rng.normal(size=(steps + 1, *item.shape))).astype(item.dtype)
        for name, item in spec.obs.items()
    }
    return Episode(obs, action.astype(np.float32), rng.normal(size=steps), False, True, seed)


def test_numbers_are_those_of_the_whole_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK", 1)  # one row group at a time
    spec = EnvSpec(obs=observation_specs(SPACE, 1), action=action_spec(ACTION))
    made = DatasetWriter(tmp_path, new_dataset(tmp_path, spec=spec), {"policy": "mixed"})
    written = [wide_episode(steps, seed, spec) for seed, steps in enumerate((1, 63, 64, 200))]
    for number, each in enumerate(written):
        made.commit(number, [each])
    found = describe(tmp_path)
    measured = found.measured
    assert measured.episodes == 4 and not measured.damaged and measured.reward is not None
    whole = {name: np.concatenate([each.obs[name] for each in written]) for name in spec.obs}
    for name, array in whole.items():
        assert_summary(measured.observations[name]["all"], array)
    for channel, numbers in enumerate(measured.observations["first"]["channels"]):
        assert_summary(numbers, whole["first"][:, channel])
    for channel, numbers in enumerate(measured.observations["depth"]["channels"]):
        assert_summary(numbers, whole["depth"][..., channel])
    assert len(measured.observations["depth"]["channels"]) == 3 and measured.observations["long"]["elements"] == []
    for element, numbers in enumerate(measured.observations["flags"]["elements"]):
        assert_summary(numbers, whole["flags"][:, element])
    actions = np.concatenate([each.action for each in written])
    options = [int((actions[:, 0] == option).sum()) for option in range(5)]
    assert measured.actions[0] == {"kind": "categorical", "counts": dict(zip("01234", options, strict=True))}
    for column in (1, 2, 3):
        assert_summary(measured.actions[column]["numbers"], actions[:, column])
    assert_summary(measured.reward, np.concatenate([each.reward for each in written]))
    raw = sum(array.nbytes for each in written for array in (*each.obs.values(), each.action, each.reward))
    assert found.raw_bytes == raw + 2 * found.steps, "two flags of a byte each for every step"


def test_numbers_of_the_manifests(tmp_path: Path) -> None:
    random, expert = writer(tmp_path, policy="random"), writer(tmp_path, policy="expert")
    written = [episode(2 + 3 * seed, seed) for seed in range(20)]
    for number, each in enumerate(written):
        (random if number < 15 else expert).commit(number, [each])
    found = describe(tmp_path)
    totals = np.asarray([each.reward.astype(np.float64).sum() for each in written])
    lengths = np.asarray([len(each.action) for each in written])
    assert (found.env, found.episodes, found.steps) == ("CartPole-v1", 20, lengths.sum())
    assert_summary(found.lengths, lengths)
    assert found.returns.mean == pytest.approx(totals.mean()) and found.returns.std == pytest.approx(totals.std())
    counts, edges = np.histogram(totals, statistics.BINS)
    assert [each["episodes"] for each in found.histogram] == counts.tolist()
    assert [each["low"] for each in found.histogram] == pytest.approx(edges[:-1].tolist())
    assert found.ends == {"terminated": 10, "truncated": 10, "both": 0, "unfinished": 0}
    assert [(each["policy"], each["episodes"], each["steps"]) for each in found.policies] == [
        ("expert", 5, lengths[15:].sum()),
        ("random", 15, lengths[:15].sum()),
    ]
    assert found.policies[1]["return"] == pytest.approx(totals[:15].mean())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found.disk_bytes == sum(path.stat().st_size for path in files)
    assert found.file_bytes == sum(path.stat().st_size for path in files if path.suffix == ".parquet")
    assert found.compression == found.raw_bytes / found.file_bytes


def test_sample_of_episodes_is_read(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for seed in range(20):
        made.commit(seed, [episode(4, seed)])
    found, again = describe(tmp_path, sample=5), describe(tmp_path, sample=5)
    assert found.episodes == 20 and found.measured.episodes == 5 and found == again
    assert found.measured.observations["arm"]["all"].count == 5 * 5 * 3
    assert describe(tmp_path, sample=50).measured.episodes == 20


def test_damaged_episode_is_left_out_and_named(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for seed in range(3):
        made.commit(seed, [episode(4, seed)])
    path = tmp_path / "episodes" / "00000" / "000000001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = describe(tmp_path)
    assert found.measured.episodes == found.episodes == found.returns.count == 2 and found.steps == 8
    (message,) = found.measured.damaged
    assert "000000001.parquet is damaged" in message
    kept = np.concatenate([episode(4, seed).obs["eye"] for seed in (0, 2)])
    assert_summary(found.measured.observations["eye"]["all"], kept)


def test_dataset_without_episodes_and_returns_that_are_not_finite(tmp_path: Path) -> None:
    new_dataset(tmp_path)
    empty = describe(tmp_path)
    assert (empty.episodes, empty.steps, empty.raw_bytes, empty.histogram) == (0, 0, 0, [])
    assert math.isnan(empty.compression) and empty.measured.observations["eye"]["all"].count == 0
    broken = episode(4, 0)
    broken.reward[1] = np.nan
    made = writer(tmp_path)
    made.commit(0, [broken])
    made.commit(1, [episode(4, 1)])
    found = describe(tmp_path)
    assert found.without_return == 1 and found.returns.count == 1 and len(found.histogram) == 1
    assert found.measured.reward is not None and math.isnan(found.measured.reward.mean)


def test_agents_are_counted(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.commit(0, [episode(4, 0, agent="left"), episode(5, 0, agent="right")])
    made.commit(1, [episode(4, 1, agent="left"), episode(5, 1, agent="right")])
    found = describe(tmp_path)
    assert found.agents == {"left": 2, "right": 2} and found.episodes == found.measured.episodes == 4


def test_folder_of_schema_1_is_measured(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    found = describe(tmp_path / "old")
    arrays = np.concatenate([each.obs["eye"] for each in read_episodes(tmp_path / "old")])
    assert found.episodes == 3 and found.steps == 76
    assert_summary(found.measured.observations["eye"]["all"], arrays)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "float64"])
def test_blocks_of_any_size_give_the_same_numbers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count(50)):
        features, length = int(rng.integers(1, 5)), int(rng.integers(1, 400))
        values = (rng.normal(size=(features, length)) * 10 + 100).astype(dtype)
        if dtype == "float64":
            values += 1e9  # the spread is lost if squares are summed
        moments = Moments(features)
        for block in np.array_split(values, np.sort(rng.integers(0, length, 4)), axis=1):
            moments.add(block)
        assert_summary(moments.total(), values)
        for found, row in zip(moments.summaries(), values, strict=True):
            assert_summary(found, row)


def test_unexpected_options_are_counted_too() -> None:
    numbers = ActionNumbers(action_spec(spaces.Discrete(2)))
    numbers.add(np.asarray([[0], [7], [7]], np.float32))
    assert numbers.numbers() == [{"kind": "categorical", "counts": {"0": 1, "1": 0, "7": 2}}]
    assert SPEC.action.columns == len(ActionNumbers(SPEC.action).numbers()) == 2
