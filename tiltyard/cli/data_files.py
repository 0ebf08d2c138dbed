"""`data verify`, `data repair` and `data pack`: whether the files of a dataset are sound, and how they are stored."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiltyard.cli import formatting
from tiltyard.cli.arguments import add
from tiltyard.cli.output import write_result
from tiltyard.cli.stopping import stoppable
from tiltyard.errors import EXIT_DONE, EXIT_FAILED, UseError
from tiltyard.run import atomic

if TYPE_CHECKING:
    from tiltyard.data.manifest import Damage, Entry

MOST_MEGABYTES = 1_000_000

# ------------------------------------------------------------------------------------------------ verify


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places", metavar="FOLDER|PATTERN", nargs="+", help="a dataset, or TFRecord files such as 'old/*.tfrecord*'"
    )
    add(parser, "--json")


def run_verify(args: argparse.Namespace) -> int:
    results = [_verified(place) for text in args.places for place in _places(text)]
    damages = [each for result in results for each in result["damages"]]
    if args.json:
        write_result({"sound": not damages, "places": results}, "", as_json=True)
    elif damages:
        rows = [[each["file"], each["place"], each["episode"], each["what"]] for each in damages]
        sys.stdout.write(formatting.table(("file", "place", "episode", "damage"), rows))
    else:
        sys.stdout.writelines(f"{_summary(result)}, all sound\n" for result in results)
    for result in results:
        if result["damages"] and result["kind"] == "dataset":
            sys.stderr.write(f"repair it with: tiltyard data repair {result['path']}\n")
    return EXIT_FAILED if damages else EXIT_DONE


def _places(text: str) -> list[Path]:
    """The dataset with that name, or what a pattern matches."""
    if Path(text).is_dir():
        return [Path(text)]
    root = Path(Path(text).anchor)
    found = sorted(root.glob(str(Path(text).relative_to(root))))
    if not found:
        raise UseError(f"there is no dataset {text}, and no file matches it", "give a folder, or a quoted pattern")
    other = [path for path in found if not path.is_dir() and ".tfrecord" not in path.name]
    if other:
        hint = "give the folder of a dataset, or files with .tfrecord in their names"
        raise UseError(f"{other[0]} is neither a dataset nor a TFRecord file", hint)
    return found


def _verified(place: Path) -> dict[str, Any]:
    if not place.is_dir():
        from tiltyard.data import tfrecord

        wrong = [_damage(str(place), f"record {number}", what) for number, what in tfrecord.damages(place)]
        return {"path": str(place), "kind": "tfrecord", "bytes": place.stat().st_size, "damages": wrong}
    from tiltyard.data import verify

    found = verify.examine(place)
    wrong = [_of_dataset(place, each) for each in found.damages]
    return {
        "path": str(place),
        "kind": "dataset",
        "episodes": len(found.manifest),
        "bytes": found.bytes,
        "damages": wrong,
    }


def _of_dataset(place: Path, damage: Damage) -> dict[str, str]:
    return _damage(str(place / damage.file), damage.place, damage.what, damage.episode)


def _damage(file: str, place: str, what: str, episode: str = "") -> dict[str, str]:
    return {"file": file, "place": place, "episode": episode, "what": what}


def _summary(result: dict[str, Any]) -> str:
    episodes = f"{formatting.plural(result['episodes'], 'episode')}, " if "episodes" in result else ""
    return f"{result['path']}: {episodes}{formatting.plural(result['bytes'], 'byte')}"


# ------------------------------------------------------------------------------------------------ repair


def configure_repair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a dataset")
    add(parser, "--dry-run", "--json")


def run_repair(args: argparse.Namespace) -> None:
    from tiltyard.data import manifest
    from tiltyard.data.folder import QUARANTINE
    from tiltyard.data.repair import move_text, repair

    with stoppable():
        found, steps = repair(args.folder, dry_run=args.dry_run, report=_report if not args.json else lambda line: None)
    kept = {entry.key for entry in manifest.read(args.folder)} if not args.dry_run else set()
    gone = [entry for entry in found.episodes if entry.key not in kept]
    lost = [entry.name for entry in gone]
    if args.json:
        whole = {"folder": str(args.folder), "dry_run": args.dry_run, "steps": steps, "lost": lost}
        write_result(whole, "", as_json=True)
        return
    if not steps:
        sys.stdout.write(f"{args.folder}: nothing to repair\n")
    elif not args.dry_run:
        sound = f"{formatting.plural(len(kept), 'episode')} {'is' if len(kept) == 1 else 'are'} sound"
        sys.stdout.write(f"{args.folder}: repaired; {sound}, {len(lost):,} {'is' if len(lost) == 1 else 'are'} lost\n")
    moved = {file for file in {entry.file for entry in gone} if move_text(file) in steps}
    place = args.folder / QUARANTINE
    _report_lost(
        [each for each in gone if each.file in moved], f"to be moved to {place}" if args.dry_run else f"in {place}"
    )
    _report_lost([each for each in gone if each.file not in moved], "missing")


def _report_lost(gone: Sequence[Entry], where: str) -> None:
    """Name lost episodes, and say where their files are."""
    if gone:
        shown = ", ".join(entry.name for entry in gone[:10]) + (" ..." if len(gone) > 10 else "")
        its = "its file is" if len(gone) == 1 else "their files are"
        sys.stderr.write(f"lost: {shown}; {its} {where}\n")


def _report(line: str) -> None:
    sys.stdout.write(f"{line}\n")


# ------------------------------------------------------------------------------------------------ pack


def configure_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a dataset")
    parser.add_argument("--shard-mb", type=_megabytes, metavar="N", help="size of a shard in MiB (default: 256)")
    add(parser, "--json")


def _megabytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= MOST_MEGABYTES:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of MiB above 0, at most {MOST_MEGABYTES:,}")
    return size


def run_pack(args: argparse.Namespace) -> int:
    from tiltyard.data import shards

    size = max(1, round((shards.MEGABYTES if args.shard_mb is None else args.shard_mb) * (1 << 20)))
    with stoppable():
        done = shards.pack(args.folder, size, report=lambda line: sys.stderr.write(f"{line}\n"))
    for reason in done.skipped:
        sys.stderr.write(f"not packed: {reason}\n")
    whole = {
        "folder": str(args.folder),
        "shards": done.shards,
        "episodes": done.episodes,
        "bytes": done.bytes,
        "removed": done.removed,
        "skipped": done.skipped,
    }
    packed = f"{formatting.plural(done.episodes, 'episode')} packed into {formatting.plural(done.shards, 'shard')}"
    text = f"{args.folder}: {packed}, {done.bytes:,} bytes\n"
    sys.stdout.write(atomic.to_json(whole, indent=2) + "\n" if args.json else text)
    return EXIT_FAILED if done.skipped else EXIT_DONE
