"""Lines of code to read to follow `tiltyard train CartPole-v1` from the start of the process to its first checkpoint.

A short training runs with a profiler in each of its processes. Until the first checkpoint is committed, these count:

    functions   every function and method of the package that was entered, from its decorators to its last line
    headers     the code outside functions in their modules: docstring, imports, constants, class fields

Blank lines never count; "code" leaves out comments and docstrings too. A line counts once.

    python bench/lines_to_read.py            the two totals
    python bench/lines_to_read.py --files    and every module with its share
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
PACKAGE = Path(__file__).resolve().parents[1] / "tiltyard"
COMMAND = ["train", "CartPole-v1", "stop.updates=2", "save.updates=1", "eval.at_end=false"]
COMMIT = ("run/checkpoint.py", "commit")  # when this function returns, the checkpoint is committed

# Written to a folder on PYTHONPATH, so that every Python process of the run loads it; forks inherit it.
TRACER = """
import os, sys, threading, time

package, out = os.environ["LINES_PACKAGE"], os.environ["LINES_OUT"]
seen = set()


def note(kind, code):
    line = f"{time.time()!r}\\t{kind}\\t{code.co_filename}\\t{code.co_firstlineno}\\t{code.co_name}\\n"
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code not in seen:
        seen.add(code)
        if code.co_filename.startswith(package):
            note("call", code)
    elif event == "return" and code.co_name == "commit" and code.co_filename.startswith(package):
        note("return", code)


threading.setprofile(profile)
sys.setprofile(profile)
"""


def traced(folder: Path) -> set[tuple[str, int, str]]:
    """(file, first line, name) of every code object entered before the first checkpoint was committed."""
    (folder / "sitecustomize.py").write_text(TRACER)
    out = folder / "calls.tsv"
    places = {"LINES_PACKAGE": f"{PACKAGE}/", "LINES_OUT": str(out), "TILTYARD_RUNS": str(folder / "runs")}
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)])}
    command = [sys.executable, "-m", "tiltyard", *COMMAND]
    subprocess.run(command, cwd=folder, env=os.environ | places | paths, check=True, capture_output=True)
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    ends = [float(row[0]) for row in rows if row[1] == "return" and is_commit(row)]
    if not ends:
        raise SystemExit("error: no checkpoint was committed")
    return {(row[2], int(row[3]), row[4]) for row in rows if row[1] == "call" and float(row[0]) <= min(ends)}


def is_commit(row: list[str]) -> bool:
    return (Path(row[2]).relative_to(PACKAGE).as_posix(), row[4]) == COMMIT


def lines_of(path: Path, first_lines: set[int]) -> set[int]:
    """Lines of a module to read: everything outside functions, and the functions that start at `first_lines`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    total = len(path.read_text(encoding="utf-8").splitlines())
    lines = set(range(1, total + 1))
    for node in outer_functions(tree):
        span = set(range(first_line(node), (node.end_lineno or 0) + 1))
        inner = {
            first_line(each) for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if not inner & first_lines:
            lines -= span
    return lines


def functions(node: ast.AST) -> list[Function]:
    """Every function and method at or below `node`."""
    return [each for each in ast.walk(node) if isinstance(each, Function)]


def outer_functions(node: ast.AST) -> list[Function]:
    """Functions and methods that are not nested in another function."""
    found: list[Function] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            found.append(child)
        else:
            found += outer_functions(child)
    return found


def first_line(node: Function) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def blank_and_prose(path: Path) -> tuple[set[int], set[int]]:
    """Blank lines, and lines that contain only a comment or a docstring."""
    text = path.read_text(encoding="utf-8").splitlines()
    blank = {number for number, line in enumerate(text, 1) if not line.strip()}
    prose = set()
    for node in ast.walk(ast.parse("\n".join(text))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    with path.open("rb") as file:
        comments = {token.start[0] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT}
    return blank, prose | {number for number in comments if text[number - 1].lstrip().startswith("#")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Lines to read from the command to the first checkpoint.")
    parser.add_argument("--files", action="store_true", help="list every module with its lines")
    listed = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        calls = traced(Path(folder))
    starts: dict[str, set[int]] = defaultdict(set)
    for file, line, name in calls:
        if name != "<module>":
            starts[file].add(line)
    rows = {}
    for file, first_lines in sorted(starts.items()):
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        if not first_lines & {
            first_line(node) for node in functions(tree)
        }:  # class bodies and comprehensions run on import
            continue
        blank, prose = blank_and_prose(Path(file))
        read = lines_of(Path(file), first_lines) - blank
        rows[Path(file).relative_to(PACKAGE).as_posix()] = (len(read), len(read - prose))
    if listed:
        for name, (read, code) in sorted(rows.items(), key=lambda row: -row[1][0]):
            print(f"{read:6,} {code:6,}  {name}", file=sys.stderr)
    totals = [sum(row[column] for row in rows.values()) for column in (0, 1)]
    print(json.dumps({"lines": totals[0], "code": totals[1], "modules": len(rows)}))


if __name__ == "__main__":
    main()
