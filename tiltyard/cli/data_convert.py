"""`data export` and `data import`: datasets in the formats of other programs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add, positive
from tiltyard.cli.output import data_stdout
from tiltyard.cli.stopping import NOTHING, stoppable
from tiltyard.errors import UseError
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.data.imports import Probed

EXPORTS = ("tfrecord", "minari", "npz", "webdataset", "gif")
IMPORTS = ("minari", "tfrecord", "npz", "pickle")
MOST_SHARDS = 99_999  # five digits in the names
_PAUSE = 5.0  # seconds between two lines about progress
# option -> (its name in the code, formats that have it)
_ONLY_FOR = {
    "--name": ("name", ("tfrecord", "webdataset")),
    "--shards": ("shards", ("tfrecord", "webdataset")),
    "--shard-mb": ("shard_mb", ("tfrecord", "webdataset")),
    "--obs": ("obs", ("gif",)),
    "--fps": ("fps", ("gif",)),
}
FORMATS_HELP = """\
formats:
  tfrecord    NAME.tfrecord-00000-of-00004: one tf.train.Example per episode, with obs.X, action, reward, seed, ends;
              complete: `tiltyard data import` restores it bit for bit
  npz         one file per episode: arrays obs.X [T + 1, ...], action [T, columns], reward [T]; complete
  webdataset  NAME-000000.tar: one sample per episode, .npy and .json members; complete
  minari      a Minari dataset whose id is the name of --out, such as cartpole-v0; actions are the env's own;
              info dicts are left out
  gif         one animated GIF per episode of an image observation, at 256 colours; to look at, not to import
"""

# ------------------------------------------------------------------------------------------------ export


def configure_export(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = FORMATS_HELP
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a dataset")
    parser.add_argument("--to", required=True, choices=EXPORTS, metavar="FORMAT", help=", ".join(EXPORTS))
    parser.add_argument("--out", required=True, type=Path, metavar="PATH", help="new folder to write")
    parser.add_argument("--episodes", type=positive, metavar="N", help="only the first N episodes (default: all)")
    parser.add_argument("--name", help="tfrecord, webdataset: name of the files (default: as FOLDER)")
    shards = parser.add_mutually_exclusive_group()
    shards.add_argument("--shards", type=_shards, metavar="N", help="tfrecord, webdataset: number of files")
    shards.add_argument(
        "--shard-mb", type=positive, metavar="MB", help="tfrecord, webdataset: size of a file, about (default: 128)"
    )
    parser.add_argument("--obs", metavar="NAME", help="gif: the image observation (default: the first)")
    parser.add_argument("--fps", type=_fps, metavar="N", help="gif: frames per second, at most 50 (default: 20)")
    add(parser, "--json")


def _shards(text: str) -> int:
    number = positive(text)
    if number > MOST_SHARDS:
        raise argparse.ArgumentTypeError(f"{text!r} must be at most {MOST_SHARDS:,}")
    return number


def _fps(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.1 <= number <= 50:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0.1 to 50")
    return number


def run_export(args: argparse.Namespace) -> None:
    for option, (field, formats) in _ONLY_FOR.items():
        if getattr(args, field) is not None and args.to not in formats:
            raise UseError(f"{option} is an option of --to {' and '.join(formats)}", f"leave out {option}")

    from tiltyard.data import exports

    chosen = {"name": args.name, "shards": args.shards, "shard_mb": args.shard_mb, "obs": args.obs, "fps": args.fps}
    given = {name: value for name, value in chosen.items() if value is not None}
    wanted = exports.Wanted(args.to, atomic.absolute(args.out), episodes=args.episodes, **given)
    lines = _Lines("exported")
    with data_stdout() as data:
        with stoppable(NOTHING):
            done = exports.export(args.folder, wanted, lines.show)
        for note in done.notes:
            sys.stderr.write(f"note: {note}\n")
        if args.json:
            keys = ("format", "episodes", "recordings", "steps", "files", "bytes", "notes")
            data.write(atomic.to_json({"out": str(args.out), **{key: getattr(done, key) for key in keys}}) + "\n")
            return
        whose = "its" if done.episodes == 1 else "their"
        several = f" ({done.recordings:,} recordings of {whose} agents)" if done.recordings != done.episodes else ""
        plural = formatting.plural
        data.write(
            f"{args.out}: {plural(done.episodes, 'episode')}{several}, {plural(done.steps, 'step')}, "
            f"{plural(done.files, 'file')}, {done.bytes / 1e6:,.1f} MB\n"
        )
    if args.to == "minari":
        root, name = wanted.out.parent, wanted.out.name
        sys.stderr.write(f"read it with minari.load_dataset({name!r}) and MINARI_DATASETS_PATH={root}\n")
    elif args.to in IMPORTS:
        sys.stderr.write(f"read it again with: tiltyard data import {args.out} --out FOLDER\n")


class _Lines:
    """Lines about the progress of a long command."""

    def __init__(self, verb: str) -> None:
        self._verb, self._last = verb, time.monotonic()

    def show(self, done: int, total: int | None = None) -> None:
        if time.monotonic() - self._last >= _PAUSE:
            self._last = time.monotonic()
            of = f" of {total:,} ({formatting.percent(done, total)})" if total else ""
            sys.stderr.write(f"{self._verb} {done:,}{of} episodes\n")


# ------------------------------------------------------------------------------------------------ import


def configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder of files, or the id of a Minari dataset")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="new dataset; repeat to continue")
    parser.add_argument(
        "--from", dest="format", choices=IMPORTS, metavar="FORMAT", help=f"{', '.join(IMPORTS)} (default: by the files)"
    )
    parser.add_argument(
        "--env", metavar="FILE|ENV", help="the env that was recorded (default: as the data say, else made from arrays)"
    )
    add(parser, "--json")


def run_import(args: argparse.Namespace) -> None:
    from tiltyard.data import imports

    lines = _Lines("imported")
    with data_stdout() as data:
        kind = args.format or imports.detect(args.source)
        probed = _probed(args.env) if args.env else None
        command = ["tiltyard", "data", "import", args.source, "--from", kind, "--out", str(args.out)]
        command += ["--env", args.env] if args.env else []
        with stoppable():
            done = imports.import_data(
                args.source, args.out, format=kind, probed=probed, command=command, progress=lines.show
            )
        for note in done.notes:
            sys.stderr.write(f"note: {note}\n")
        if args.json:
            keys = ("format", "episodes", "steps", "present", "notes")
            data.write(atomic.to_json({"out": str(args.out), **{key: getattr(done, key) for key in keys}}) + "\n")
            return
        were = "was" if done.present == 1 else "were"
        present = f"; {done.present:,} {were} there already" if done.present else ""
        new = f"{formatting.plural(done.episodes, 'episode')}, {formatting.plural(done.steps, 'step')}"
        data.write(f"{args.out}: {new}{present}\n")
    sys.stderr.write(f"look at it with: tiltyard data stats {args.out}\n")


def _probed(target: str) -> Probed:
    from tiltyard.config.load import load
    from tiltyard.envs.probe import probe

    loaded = load(target)
    return loaded.experiment.env, probe(loaded.experiment.env, base=loaded.base)
