"""Comparison of nodes, connections between nodes, and the list of bad nodes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tiltyard.config.site import Profile, Slurm
from tiltyard.doctor import bad_nodes, node_probe
from tiltyard.doctor.finding import Finding
from tiltyard.doctor.nodes import compare
from tiltyard.run import atomic


def report(**changes: Any) -> dict[str, Any]:
    return {"versions": {"python": "3.11.7", "ray": "2.60.0"}, "clocks": {}, "unreached": {}, "unlocked": [], **changes}


def bad(reports: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each.node, each.what) for each in compare(reports) if each.state == "bad"]


def test_equal_nodes_pass() -> None:
    found = compare({"a": report(), "b": report(clocks={"a": 0.5})})
    assert [(each.node, each.what) for each in found] == [
        (name, what) for name in "ab" for what in ("versions", "clocks", "reach", "locks")
    ]
    assert {each.state for each in found} == {"ok"}
    assert compare({"a": report()}) == []


def test_node_with_a_different_version_is_bad() -> None:
    other = {"python": "3.11.7", "ray": "2.59.0", "pillow": "9"}
    found = [each for each in compare({"a": report(versions=other), "b": report(), "c": report()}) if each.node == "a"]
    assert [(each.state, each.found) for each in found if each.what == "versions"] == [
        ("note", "pillow 9, but none on the other nodes"),
        ("bad", "ray 2.59.0, but 2.60.0 on the other nodes"),
    ]
    assert bad({"a": report(), "b": report(versions=other)}) == [("b", "versions")]
    assert "is not installed" in next(
        each.found
        for each in compare({"a": report(), "b": report(versions={"python": "3.11.7"})})
        if each.state == "bad"
    )


def test_node_with_a_different_clock_is_bad() -> None:
    late = {"a": report(clocks={"b": 0.1, "c": 60.0}), "b": report(clocks={"a": 0, "c": 60.0})}
    late["c"] = report(clocks={"a": -60.0, "b": -60.0})
    assert bad(late) == [("c", "clocks")]
    assert bad({"a": report(clocks={"b": -9.0}), "b": report(clocks={"a": 9.0})}) == [("b", "clocks")]


def test_unreachable_nodes_are_bad() -> None:
    assert bad({"a": report(unreached={"b": "refused"}), "b": report()}) == [("b", "reach")]
    cut_off = {"a": report(unreached={"c": "no"}), "b": report(unreached={"c": "no"})}
    cut_off["c"] = report(unreached={"a": "no", "b": "no"})
    assert bad(cut_off) == [("c", "reach")]
    half = {"a": report(unreached={"b": "10.0.0.2:4: timed out"}), "b": report(), "c": report()}
    assert bad(half) == [("b", "reach")]
    assert "from a (10.0.0.2:4: timed out)" in str(compare(half))


def test_connection_measures_the_clock_or_returns_the_problem(tmp_path: Path) -> None:
    folder = tmp_path / "visit-1"
    folder.mkdir()
    with node_probe.listening("visit-1 b") as port:
        atomic.write_json(folder / "b.here", {"address": "127.0.0.1", "port": port})
        atomic.write_json(folder / "c.here", {"address": "127.0.0.1", "port": port})
        off = node_probe.connect(folder, "b")
        assert isinstance(off, float) and abs(off) < 5
        assert node_probe.connect(folder, "c") == f"127.0.0.1:{port}: another program answers there"
    assert node_probe.connect(folder, "b") == f"127.0.0.1:{port}: Connection refused"


def test_connection_without_an_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "CONNECT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        number = silent.getsockname()[1]
        atomic.write_json(tmp_path / "b.here", {"address": "127.0.0.1", "port": number})
        assert node_probe.connect(tmp_path, "b") == f"127.0.0.1:{number} does not answer"


def test_bad_nodes_are_listed_until_they_pass(tmp_path: Path) -> None:
    full = Finding("shm", "bad", "3 MiB free", node="n1")
    fine = Finding("shm", "ok", "much free", node="n2")
    assert "n1 is marked as bad" in bad_nodes.record_findings(tmp_path, [full, fine])[0]
    assert list(bad_nodes.bad_nodes(tmp_path)) == ["n1"]
    assert bad_nodes.bad_nodes(tmp_path)["n1"].endswith(": shm: 3 MiB free")
    assert bad_nodes.excluded_nodes(Profile(), tmp_path) == {}
    assert list(bad_nodes.excluded_nodes(Profile(slurm=Slurm(exclude_failed=True)), tmp_path)) == ["n1"]
    assert bad_nodes.record_findings(tmp_path, [fine]) == []
    assert bad_nodes.record_findings(tmp_path, [Finding("shm", "note", "some free", node="n1")]) == [
        "n1 passed and was removed from the bad nodes"
    ]
    assert bad_nodes.bad_nodes(tmp_path) == {}


def test_problem_of_all_nodes_marks_none(tmp_path: Path) -> None:
    everywhere = [Finding("runs", "bad", "cannot be written", node=name) for name in ("n1", "n2")]
    assert bad_nodes.record_findings(tmp_path, everywhere) == []
    assert bad_nodes.record_findings(tmp_path, everywhere[:1]) != []
    (tmp_path / ".doctor" / "nodes.json").write_text("{broken")
    assert bad_nodes.bad_nodes(tmp_path) == {}
