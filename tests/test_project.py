"""The files around the code agree with it: version, changelog, citation, CI, commit rules and pinned dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tiltyard import __version__

ROOT = Path(__file__).parents[1]
RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_yaml(name: str) -> Any:
    return YAML(typ="safe").load(read(name))


def make_targets() -> set[str]:
    (line,) = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    return set(line.split())


def test_version_changelog_and_citation_agree() -> None:
    releases = RELEASE.findall(read("CHANGELOG.md"))
    citation = read_yaml("CITATION.cff")
    assert releases[0] == (__version__, str(citation["date-released"]))
    assert citation["version"] == __version__
    assert [author["name"] for author in citation["authors"]] == ["Tiltyard contributors"]
    assert citation["license"] == tomllib.loads(read("pyproject.toml"))["project"]["license"]


def test_changelog_lists_unreleased_changes_then_releases_from_new_to_old() -> None:
    text = read("CHANGELOG.md")
    numbers = [tuple(map(int, version.split("."))) for version, _ in RELEASE.findall(text)]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(numbers)
    assert re.findall(r"^## \[.*", text, re.MULTILINE)[0] == "## [Unreleased]"
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Upgrading"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_ci_runs_only_makefile_targets() -> None:
    targets = make_targets()
    workflow = read_yaml(".github/workflows/ci.yml")
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    commands.append(read(".ci/run").splitlines()[-1].removeprefix("exec "))
    assert commands == ["make test"] * len(commands)
    assert {word for command in commands for word in command.split()[1:]} <= targets


def test_documents_mention_only_existing_makefile_targets() -> None:
    targets = make_targets()
    for name in ("CONTRIBUTING.md", "README.md", "docs/releasing.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        for named in re.findall(r"`make ([a-z-]+)", read(name)):
            assert named in targets, f"{name} names make {named}"


def test_issue_forms_are_complete() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())
    assert [form.name for form in forms] == ["bug.yml", "feature.yml"]
    for form in forms:
        found = read_yaml(str(form.relative_to(ROOT)))
        assert found.keys() == {"name", "description", "labels", "body"}
        ids = [field["id"] for field in found["body"]]
        assert len(set(ids)) == len(ids)
        assert any(field.get("validations", {}).get("required") for field in found["body"])


def test_every_direct_dependency_is_pinned_once() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {plain(re.split(r"[\[<>=]", each)[0]) for each in wanted} - {"tiltyard"}
    pins = [plain(line.split("==")[0]) for line in read("constraints.txt").splitlines()]
    assert names - set(pins) == set()
    assert pins == sorted(set(pins))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_private_torch_functions_have_an_upper_bound() -> None:
    """A private function may change in any minor release, so that the bound is the minor version after the pin."""
    used = {
        name
        for path in (ROOT / "tiltyard").rglob("*.py")
        for name in re.findall(r"\btorch(?:\.\w+)*?\._[a-z]\w*", path.read_text(encoding="utf-8"))
    }
    assert used == {"torch._fused_adam_"}, "name it in docs/releasing.md, or use a public function"
    (torch,) = (each for each in tomllib.loads(read("pyproject.toml"))["project"]["dependencies"] if "torch>" in each)
    (pin,) = re.findall(r"^torch==(\d+)\.(\d+)\.", read("constraints.txt"), re.MULTILINE)
    assert torch.endswith(f",<{pin[0]}.{int(pin[1]) + 1}")


def test_installed_torch_is_within_the_bound() -> None:
    from importlib.metadata import version

    from packaging.specifiers import SpecifierSet

    (torch,) = (each for each in tomllib.loads(read("pyproject.toml"))["project"]["dependencies"] if "torch>" in each)
    assert version("torch") in SpecifierSet(torch.removeprefix("torch"))


def test_try_wheel_refuses_a_wheel_without_presets_or_with_tests(tmp_path: Path) -> None:
    import zipfile

    complete = ["tiltyard/cli/__init__.py", "tiltyard/py.typed"]
    complete += [f"tiltyard/presets/{path.name}" for path in (ROOT / "tiltyard" / "presets").glob("*.yaml")]
    for names, reason in (
        (complete[:2], "has no tiltyard/presets/"),
        ([*complete, "tests/test_project.py"], "holds files that do not belong to the package"),
    ):
        wheel = tmp_path / "tiltyard-0.0.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                file.writestr(name, "")
        command = [str(ROOT / ".ci" / "try-wheel"), sys.executable, str(wheel)]
        refused = subprocess.run(command, capture_output=True, text=True)
        assert refused.returncode == 1
        assert reason in refused.stderr


@pytest.mark.parametrize("name", ["SECURITY.md", "CITATION.cff", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_documents_have_no_contact_addresses(name: str) -> None:
    assert not re.search(r"[\w.]+@[\w-]+\.\w+|https?://(?!keepachangelog|semver)", read(name))
