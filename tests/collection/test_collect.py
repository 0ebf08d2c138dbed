"""Collecting: exact numbers of episodes with many collectors, killed ones among them, and what each episode holds."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import count
from tiltyard.collection import worker
from tiltyard.collection.actors import Mixture
from tiltyard.collection.collect import collect, prepare
from tiltyard.collection.committed import Committed
from tiltyard.collection.request import Prepared, Request, create
from tiltyard.data import dataset_file, manifest, seeds
from tiltyard.data.claims import Claims
from tiltyard.data.folder import read_episodes, read_manifest, unlisted
from tiltyard.data.writer import DatasetWriter
from tiltyard.errors import EnvError, ResumableError, TiltyardError, UseError

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A checked request for episodes of one step; its folder is replaced by the tests."""
    return prepare(Request("basic", tmp_path_factory.mktemp("basic") / "data", 1, seed=5))


def with_folder(prepared: Prepared, folder: Path, episodes: int, *policies: str) -> Prepared:
    request = replace(prepared.request, out=folder, episodes=episodes)
    from tiltyard.collection.policies import parse

    return replace(prepared, request=request, choices=parse(policies, None), limit=episodes, beyond=0)


def work(prepared: Prepared) -> None:
    """Collect as a worker does, in this process."""
    task = worker.Task.from_json(prepared.task())
    policy = Mixture(task.policies, task.spec, False)
    worker.collect(task, policy, prepared.folder, create(prepared), lambda message: None)


def fork(prepared: Prepared) -> Any:
    collector = FORK.Process(target=work, args=(prepared,))
    collector.start()
    return collector


def kill(collector: Any) -> None:
    os.kill(collector.pid, signal.SIGKILL)
    collector.join()


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def committed(folder: Path, total: int) -> Committed:
    found = Committed(folder, total)
    found.refresh()
    return found


def require_exact(folder: Path, total: int, seed: int) -> None:
    """Exactly these episodes, each once and readable, with the seeds that belong to their numbers."""
    found = read_manifest(folder)
    assert found.column("episode").tolist() == list(range(total))
    assert found.column("seed").tolist() == [seeds.episode_seed(seed, number) for number in range(total)]
    assert len(set(found.column("seed").tolist())) == total
    assert len(list(read_episodes(folder))) == total and unlisted(folder, found) == []
    assert len(list((folder / "episodes").glob("*/*"))) == total
    written = [entry for path in manifest.files(folder) for entry in manifest.read_file(path, path.name)[0].to_pylist()]
    assert len(written) == total, "no episode is listed twice"
    assert committed(folder, total).count == total


# ---------------------------------------------------------------------------------------------- many collectors


