"""Does a population find the learning rate while it trains? `python bench/population.py [--repeats 5]`.

Four members start with learning rates spread over two decades, two at a time on two cores. They are compared with a
run at the tuned rate: the best of a grid over the same decades, by the mean over its seeds. Both train for the same
number of env steps; the score is an evaluation at the end. Aim: the best member reaches at least 0.95 of the tuned
run's score, in 4 of 5 repeats.

The best of four may be good by luck, and CartPole's return is limited to 500. So a control trains the same four
members with the same seeds and pauses, but without copies: the effect of the population is the difference of the two
means over all members.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import describe

from tiltyard.config.yaml import dump_yaml
from tiltyard.sweep.folder import Sweep, find_sweep
from tiltyard.sweep.report import summarize

RESULTS = Path(__file__).resolve().parent / "results"
AIM = 0.95
LOWEST, HIGHEST = 3e-5, 3e-3
RATES = [3e-5, 1e-4, 3e-4, 1e-3, 3e-3]
STEPS, PERIOD = 65_536, 8_192
UNREACHED = 1e9  # a gap that no member exceeds
EXPERIMENT: dict[str, Any] = {
    "env": "CartPole-v1",
    "engine": {"kind": "local", "envs": 8, "workers": 0},
    "algo": {"rollout": 128, "minibatch": 256, "epochs": 4},
    "stop": {"env_steps": STEPS},
    "eval": {"every": PERIOD, "episodes": 20},
    "track": {"tensorboard": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="compare a population with a run at the tuned learning rate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--grid-seeds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print the results without writing them")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        os.environ["TILTYARD_RUNS"] = place
        grid = sweep(Path(place), "grid", {"space": {"algo.lr": RATES}, "seeds": options.grid_seeds})
        table = {group.settings["algo.lr"]: group.value for group in summarize(grid).groups}
        tuned = max(table, key=lambda rate: table[rate] or 0.0)
        for rate in RATES:
            print(f"rate {rate:g}: {table[rate]:.1f}{'   tuned' if rate == tuned else ''}")
        seeds = [1000 + 10 * repeat for repeat in range(options.repeats)]
        alone = sweep(Path(place), "alone", {"points": [{"algo.lr": tuned}], "seeds": seeds})
        tuned_scores = {row.trial.seed: row.value for row in summarize(alone).rows}
        rows = [repeat(Path(place), seed, tuned_scores[seed]) for seed in seeds]
    report(tuned, table, rows, time.perf_counter() - began, dry=options.dry)


def sweep(place: Path, name: str, more: dict[str, Any]) -> Sweep:
    """Run a sweep to its end with the command line."""
    plan = place / f"{name}.yaml"
    plan_settings = {"name": name, "experiment": EXPERIMENT, "metric": {"name": "eval/return", "of": "last"}}
    plan.write_text(dump_yaml({**plan_settings, "max_parallel": 2, **more}))
    command = [sys.executable, "-m", "tiltyard", "sweep", "start", str(plan)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return find_sweep(name)


def members(place: Path, name: str, seed: int, gap: float) -> Sweep:
    """Train four members to the end; a member that is ahead by more than `gap` may be copied."""
    rules = {"period": PERIOD, "start": PERIOD, "replace": 0.25, "rate": 1.0, "gap": gap}
    space = {"algo.lr": {"log": [LOWEST, HIGHEST]}}
    more = {"search": "population", "trials": 4, "space": space, "population": rules, "seed": seed, "seeds": [seed]}
    return sweep(place, f"{name}-{seed}", more)


def repeat(place: Path, seed: int, tuned: float | None) -> dict[str, Any]:
    began = time.perf_counter()
    found, control = members(place, "population", seed, 1e-6), members(place, "control", seed, UNREACHED)
    first, same = ([trial.settings["algo.lr"] for trial in each.trials()] for each in (found, control))
    assert first == same and not exploits(control), "the control differs from the population only in the copies"
    groups, copies = summarize(found).groups, exploits(found)
    scores, alone = ([group.value or 0.0 for group in each] for each in (groups, summarize(control).groups))
    best = scores[0]
    row = {"seed": seed, "best": best, "members": scores, "control": alone, "tuned": tuned, "exploits": copies}
    row |= {"ratio": best / tuned if tuned else 0.0, "rate": groups[0].settings["algo.lr"]}
    row |= {"first_rates": first, "seconds": time.perf_counter() - began}
    print(
        f"seed {seed}: best {best:.1f}, tuned {tuned:.1f}, ratio {row['ratio']:.3f}, {copies} exploits, "
        f"mean {fmean(scores):.1f}; without copies best {alone[0]:.1f}, mean {fmean(alone):.1f}"
    )
    return row


def exploits(found: Sweep) -> int:
    return sum(line["kind"] == "exploit" for line in found.decisions())


def report(tuned: float, grid: dict[float, Any], rows: list[dict[str, Any]], seconds: float, *, dry: bool) -> None:
    met, here = sum(row["ratio"] >= AIM for row in rows), describe()
    lines = [
        f"## A population of 4 that starts with learning rates from {LOWEST:g} to {HIGHEST:g}, CartPole-v1",
        "",
        f"{date.today()}; {here['cpu']}, {here['cores']} cores, {here['system']}, Python {here['python']}.",
        f"{STEPS:,} env steps of each member, period {PERIOD:,}; evaluations of 20 episodes at the end.",
        f"Tuned rate {tuned:g}, of {', '.join(f'{rate:g}: {value:.0f}' for rate, value in sorted(grid.items()))}.",
        "",
        "| seed | first rates | best member | its rate at the end | run with the tuned rate | ratio | exploits | "
        "mean of members | without copies: best | mean |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row['seed']} | {', '.join(f'{rate:.1e}' for rate in sorted(row['first_rates']))} | "
            f"{row['best']:.1f} | {row['rate']:.1e} | {row['tuned']:.1f} | {row['ratio']:.3f} | {row['exploits']} | "
            f"{fmean(row['members']):.1f} | {row['control'][0]:.1f} | {fmean(row['control']):.1f} |"
            for row in rows
        ),
        "",
        f"Mean over all members: {mean_of(rows, 'members'):.1f}, without copies {mean_of(rows, 'control'):.1f}.",
        f"At least {AIM} in {met} of {len(rows)} repeats (aim: 4 of 5). {seconds:.0f} s in all.",
    ]
    print("\n".join(lines))
    if dry:
        return
    name = RESULTS / f"{date.today()}-population"
    name.with_suffix(".md").write_text("\n".join(lines) + "\n")
    whole = {"tuned": tuned, "grid": {str(rate): value for rate, value in grid.items()}, "repeats": rows}
    name.with_suffix(".json").write_text(json.dumps(whole, indent=2) + "\n")


def mean_of(rows: list[dict[str, Any]], arm: str) -> float:
    return fmean(score for row in rows for score in row[arm])


if __name__ == "__main__":
    main()
