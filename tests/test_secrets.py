"""No file of a finished run, with all features on, contains a planted secret or a pickle.

The only exception is a secret in a setting: experiment.yaml keeps it for a resume, for the user alone.
"""

import io
import json
import os
import pickle
import pickletools
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import in_own_process
from tiltyard.run.folder import Run, find

# Concatenated at run time, so that secret scanners do not report this file.
PLANTED = {
    "environment: a key": ("WANDB_API_KEY", "fedcba9876543210" * 2 + "fedcba98"),
    "environment: a token": ("GITHUB_TOKEN", "ghp_" + "zY8xW6vU4tS2rQ0pO9nM7lK5jI3hG1fE2dC4"),
    "environment: a password": ("CLUSTER_PASSWORD", "correct-horse-battery"),
    "environment: on the allow-list": ("SLURM_AUTH_TOKEN", "slurm-secret-8842"),
    "environment: not on the allow-list": ("HARMLESS_NAME", "marker-of-an-unlisted-variable"),
}
IN_OPTIONS = "sk-" + "live-9f8e7d6c5b4a39281706f5e4"
IN_DIFF = {"a token": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345", "a password": "staple-in-the-diff"}
IN_ADDRESS = "userinfo-of-an-address"

ENV = """
import gymnasium, numpy as np
class Locked(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, *, api_key: str = "", render_mode=None):
        assert api_key.startswith("sk-")
        self.render_mode = render_mode
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.full(3, self.t, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.full(3, self.t, np.float32), float(action), self.t == 4, False, {"depth": self.t}
    def render(self):
        return np.full((16, 16, 3), 40 * self.t, np.uint8)
"""


# All tests here share one run, so that they must stay on one xdist worker.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("secrets")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run in a dirty repository full of secrets: trained, resumed, evaluated, with all trackers, videos and rollouts."""
    place = tmp_path_factory.mktemp("repository")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        for name, secret in PLANTED.values():
            patch.setenv(name, secret)
        patch.setenv("TILTYARD_RUNS", str(place / "runs"))
        patch.setenv("HOME", str(place / "home"))
        patch.setenv("TILTYARD_NOTE", f"from https://me:{IN_ADDRESS}@example.org")
        patch.chdir(place)
        (place / "home").mkdir()
        (place / "locked.py").write_text(ENV)
        (place / "settings.py").write_text("x = 1\n")
        (place / ".gitignore").write_text("runs\nhome\n")
        git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
            subprocess.run([*git, *words], check=True, capture_output=True)
        text = (
            f'HF = "{IN_DIFF["a token"]}"\npassword = "{IN_DIFF["a password"]}"\nremote = "https://u:{IN_ADDRESS}@h/"\n'
        )
        (place / "settings.py").write_text(f"{text}pw = '{PLANTED['environment: a password'][1]}'\nplain_change = 2\n")
        in_own_process(
            "train", "locked.py:Locked", "name=locked", f"env.options.api_key={IN_OPTIONS}",
            "engine.envs=2", "algo.rollout=8", "algo.minibatch=16", "algo.epochs=1", "stop.env_steps=32",
            "eval.episodes=2", "eval.video=true", "track.tensorboard=true", "track.wandb=offline",
        )  # fmt: skip
        in_own_process("resume", "locked", "stop.env_steps=48", f"env.options.api_key={IN_OPTIONS}")
        run = find("locked", place / "runs")
        rollouts = ["--save-rollouts", str(run.folder / "rollouts"), "--save-info"]
        in_own_process("eval", "locked", "--episodes", "2", "--video", f"env.options.api_key={IN_OPTIONS}", *rollouts)
        in_own_process("fork", "locked", "name=child", f"env.options.api_key={IN_OPTIONS}", "stop.env_steps=64")
        yield run


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def unpacked(raw: bytes) -> Iterator[bytes]:
    """Yield the bytes, and the decompressed content if they are a zip file or a compressed stream."""
    yield raw
    if zipfile.is_zipfile(io.BytesIO(raw)):
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    for window in (31, 15):  # gzip, zlib
        try:
            yield zlib.decompressobj(window).decompress(raw)
        except zlib.error:
            continue


def test_no_file_of_the_run_has_a_planted_secret(finished: Run) -> None:
    secrets = {**{where: secret for where, (_, secret) in PLANTED.items()}, "an address": IN_ADDRESS}
    secrets |= {f"the diff: {what}": secret for what, secret in IN_DIFF.items()}
    leaks = []
    for path in files(finished.folder.parents[1]):
        texts = list(unpacked(path.read_bytes()))
        leaks += [(str(path), where) for where, secret in secrets.items() if any(secret.encode() in t for t in texts)]
        private = path.name.startswith("experiment.") and not path.stat().st_mode & 0o077
        if not private and any(IN_OPTIONS.encode() in text for text in texts):
            leaks.append((str(path), "an option on the command line"))
    assert not leaks, "\n".join(map(str, leaks))


def test_other_facts_are_kept(finished: Run) -> None:
    """The test above would also pass with an empty folder."""
    facts = json.loads((finished.folder / "provenance.json").read_text())
    assert facts["command"][1:4] == ["train", "locked.py:Locked", "name=locked"]
    assert facts["environment"]["TILTYARD_NOTE"] == "from https://***@example.org"
    assert facts["environment"]["SLURM_AUTH_TOKEN"] == "***" and "HARMLESS_NAME" not in facts["environment"]
    assert "plain_change = 2" in (finished.folder / "provenance.diff").read_text()
    assert IN_OPTIONS in finished.experiment_file.read_text()
    kinds = {path.suffix for path in files(finished.folder)}
    assert {".safetensors", ".mp4", ".parquet", ".csv", ".wandb", ".jsonl", ".yaml", ".log"} <= kinds
    assert list(finished.folder.glob("tb/*tfevents*"))


# ---------------------------------------------------------------------------------------------- pickles


def pickle_in(path: Path) -> str | None:
    """Return how a file is or contains a pickle, or None."""
    if path.suffix in (".pt", ".pth", ".pkl", ".pickle", ".joblib", ".npy", ".npz"):
        return f"is called {path.suffix}"
    raw = path.read_bytes()
    if zipfile.is_zipfile(io.BytesIO(raw)):
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for name in archive.namelist():
                if name.endswith(("data.pkl", ".pkl")) or is_pickle(archive.read(name)):
                    return f"is a zip with the pickle {name}"
    if any(is_pickle(content) for content in unpacked(raw)):
        return "is a pickle"
    # With protocol 2 or higher, a pickle starts with 0x80 and the protocol, also inside another format.
    at = raw.find(b"\x80")
    while at >= 0:
        if raw[at + 1 : at + 2] in (b"\x02", b"\x03", b"\x04", b"\x05") and is_pickle(raw[at:], within=True):
            return f"holds a pickle at byte {at}"
        at = raw.find(b"\x80", at + 1)
    return None


def is_pickle(raw: bytes, within: bool = False) -> bool:
    """Return whether the bytes are a nontrivial pickle. A number with a full stop is also a pickle, but is text here."""
    try:
        operations = [operation.name for operation, _, _ in pickletools.genops(raw)]
    except Exception:  # noqa: BLE001 - pickletools raises many kinds of exceptions
        return False
    return len(operations) > (4 if within else 2)


def test_no_file_of_a_finished_run_is_or_contains_a_pickle(finished: Run) -> None:
    found = {str(path): why for path in files(finished.folder) if (why := pickle_in(path))}
    assert found == {}


@pytest.mark.parametrize("protocol", range(6))
def test_scanner_finds_planted_pickles(tmp_path: Path, protocol: int) -> None:
    import torch

    value = {"weights": [1.0, 2.0], "name": "x"}
    raw = pickle.dumps(value, protocol)
    (tmp_path / "plain.bin").write_bytes(raw)
    (tmp_path / "packed.bin").write_bytes(zlib.compress(raw))
    with zipfile.ZipFile(tmp_path / "archive.bin", "w") as archive:
        archive.writestr("inner/state", raw)
    torch.save(value, tmp_path / "renamed.safetensors")
    (tmp_path / "old.pt").write_bytes(b"")
    if protocol >= 2:
        (tmp_path / "inside.bin").write_bytes(b"HEADER" + raw)
    assert all(pickle_in(path) for path in tmp_path.iterdir())
    (tmp_path / "text").write_text("1.\n")
    (tmp_path / "notes.json").write_text('{"a": 1}')
    assert not pickle_in(tmp_path / "text") and not pickle_in(tmp_path / "notes.json")