def test_dataset_is_exact_and_independent_of_the_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three workers, then one more episode by this process; another dataset by this process alone has the same bytes."""
    request = Request("CartPole-v1", tmp_path / "a", 24, policies=["0.5=sticky:0.9", "0.5=random"], workers=3, seed=2)
    found = collect(request)
    assert (found.episodes, found.added, found.seed, found.env) == (24, 24, 2, "CartPole-v1")
    assert len(manifest.files(tmp_path / "a")) <= 3
    found = collect(replace(request, episodes=25, workers=0))
    assert (found.episodes, found.added) == (25, 1)
    assert collect(replace(request, workers=2)).added == 0, "fewer than there are"
    require_exact(tmp_path / "a", 25, 2)
    alone = collect(replace(request, out=tmp_path / "b", episodes=25, workers=0))
    assert (alone.env_steps, alone.mean_return, alone.bytes) == (found.env_steps, found.mean_return, found.bytes)
    one, two = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    assert one.column("sha256").tolist() == two.column("sha256").tolist()
    assert {json.loads(entry.meta)["policy"] for entry in one} == {"sticky:0.9", "random"}
    made = dataset_file.read(tmp_path / "a")
    assert made is not None and [each["episodes"] for each in made.made] == [24, 25]
    assert made.made[0]["policy"] == ["0.5=sticky:0.9", "0.5=random"]


def test_eight_collectors_of_which_three_are_killed_and_started_again(basic: Prepared, tmp_path: Path) -> None:
    total = 200
    prepared = with_folder(basic, tmp_path / "data", total)
    collectors = [fork(prepared) for _ in range(8)]
    wait_until(lambda: committed(tmp_path / "data", total).count > 20, "no episode was collected")
    for collector in collectors[:3]:
        kill(collector)
    collectors = [*collectors[3:], *(fork(prepared) for _ in range(3))]
    for collector in collectors:
        collector.join(100)
        assert collector.exitcode == 0
    require_exact(tmp_path / "data", total, 5)


def test_killed_at_any_moment_no_episode_is_half_lost_or_twice(basic: Prepared, tmp_path: Path) -> None:
    total, folder = 60, tmp_path / "data"
    prepared = with_folder(basic, folder, total)
    rng, seen = random.Random(1), set[int]()
    for _ in range(count(50)):
        collector = fork(prepared)
        time.sleep(rng.uniform(0.0, 0.12))
        kill(collector)
        if not (folder / "dataset.json").exists():
            continue
        found = read_manifest(folder)
        now = set(found.column("episode").tolist())
        assert seen <= now, "a committed episode is lost"
        seen = now
        assert sum(1 for _ in read_episodes(folder)) == len(now)
    work(prepared)
    require_exact(folder, total, 5)


def test_file_without_a_line_is_listed_and_not_played_again(basic: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    work(with_folder(basic, folder, 5))
    before = {path.name: path.stat().st_ino for path in folder.glob("episodes/*/*")}
    shutil.rmtree(folder / "manifests")
    work(with_folder(basic, folder, 6))
    after = {path.name: path.stat().st_ino for path in folder.glob("episodes/*/*")}
    assert before.items() <= after.items() and len(after) == 6
    require_exact(folder, 6, 5)


def test_collector_waits_for_the_claims_of_others(basic: Prepared, tmp_path: Path) -> None:
    """It takes over what a process had claimed that is killed, and ends when the others have committed the rest."""
    folder = tmp_path / "data"
    prepared = with_folder(basic, folder, 10)
    about = create(prepared)
    ready = FORK.Event()

    def hold() -> None:
        with Claims(folder) as claims:
            assert claims.take(3) and claims.take(7)
            ready.set()
            time.sleep(100)

    holder = FORK.Process(target=hold)
    holder.start()
    ready.wait(100)
    collector = fork(prepared)
    wait_until(lambda: committed(folder, 10).count == 8, "the others are not collected")
    collector.join(0.3)
    assert collector.exitcode is None, "it waits"
    work_of_holder = DatasetWriter(folder, about, {})
    (like,) = (episode for number, episode in enumerate(read_episodes(folder)) if number == 0)
    assert work_of_holder.commit(3, [replace(like, seed=seeds.episode_seed(5, 3))])
    kill(holder)
    collector.join(100)
    assert collector.exitcode == 0
    work_of_holder.close()
    require_exact(folder, 10, 5)


def test_number_of_episodes_is_that_of_the_folder(basic: Prepared, tmp_path: Path) -> None:
    """Also if an interrupted command wanted more: its episodes with high numbers count."""
    folder = tmp_path / "data"
    work(with_folder(basic, folder, 1))
    writer = DatasetWriter(folder, create(with_folder(basic, folder, 4)), {})
    episode = next(iter(read_episodes(folder)))
    for number in (2, 40, 41):
        writer.commit(number, [episode])
    writer.close()
    request = Request("basic", folder, 4, workers=0)
    assert (collect(request).episodes, collect(replace(request, episodes=3)).added) == (4, 0)
    assert collect(replace(request, episodes=6)).added == 2
    assert read_manifest(folder).column("episode").tolist() == [0, 1, 2, 3, 40, 41]


def test_committed_reads_only_what_is_new(basic: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    found = committed(folder, 4)
    assert (found.count, list(found.missing())) == (0, [0, 1, 2, 3])
    writer = DatasetWriter(folder, create(with_folder(basic, folder, 4)), {})
    work(with_folder(basic, folder, 1))
    episode = next(iter(read_episodes(folder)))
    found.refresh()
    assert list(found.missing()) == [1, 2, 3]
    for number in (2, 9):
        writer.commit(number, [episode])
        found.refresh()
    assert list(found.missing()) == [1, 3] and 2 in found and 1 not in found
    with writer._manifest.path.open("ab") as file:
        file.write(b'{"episode": 3, "agent"')  # torn
    found.refresh()
    assert 3 not in found
    writer.close()
    found.refresh()
    assert list(found.missing()) == [1, 3]


# ---------------------------------------------------------------------------------------------- episodes


def test_agents_of_an_env_are_stored_together(tmp_path: Path) -> None:
    collect(Request("visitors", tmp_path / "data", 4, ["env.options.pauses=true"], ["ou"], workers=0, seed=1))
    found = read_manifest(tmp_path / "data")
    assert found.numbers().tolist() == [0, 1, 2, 3]
    assert len({entry.key for entry in found}) == len(found) == 20
    assert {entry.agent: entry.length for entry in found} == {
        "host": 6,
        "late": 3,
        "early": 2,
        "guest": 1,
        "guest#2": 2,
    }
    for number in range(4):
        own = [entry for entry in found if entry.episode == number]
        assert {entry.file for entry in own} == {f"episodes/00000/{number:09d}.tar"}
        assert {entry.seed for entry in own} == {seeds.episode_seed(1, number)}
    assert committed(tmp_path / "data", 4).count == 4


def test_max_steps_truncates(tmp_path: Path) -> None:
    found = collect(Request("CartPole-v1", tmp_path / "data", 6, max_steps=7, workers=0, seed=1))
    entries = list(read_manifest(tmp_path / "data"))
    assert [entry.length for entry in entries] == [7] * 6 and found.env_steps == 42
    assert all(entry.truncated and not entry.terminated for entry in entries)
    with pytest.raises(UseError, match="with other settings"):
        prepare(Request("CartPole-v1", tmp_path / "data", 6, max_steps=8))
    assert prepare(Request("CartPole-v1", tmp_path / "new", 6, max_steps=1_000)).env.time_limit is None, "500 is lower"


def test_infos_are_saved_on_request(tmp_path: Path) -> None:
    request = Request("memory", tmp_path / "a", 2, workers=0, save_info=True, seed=0)
    collect(request)
    collect(replace(request, out=tmp_path / "b", save_info=False))
    with_info, without = list(read_episodes(tmp_path / "a")), list(read_episodes(tmp_path / "b"))
    assert ["recalled" in each.info[-1] for each in with_info] == [True, True]
    assert [each.info for each in without] == [[], []]
    for one, two in zip(with_info, without, strict=True):
        assert np.array_equal(one.obs["obs"], two.obs["obs"]) and np.array_equal(one.action, two.action)


GLOBAL = """
import random
import numpy as np

