"""`completion`: a script for bash, zsh or fish that asks `tiltyard completion SHELL --words LINE` at every TAB.

Candidates come from the parsers of the commands, the settings' classes, the site file and the folders of runs. Where
there are none, the shell completes file names. Nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from tiltyard.cli import COMMANDS, actions_of, load_command

SCRIPTS = {
    "bash": """# eval "$(tiltyard completion bash)"
_tiltyard() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    local word="${line##* }"
    local before="${word%"${word##*[=:]}"}"  # bash completes only what is after = or :
    COMPREPLY=($("${COMP_WORDS[0]}" completion bash --words "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _tiltyard tiltyard
""",
    "zsh": """# eval "$(tiltyard completion zsh)", after compinit
_tiltyard() {
    local -a found
    found=(${(f)"$($words[1] completion zsh --words "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    (( $#found )) || { _files; return }
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
}
compdef _tiltyard tiltyard
""",
    "fish": """# tiltyard completion fish | source
complete -c tiltyard -a '(tiltyard completion fish --words (commandline -cp) 2>/dev/null)'
""",
}


def configure_completion(parser: argparse.ArgumentParser) -> None:
    about = "the shell; the first line of its script says how to load it"
    parser.add_argument("shell", choices=SCRIPTS, metavar="bash|zsh|fish", help=about)
    parser.add_argument("--words", metavar="LINE", help=argparse.SUPPRESS)


def run_completion(args: argparse.Namespace) -> None:
    found = None if args.words is None else candidates(args.words)
    sys.stdout.write(SCRIPTS[args.shell] if found is None else "".join(f"{word}\n" for word in found))


def candidates(line: str) -> list[str]:
    """The words that may stand at the end of a command line up to the cursor, by what is typed of the last."""
    words = line.split()[1:]
    typed = "" if line[-1:].isspace() or not words else words.pop()
    return [word for word in dict.fromkeys(_known(words, typed)) if word.startswith(typed)]


def _known(words: list[str], typed: str) -> Iterable[str]:
    if not words:
        return [name.split()[0] for name in COMMANDS]
    if actions := actions_of(words[0]):
        if len(words) == 1:
            return actions
        words = [" ".join(words[:2]), *words[2:]]
    if words[0] not in COMMANDS:
        return ()
    parser, _ = load_command(words[0])
    options = {name: action for action in parser._actions for name in action.option_strings}
    places = [action for action in parser._actions if not action.option_strings]
    owner: argparse.Action | None = None  # the option whose value is next
    for word in words[1:]:
        if owner is not None:
            owner = None
        elif word.startswith("-"):
            owner = options.get(word)
            owner = owner if owner is not None and owner.nargs != 0 else None
        elif len(places) > 1 or (places and places[0].nargs not in ("*", "+")):
            places = places[1:]
    if owner is None and typed.startswith("-"):
        return [name for name, action in options.items() if action.help != argparse.SUPPRESS]
    found = owner or (places[0] if places else None)
    return () if found is None else _values(found, typed)


def _values(action: argparse.Action, typed: str) -> Iterable[str]:
    """What an option or positional argument may be, by its choices or its metavar."""
    metavar = str(action.metavar)
    if action.choices:
        return list(action.choices)
    if metavar == "key=value":
        return _settings(typed)
    if metavar == "PROFILE":
        from tiltyard.config.site import load_site

        return load_site()[0].profiles
    from tiltyard.config.site_file import runs_root

    if metavar in ("SWEEP", "PLAN|SWEEP"):
        return ["last", *("/".join(folder.parts[-2:]) for folder in sorted(runs_root().glob("*/sweep-*/")))]
    if metavar in ("RUN", "POLICY", "RUN|FILE"):
        from tiltyard.run.status import run_folders, run_id

        return ["last", *map(run_id, run_folders(runs_root()))]
    return ()


def _settings(typed: str) -> Iterable[str]:
    """`algo.lr=` for every setting; after `=`, the words that a setting may be."""
    from tiltyard.config.error_messages import leaves
    from tiltyard.config.experiment import Experiment
    from tiltyard.config.load import presets
    from tiltyard.config.merge import Section, Shape, inside

    name, equals, _ = typed.partition("=")
    if not equals:
        names = leaves(Experiment)
        sections = {setting.rpartition(".")[0] for setting in names}
        return [f"{setting}=" for setting in names if setting not in sections]
    if name == "use":
        return [f"use=[{preset}]" for preset in presets()]
    *path, last = name.split(".")
    shape: Shape = Section((Experiment,))
    for part in path:
        shape = inside(shape, part)
    found = [model.model_fields.get(last) for model in shape.models] if isinstance(shape, Section) else []
    return [f"{name}={word}" for field in found if field is not None for word in _words(field.annotation)]


def _words(annotation: Any) -> Iterator[str]:
    """The words of a type: those of a Literal, true and false."""
    if annotation is bool:
        yield from ("true", "false")
    for each in get_args(annotation):
        yield from [each] if isinstance(each, str) else _words(each)
