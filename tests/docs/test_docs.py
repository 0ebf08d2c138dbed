"""Execute the documentation: every command and program in README.md, the guides and the errors page.

    ```console / ```sh    lines after `$ ` are commands; other lines are their output, `...` stands for omitted lines
    ```yaml, ```python    a block whose first line is `# some/file.yaml` is written to that file; other Python is run

A command must exit with code 0, or with the code in its comment: `# exits with 2`. A command with `&` runs in the
background. Every shown line of output must begin like a line of the real output, except for numbers and run names.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import tiltyard as product
from tests.cluster.cluster import PACKAGES, Cluster, missing
from tests.counts import LONG, only_when_long
from tiltyard.cli import COMMANDS, actions_of, load_command, main
from tiltyard.config.yaml import parse_yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = [page for page in PAGES if page.name in ("README.md", "errors.md") or page.parent.name == "guides"]
NOT_EXECUTED = ("make test", "make demo", ". .venv/bin/activate", "pip install", "tensorboard ", "wandb sync")
IN_THE_LONG_RUN = (  # Ray on several nodes, which tests/cluster/test_ray.py and tests/engines/rllib test in every run
    "tiltyard train cartpole.yaml --on many",
    "tiltyard train far.yaml engine.nodes=2",
)
# At least 40 s each.
LONG_PAGES = ("rllib.md", "slurm.md", "populations.md", "speed.md", "sweeps.md", "self-play.md", "env-families.md")
ON_SLURM = ("slurm.md", "doctor.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w./-]+\.(?:yaml|py))")
TIMEOUT = 120.0  # seconds for a run in the background to write its first checkpoint


@dataclass
class Command:
    """A line after `$ `, and the output that the page shows for it."""

    text: str
    shown: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def exits_with(self) -> int:
        comment = re.search(r"#.*exits with (\d+)", self.text)
        return int(comment[1]) if comment else 0


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2]


def commands(block: str) -> list[Command]:
    found: list[Command] = []
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif line.strip() not in ("", "..."):
            assert found, f"output before the first command: {line}"
            found[-1].shown.append(line)
    return found


def beginning(line: str) -> str:
    """The first word, with placeholders for numbers and run names."""
    words = re.sub(r"\d{4}-[a-z]+-[a-z]+", "RUN", line).split()
    return re.sub(r"\d[\d,._]*", "#", words[0]) if words else ""


class PageRunner:
    """Runner for the commands of a page, in a folder that has only the examples at first."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capfd = folder, capfd
        self.background: subprocess.Popen[bytes] | None = None
        self.commands_run = 0

    def run_page(self, page: Path) -> None:
        try:
            for language, text in blocks(page):
                named = FILE_NAME.match(text)
                if language in ("yaml", "python") and named:
                    self.write(Path(named[1]), text)
                elif language == "python":
                    self.run_program(text)
                elif language in ("console", "sh"):
                    for command in commands(text):
                        self.execute(command)
        finally:
            if self.background is not None and self.background.poll() is None:
                self.background.kill()
                self.background.wait()

    def write(self, path: Path, text: str) -> None:
        assert not path.is_absolute()
        assert ".." not in path.parts
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8")

    def run_program(self, text: str) -> None:
        program = self.folder / "shown.py"
        program.write_text(text, encoding="utf-8")
        runpy.run_path(str(program), run_name="__main__")
        self.commands_run += 1

    def execute(self, command: Command) -> None:
        words = command.words
        if command.text.startswith(NOT_EXECUTED) or (not LONG and command.text.startswith(IN_THE_LONG_RUN)):
            return
        self.commands_run += 1
        if words[0] == "tiltyard" and words[-1] == "&":
            self.background = subprocess.Popen(
                [sys.executable, "-m", "tiltyard", *words[1:-1]],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        elif words[0] == "sleep":
            self.wait_for_a_checkpoint()
        elif words[:2] == ["kill", "-9"]:
            assert self.background is not None
            assert self.background.poll() is None, "it ended before it could be killed"
            self.background.kill()
            self.background.wait()
        elif words[0] == "tiltyard":
            self.compare(command, self.call(command))
        elif words[0] in ("ls", "head"):
            output = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=True)
            self.compare(command, output.stdout)
        else:
            pytest.fail(f"unknown kind of command: {command.text}")

    def call(self, command: Command) -> str:
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as exited:
            main(command.words[1:])
        output = "".join(self.capfd.readouterr())
        assert exited.value.code == command.exits_with, f"$ {command.text}\nexit {exited.value.code}\n{output}"
        return output

    def compare(self, command: Command, output: str) -> None:
        real = {beginning(line) for line in output.splitlines()}
        for line in command.shown:
            assert beginning(line) in real, f"$ {command.text}\nshows: {line}\nreal output:\n{output}"

    def wait_for_a_checkpoint(self) -> None:
        """Wait for the first checkpoint instead of sleeping, because machines differ in speed."""
        end = time.monotonic() + TIMEOUT
        while not list(self.folder.glob("runs/*/[0-9]*/checkpoints/[0-9]*/manifest.json")):
            assert self.background is not None
            assert self.background.poll() is None, "it exited early"
            assert time.monotonic() < end, "no checkpoint yet"
            time.sleep(0.05)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> PageRunner:
    for name in ("TILTYARD_RUNS", "TILTYARD_SITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a profile in the guide changes it; restored after the page
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples", folder / "examples")
    monkeypatch.chdir(folder)
    return PageRunner(folder, capfd)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # the slowest page takes two minutes, because it waits for jobs of a real Slurm
@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_run(page: Path, runner: PageRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in LONG_PAGES:
        only_when_long("a minute")
    if page.name in ON_SLURM:
        if missing:
            pytest.skip(f"no {', '.join(missing)} here: apt-get install {PACKAGES}")
        with contextlib.closing(Cluster("--nodes", "3", "--cpus", "2")) as cluster:
            monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
            runner.run_page(page)
    else:
        runner.run_page(page)
    if page != ROOT / "docs" / "README.md":
        assert runner.commands_run, f"{page} has no commands"
    if page == ROOT / "README.md":
        explained = (ROOT / "docs" / "concepts" / "run-folder.md").read_text(encoding="utf-8")
        names = {path.name for run in runner.folder.glob("runs/*/[0-9]*") for path in run.iterdir()}
        there = {re.sub(r"attempt-\d+", "attempt-N", name) for name in names}
        assert "checkpoints" in there
        assert [name for name in sorted(there) if name not in explained] == []


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_files_of_a_page_parse(page: Path) -> None:
    """Check verbs, flags and YAML files of all pages in every run, because some pages run only in the long run."""
    for language, text in blocks(page):
        if language == "yaml":
            parse_yaml(text, page.name)
        for command in commands(text) if language in ("console", "sh") else ():
            words = [word for word in command.words if word != "&"]
            if words[0] == "tiltyard" and not command.exits_with:
                name = " ".join(words[1:3]) if actions_of(words[1]) else words[1]
                words = words[words.index(name.split()[-1]) + 1 :]
                parser, _ = load_command(name)
                parser.parse_intermixed_args(words[: words.index("--")] if "--" in words else words)


@pytest.mark.slow
def test_make_demo_works_with_an_existing_environment(tmp_path: Path) -> None:
    """With `-o`, make treats the environment as up to date, so that nothing is installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    assert "\n$ make demo" in (ROOT / "README.md").read_text(encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TILTYARD"))}
    done = subprocess.run(
        ["make", "demo", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip" not in done.stdout
    assert (tmp_path / "demo" / "learning-curve.png").read_bytes().startswith(b"\x89PNG")
    videos = list((tmp_path / "demo" / "evaluation").glob("*.mp4"))
    assert [video.read_bytes()[4:8] for video in videos] == [b"ftyp"]
    last = done.stdout[done.stdout.index("picture") :]
    for word in (
        "demo/learning-curve.png",
        str(videos[0].relative_to(tmp_path)),
        "demo/runs/cartpole/0001-",
        "tiltyard ls",
    ):
        assert word in last


def test_generated_pages_are_up_to_date() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    assert len(pages) == 5
    for path, text in pages.items():
        assert Path(path).read_text(encoding="utf-8") == text, f"{path} is stale: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_existing_files(page: Path) -> None:
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


def test_pictures_are_small_and_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    assert len(pictures) >= 2
    for picture in pictures:
        assert picture.stat().st_size < 150_000
        assert str(picture.relative_to(ROOT)) in readme


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        verb, _, action = name.partition(" ")
        assert re.search(rf"`tiltyard {verb} ?[^`]*\b{action}", page), name
        parser, _ = load_command(name)
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        options = {word for action in shown for word in action.option_strings if word.startswith("--")}
        missing = [word for word in sorted(options - {"--help", "--follow"}) if not re.search(rf"{word}\b", page)]
        assert missing == [], f"tiltyard {name}"


def test_python_signatures_match_the_guide() -> None:
    page = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)\((.*?)\)` \|", page, re.MULTILINE)
    assert {name for name, _ in shown} <= set(product.__all__)
    assert all(f"`{name}" in page for name in product.__all__)
    for name, parameters in shown:
        real = inspect.signature(getattr(product, name)).parameters
        for default in re.findall(r"(\w+)=", parameters):
            assert default in real, f"{name} has no parameter {default}"


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tiltyard").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'environ(?:\.get\(|\[)"(TILTYARD_\w+)"', text)}
    assert read
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def string_templates() -> list[str]:
    """Every string in the package on one line, with `...` for each placeholder of an f-string."""
    found = []
    for path in (ROOT / "tiltyard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append(" ".join("".join(map(str, parts)).split()))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split()))
    return found


def quoted_messages() -> Iterator[tuple[str, str]]:
    """Yield (page, message) from the first columns in errors.md and the last column of the last table in style.md."""
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (.*?) \|", errors, re.MULTILINE):
        for message in re.findall(r"`([^`]* [^`]*)`", row):
            yield "errors.md", message
    style = (ROOT / "docs" / "concepts" / "style.md").read_text(encoding="utf-8")
    for row in style.partition("## Messages before and after")[2].splitlines()[5:]:
        if row.startswith("|"):
            yield "style.md", row.strip("| ").split(" | ")[-1]


def test_quoted_messages_exist_in_the_package() -> None:
    """A quoted message, where `...` stands for any text, is part of a string in the package."""
    templates = string_templates()
    missing = []
    for page, message in quoted_messages():
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")))
        if not any(pattern.search(template) for template in templates):
            missing.append(f"{page}: {message}")
    assert missing == []