def guess(obs):
    return int(np.random.randint(5) if random.random() < 0.5 else np.random.choice(5))
"""


def test_global_generators_follow_from_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, basic: Prepared
) -> None:
    """Forked workers would else all guess the same; the caller's own generators are left as they were."""
    (tmp_path / "guess.py").write_text(GLOBAL)
    monkeypatch.chdir(tmp_path)
    before = random.getstate(), np.random.get_state()[1].tolist()
    actions = []
    for name in ("a", "b"):
        collect(Request("basic", tmp_path / name, 12, policies=["guess.py:guess"], workers=0, seed=4))
        actions.append([int(each.action[0, 0]) for each in read_episodes(tmp_path / name)])
    assert actions[0] == actions[1] and len(set(actions[0])) > 2
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


# ---------------------------------------------------------------------------------------------- failures


DEADLY = """
import os
from pathlib import Path
from tiltyard.envs.toys.single import Basic

class CustomEnv(Basic):
    def __init__(self, *, how="exit", once=True):
        super().__init__()
        self.how, self.once = how, once
    def step(self, action):
        mark = Path(__file__).with_name(f"mark-{self.how}")
        if os.environ.get("DEADLY") and not (self.once and mark.exists()):
            mark.touch()
            if self.how == "raise":
                raise RuntimeError("the joint broke")
            os.kill(os.getpid(), 9) if self.how == "kill" else os._exit(3)
        return super().step(action)
"""


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def collect_deadly(folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
    """The probe must not die: it is checked elsewhere."""
    from tiltyard.collection import pool
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.training.signals import StopSignals

    prepared = prepare(Request("deadly.py", folder, 12, settings, seed=1))
    monkeypatch.setenv("DEADLY", "1")
    found = committed(folder, 12)
    with ForkServer(pool.PRELOAD) as server:
        pool.Pool(server, prepared, 2, found, StopSignals()).run()


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_worker_that_dies_is_replaced(
    deadly: Path, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    collect_deadly(deadly, monkeypatch, f"env.options.how={how}")
    require_exact(deadly, 12, 1)
    sentence = {"kill": "a collecting process was killed by SIGKILL", "raise": "step() raised RuntimeError: the joint"}
    assert sentence[how] in (stderr := capfd.readouterr().err) and "another process takes its place" in stderr


def test_workers_that_die_again_and_again_are_an_error(
    deadly: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EnvError, match="a collecting process exited with code 3") as error:
        collect_deadly(deadly, monkeypatch, "env.options.once=false")
    assert "0 of 12 episodes are there, and 3 processes failed" in error.value.hint
    capfd.readouterr()


def test_error_of_the_writing_thread_ends_the_episode(basic: Prepared, tmp_path: Path) -> None:
    prepared = with_folder(basic, tmp_path / "data", 5)
    create(prepared)
    (tmp_path / "data" / "episodes").write_text("in the way")
    with pytest.raises(TiltyardError, match="cannot write an episode to"):
        work(prepared)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk_loses_nothing_and_can_be_continued(small_disk: Path, tmp_path: Path) -> None:
    ballast, folder = small_disk / "ballast", small_disk / "data"
    ballast.write_bytes(bytes(850_000))
    request = Request("basic", folder, 60, workers=0, seed=5)
    with pytest.raises(ResumableError, match=r"cannot write an episode to .*: No space left") as error:
        collect(request)
    assert "no episode is lost" in error.value.hint and "type the same command again" in error.value.hint
    there = read_manifest(folder)
    assert 0 < len(there) < 60 and sum(1 for _ in read_episodes(folder)) == len(there)
    ballast.unlink()
    assert collect(request).episodes == 60
    require_exact(folder, 60, 5)


# ---------------------------------------------------------------------------------------------- wrong use


def test_folders_that_cannot_be_used_are_refused(basic: Prepared, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UseError, match=r"is not a dataset: it has notes\.txt"):
        create(with_folder(basic, other, 3))
    create(with_folder(basic, tmp_path / "data", 3))
    for request, message in (
        (Request("CartPole-v1", tmp_path / "data", 3), "is a dataset of basic, not of CartPole-v1"),
        (Request("basic", tmp_path / "data", 3, seed=6), "has the seed 5, not 6"),
    ):
        with pytest.raises(UseError, match=message):
            prepare(request)
    about = dataset_file.about_env(basic.env, basic.spec)
    dataset_file.create_or_check(tmp_path / "evaluated", about, None)
    with pytest.raises(UseError, match="was not made by `tiltyard data collect`"):
        prepare(Request("basic", tmp_path / "evaluated", 3))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.jsonl").write_text("")
    with pytest.raises(UseError, match="of an earlier format"):
        prepare(Request("basic", tmp_path / "old", 3))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("CartPole-v9", Path("x"), 1), "CartPole-v9"),
        (Request("runs/nothing", Path("x"), 1), "neither an env nor a run"),
        (Request("basic", Path("x"), 0), "--episodes 0 must be from 1"),
        (Request("basic", Path("x"), 1, ["env.optoins.a=1"]), "1 problem"),
        (Request("basic", Path("x"), 1, policies=["greedy"]), "names no run"),
        (Request("last", Path("x"), 1), "there is no run"),
    ],
)
def test_wrong_requests_write_nothing(request_: Request, message: str, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UseError) as error:
        prepare(request_)
    assert message in error.value.message and (error.value.hint or error.value.details)
    assert not (tmp_path / "x").exists()
