"""`bench` and `tune`: the speed of an env without learning, and the settings that train fastest on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, positive, seconds
from tiltyard.cli.output import data_stdout

if TYPE_CHECKING:
    from tiltyard.tuning.autotune import Measurement, Tuned
    from tiltyard.tuning.sampler import Bench, Throughput


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


# ------------------------------------------------------------------------------------------------ bench


def configure_bench(parser: argparse.ArgumentParser) -> None:
    add(parser, "target", "overrides")
    parser.add_argument("--workers", type=positive, metavar="K", help="at most K processes (default: usable cores)")
    parser.add_argument("--seconds", type=seconds, metavar="N", help="seconds of stepping in total (default: 12)")
    add(parser, "--json")


def run_bench(args: argparse.Namespace) -> None:
    from tiltyard.tuning.sampler import SECONDS, bench

    with data_stdout() as data:
        found = bench(args.target, args.overrides, workers=args.workers, seconds=args.seconds or SECONDS, say=_say)
        data.write(_bench_json(found) if args.json else _bench_table(found))
        data.flush()
    best = found.best
    _say(f"best    {best.env_steps_per_second:,.0f} env steps per second, stored in {found.file}")
    _say("next    train and show compare their speed with it")


def _bench_json(found: Bench) -> str:
    whole = {"env": found.env, "envs": found.envs, "best": asdict(found.best)}
    return json.dumps({**whole, "sampled": [asdict(each) for each in found.sampled]}) + "\n"


def _bench_table(found: Bench) -> str:
    widths = list(dict.fromkeys(width for each in found.sampled for width in each.windows))

    def cells(each: Throughput) -> list[str]:
        return [
            str(each.processes),
            str(each.envs),
            f"{each.env_steps_per_second:,.0f}",
            *(f"{each.windows[width]:,.0f}" if width in each.windows else "-" for width in widths),
            f"{each.frames_per_second:,.0f}",
            f"{100 * each.reset_share:.1f} %",
            f"{each.env_bytes / 2**20:.2f} MiB",
        ]

    head = ("processes", "envs", "env steps/s", *(f"over {width} s" for width in widths), "frames/s", "resets", "env")
    return formatting.table(head, [cells(each) for each in found.sampled], right=range(len(head)))


# ------------------------------------------------------------------------------------------------ tune


def configure_tune(parser: argparse.ArgumentParser) -> None:
    add(parser, "target", "overrides")
    about = "seconds of measuring, without starting envs (default: 60)"
    parser.add_argument("--seconds", type=seconds, metavar="N", help=about)
    add(parser, "--json")


def run_tune(args: argparse.Namespace) -> None:
    from tiltyard.engines.local import PRELOAD
    from tiltyard.processes.fork_server import ForkServer
    from tiltyard.training.preflight import prepare
    from tiltyard.tuning.autotune import SECONDS, tune

    with data_stdout() as data, ForkServer(PRELOAD) as server:
        prepared = prepare(args.target, [*args.overrides, "engine.tune=false"], server=server)
        for note in prepared.spec.notes:
            _say(f"note    {note}")
        found = tune(prepared.loaded, prepared.copies, prepared.spec, args.seconds or SECONDS, server, _say)
        data.write(_tuned_json(found) if args.json else _tuned_text(found))
        data.flush()
    chosen = [word.partition("=")[0] for word in found.overrides]
    others = [word for word in args.overrides if word.partition("=")[0].strip() not in chosen]
    _say(f"next    {shlex.join(['tiltyard', 'train', args.target, *others, *found.overrides])}")


def _tuned_json(found: Tuned) -> str:
    def as_data(trial: Measurement) -> dict[str, object]:
        figures = {"env_steps_per_second": trial.speed, "turns": len(trial.speeds), "bound": trial.bound}
        return {**asdict(trial.point), **figures, "failed": trial.failed}

    whole = {
        "words": found.overrides,
        "chosen": as_data(found.chosen),
        "own": as_data(found.own),
        "seconds": found.seconds,
    }
    return json.dumps({**whole, "tried": [as_data(trial) for trial in found.measurements]}) + "\n"


def _tuned_text(found: Tuned) -> str:
    head = ("workers", "mode", "envs", "rollout", "minibatch", "env steps/s", "rounds", "")
    rows = []
    for trial in found.measurements:
        point = trial.point
        remark = "current" if trial is found.own else ""
        remark = "chosen" + (", current" if remark else "") if trial is found.chosen else remark
        numbers = [point.envs, point.rollout, "-" if point.minibatch is None else point.minibatch]
        speed = f"{trial.speed:,.0f}" if len(trial.speeds) else "-"
        remark = f"failed: {trial.failed}" if trial.failed else remark
        rows.append([str(point.workers), point.mode, *map(str, numbers), speed, str(len(trial.speeds)), remark])
    table = formatting.table(head, rows, right=(0, 2, 3, 4, 5, 6))
    return table + "".join(f"{line}\n" for line in (*found.lines(), " ".join(found.overrides)))
