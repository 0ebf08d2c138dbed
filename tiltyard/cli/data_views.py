"""`data stats`, `head` and `ls`: what is in a dataset, the first steps of an episode, and which datasets there are."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, positive
from tiltyard.cli.output import write_result

if TYPE_CHECKING:
    from tiltyard.data.catalogue import Item
    from tiltyard.data.head import Head
    from tiltyard.data.moments import Summary
    from tiltyard.data.statistics import Statistics

BAR = 40  # characters
MOST_COMMAND = 60  # characters of a command in a listing
DEPTH = 2  # folders below the present one in which datasets are found unless a folder is given
_NUMBERS = ("mean", "std", "min", "max")


def progress_lines(what: str, every: float = 5.0) -> Callable[[int, int], None]:
    """Print a line on stderr now and then: how many of how many."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last >= every:
            last = time.monotonic()
            sys.stderr.write(f"{what}: {done:,} of {total:,} episodes ({formatting.percent(done, total)})\n")

    return show


def size(count: int) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


# ------------------------------------------------------------------------------------------------ stats


def configure_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a dataset")
    parser.add_argument(
        "--episodes", type=positive, metavar="N", help="read N episodes for observations and actions (default: all)"
    )
    add(parser, "--json")


def run_stats(args: argparse.Namespace) -> None:
    from tiltyard.data.statistics import describe

    found = describe(args.folder, sample=args.episodes, progress=progress_lines(f"reading {args.folder}"))
    damaged = found.measured.damaged
    if damaged:
        are, such_as = ("is", "") if len(damaged) == 1 else ("are", "such as ")
        what = f"{formatting.plural(len(damaged), 'episode')} {are} damaged and left out"
        sys.stderr.write(f"warning: {what}: {such_as}{damaged[0]}\n")
        sys.stderr.write(f"hint: tiltyard data verify {args.folder}\n")
    value = {**asdict(found), "compression": found.compression}
    write_result(value, _stats_text(found), as_json=args.json)


def _stats_text(found: Statistics) -> str:
    damaged = len(found.measured.damaged)
    compression = f", compression {formatting.number(found.compression)}" if math.isfinite(found.compression) else ""
    lines = {
        "dataset": found.folder,
        "env": found.env,
        "episodes": f"{found.episodes:,}" + (f", without {damaged:,} damaged" if damaged else ""),
        "agents": ", ".join(f"{name} {number:,}" for name, number in found.agents.items()),
        "steps": f"{found.steps:,}",
        "return": _one_line(found.returns),
        "no return": f"{formatting.plural(found.without_return, 'episode')}, whose return is not finite"
        if found.without_return
        else "",
        "length": _one_line(found.lengths),
        "ends": ", ".join(
            f"{name} {number:,} ({formatting.percent(number, found.episodes)})"
            for name, number in found.ends.items()
            if number
        ),
        "size": f"{size(found.disk_bytes)} on disk; {size(found.raw_bytes)} of arrays in {size(found.file_bytes)} of "
        f"files{compression}",
    }
    text = "".join(f"{name:<9}  {formatting.clean(line)}\n" for name, line in lines.items() if line)
    return text + "".join(f"\n{part}" for part in (_histogram(found), _policies(found), *_arrays_text(found)) if part)


def _one_line(numbers: Summary) -> str:
    if not numbers.count:
        return ""
    return "  ".join(f"{name} {formatting.number(getattr(numbers, name))}" for name in _NUMBERS)


def _histogram(found: Statistics) -> str:
    from tiltyard.track.terminal_chart import nice_number, progress_bar

    most = max((each["episodes"] for each in found.histogram), default=0)
    rows = []
    for each in found.histogram:
        bar = progress_bar(each["episodes"] / most, BAR).plain.rstrip("░")
        rows.append([nice_number(each["low"]), nice_number(each["high"]), f"{each['episodes']:,}", bar])
    return formatting.table(("return", "to", "episodes", ""), rows, (0, 1, 2)) if rows else ""


def _policies(found: Statistics) -> str:
    rows = [
        [each["policy"], f"{each['episodes']:,}", f"{each['steps']:,}", formatting.number(each["return"])]
        for each in found.policies
    ]
    return formatting.table(("policy", "episodes", "steps", "mean return"), rows, (1, 2, 3)) if rows else ""


def _arrays_text(found: Statistics) -> list[str]:
    """Tables of actions and of observations, and of how many episodes they are."""
    measured = found.measured
    if not measured.episodes:
        return []
    rows: list[list[str]] = []
    counted: list[list[str]] = []
    for place, action in enumerate(measured.actions):
        name = "action" if len(measured.actions) == 1 else f"action[{place}]"
        if action["kind"] == "categorical":
            total = sum(action["counts"].values())
            counted += [
                [name, option, f"{number:,}", formatting.percent(number, total)]
                for option, number in action["counts"].items()
            ]
        else:
            rows.append([name, *_cells(action["numbers"])])
    for name, observation in measured.observations.items():
        rows += _observation_rows(name, observation)
    if measured.reward is not None:
        rows.append(["reward", *_cells(measured.reward)])
    all_read = measured.episodes == found.episodes
    which = "all episodes" if all_read else f"{measured.episodes:,} of {found.episodes:,} episodes"
    counts = formatting.table(("action", "option", "chosen", ""), counted, (1, 2, 3)) if counted else ""
    return [counts, f"{formatting.table((f'in {which}', *_NUMBERS), rows, (1, 2, 3, 4))}"]


def _observation_rows(name: str, observation: Mapping[str, Any]) -> list[list[str]]:
    """One row for each channel or element, and one for the whole if there are none or many."""
    label, shape = f"obs.{name}", " x ".join(map(str, observation["shape"]))
    inner: Sequence[Summary] = observation.get("channels") or observation.get("elements") or []
    whole = [f"{label} ({shape} {observation['dtype']})" if shape else f"{label} ({observation['dtype']})"]
    part = "channel " if observation["image"] else ""
    return [
        [*whole, *_cells(observation["all"])],
        *([f"  {label}[{part}{place}]", *_cells(each)] for place, each in enumerate(inner)),
    ]


def _cells(numbers: Summary) -> list[str]:
    return [formatting.number(getattr(numbers, name)) for name in _NUMBERS]


# ------------------------------------------------------------------------------------------------ head


def configure_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a dataset")
    parser.add_argument("--episode", type=int, metavar="N", help="number of the episode (default: the first)")
    parser.add_argument("--agent", metavar="NAME", help="agent, if the env has several (default: the first)")
    parser.add_argument("--steps", type=positive, default=5, metavar="K", help="how many steps (default: 5)")
    add(parser, "--json")


def run_head(args: argparse.Namespace) -> None:
    from tiltyard.data.head import read_head

    found = read_head(args.folder, args.episode, args.agent, args.steps)
    entry = {name: value for name, value in asdict(found.entry).items() if name not in ("total", "meta")}
    more = {"length": found.entry.length, "return": found.entry.total, "meta": found.meta}
    facts = {"env": found.env, **entry, **more, "other_agents": found.other_agents}
    write_result({**facts, "steps": found.steps}, _head_text(found), as_json=args.json)


def _head_text(found: Head) -> str:
    entry = found.entry
    lines = {
        "episode": f"{entry.episode} of {found.env}",
        "agent": entry.agent and f"{entry.agent} (others: {', '.join(found.other_agents) or 'none'})",
        "seed": str(entry.seed),
        "length": f"{entry.length:,}",
        "return": formatting.number(entry.total),
        "ends": " and ".join(name for name in ("terminated", "truncated") if getattr(entry, name)) or "unfinished",
        "meta": json.dumps(found.meta, ensure_ascii=False),
        "file": f"{entry.file} ({entry.bytes:,} bytes)",
    }
    text = "".join(f"{name:<7}  {formatting.clean(line)}\n" for name, line in lines.items() if line)
    names = list(found.steps[0]["obs"])
    rows = [
        [
            str(row["step"]),
            *(_observation(row["obs"][name]) for name in names),
            "" if row["action"] is None else _values(row["action"]),
            "" if row["reward"] is None else formatting.number(row["reward"]),
            " ".join(name for name in ("terminated", "truncated") if row[name]),
        ]
        for row in found.steps
    ]
    return f"{text}\n" + formatting.table(("step", *(f"obs.{name}" for name in names), "action", "reward", ""), rows)


def _observation(value: Any) -> str:
    if isinstance(value, dict) and "shape" in value:
        return f"{' x '.join(map(str, value['shape']))} {value['dtype']}"
    return _values(value)


def _values(value: Any) -> str:
    if isinstance(value, list):
        return f"[{' '.join(map(_values, value))}]"
    return formatting.number(value) if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------ ls


def configure_ls(parser: argparse.ArgumentParser) -> None:
    hint = "where to search (default: this folder and ./data, two folders deep)"
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help=hint)
    add(parser, "--json")


def run_ls(args: argparse.Namespace) -> None:
    from tiltyard.data.catalogue import find

    usual = [folder for folder in (Path(), Path("data")) if folder.is_dir()]
    found = find(args.folders or usual, None if args.folders else DEPTH)
    if not found:
        where = " and ".join(str(folder) for folder in args.folders or usual)
        sys.stderr.write(f"no dataset below {where}\nhint: tiltyard data collect ENV --out FOLDER makes one\n")
    write_result([asdict(item) for item in found], _ls_text(found), as_json=args.json)


def _ls_text(found: Sequence[Item]) -> str:
    rows = [
        [
            str(item.folder),
            item.env,
            f"{item.episodes:,}",
            f"{item.steps:,}",
            size(item.bytes),
            ", ".join(item.policies[:3]) + (" ..." if len(item.policies) > 3 else "") or "-",
            formatting.ago(item.created),
            _command(item),
        ]
        for item in found
    ]
    head = ("folder", "env", "episodes", "steps", "size", "policies", "created", "last command")
    return formatting.table(head, rows, (2, 3, 4)) if rows else ""


def _command(item: Item) -> str:
    """The command that wrote to it last, or what is wrong with it."""
    if item.problem:
        return f"problem: {item.problem}"
    words = item.made[-1].get("command") if item.made else None
    text = shlex.join(map(str, words)) if isinstance(words, list) else "-"
    return text if len(text) <= MOST_COMMAND else f"{text[:MOST_COMMAND]} ..."
