"""The site file: where runs live and the profiles that say where a run is executed; no part of an experiment.

    profiles.NAME   launcher: local    this machine
                    launcher: slurm    a job: `resources` say how large, `slurm` how to ask for it
                    launcher: template a sweep's trials, by any other commands that submit, poll and cancel

Which file counts is decided in place.py. `${VAR}` is expanded in every string; `$${` stands for a plain `${`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tiltyard.config.fields import Count, CountOrZero, NotNegative, Positive, Settings
from tiltyard.config.site_file import FILE, find_site
from tiltyard.config.validation import validate
from tiltyard.config.yaml import as_mapping, parse_yaml, read_text
from tiltyard.errors import ConfigError, Problem, UseError, did_you_mean
from tiltyard.plugins.resolve import short

ENTERED = "TILTYARD_PROFILE"  # the profile whose variables are set
_SETTABLE = ("engine", "save", "track")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")


PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w*)\}")
IN_SUBMIT = ("command", "name", "folder", "nodes", "cpus", "gpus", "memory", "time")
_DURATION = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<clock>\d{1,6}(?::\d{1,2}){0,2})")
_SIZE = re.compile(r"\d{1,12}[KMGT]?")
_BEFORE_LIMIT = 120.0  # Slurm may signal up to a minute early, and saving takes its time
_LEAST_LEAD = 10.0


def seconds_of(duration: str) -> float:
    """Seconds of a time limit as Slurm writes them: MIN, MIN:SEC, H:MIN:SEC, DAYS-H, DAYS-H:MIN or DAYS-H:MIN:SEC."""
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError("must be a time like 4:00:00 (hours:minutes:seconds) or 1-12 (days-hours)")
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _duration(text: str) -> str:
    if seconds_of(text) < 60:
        raise ValueError("must be a minute or more: Slurm counts in minutes")
    return text


def _size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise ValueError("must be a whole number with K, M, G or T, like 8G")
    return text


def _word(text: str) -> str:
    """What follows the = of an #SBATCH line, where Slurm has no quoting that could be relied on."""
    if not text.isprintable() or re.search(r"[\s'\"\\#]", text) or not text:
        raise ValueError("must be a word without spaces, quotes, backslashes and #")
    return text


def _line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line")
    return text


Duration = Annotated[str, AfterValidator(_duration)]
Size = Annotated[str, AfterValidator(_size)]
Word = Annotated[str, AfterValidator(_word)]
Line = Annotated[str, AfterValidator(_line)]


class Nodes(Settings):
    """Some nodes that are alike, and what is asked for on each of them."""

    nodes: Count = 1
    """How many nodes."""
    cpus: Count = 1
    """CPUs on each node."""
    gpus: CountOrZero = 0
    """GPUs on each node."""
    memory: Size | None = None
    """Memory on each node, like 8G; the site's default when left out."""
    tmp: Size | None = None
    """Room on each node's own disk, like 10G."""


class Resources(Nodes):
    """What a job asks for."""

    time: Duration | None = None
    """Time limit, like 4:00:00 or 1-12:00:00; the partition's default when left out. A run may take many times that."""


class Samplers(Nodes):
    """The second group of a heterogeneous job: nodes that only sample."""

    partition: Word | None = None
    """Their partition; that of the job when left out."""
    constraint: Word | None = None
    """Features that they must have."""


class Slurm(Settings):
    """How jobs are asked for at this site, and what is needed before anything runs."""

    partition: Word | None = None
    """Partition; the site's default when left out."""
    account: Word | None = None
    """Account that the time is booked on."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, like avx512."""
    exclude: Word | None = None
    """Nodes that are not wanted, like node[3,7-9]."""
    extra: list[Line] = []
    """Further options, written after #SBATCH as they are: --mail-type=END."""
    setup: list[str] = []
    """Shell lines before anything runs, on the first node: module load anaconda3."""
    python: str | None = None
    """Python interpreter on the nodes; the one that submits when left out."""
    container: str | None = None
    """Words put before the interpreter: apptainer exec image.sif."""
    lead: Positive | None = None
    """Seconds before the time limit at which the run is told to save; chosen from the limit when left out."""
    requeues: CountOrZero = 100
    """How often a run goes back into the queue at its time limit. Preemption does not count."""
    retry: CountOrZero = 2
    """How often a trainer that was killed (kill -9, out of memory) is started again inside its job."""
    wait: NotNegative = 300.0
    """Seconds for all nodes of a job to come up."""
    samplers: Samplers | None = None
    """Nodes that only sample, beside those of `resources`, which then learn: a heterogeneous job."""
    keep_ld_preload: bool = False
    """Whether LD_PRELOAD of the site stays set. It breaks Ray at many sites."""
    exclude_failed: bool = False
    """Whether nodes that `tiltyard doctor --on` found bad are left out."""


def _command(text: str, known: Sequence[str]) -> str:
    """A command line in which names of values may stand; the first of those known has to."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"is no command line: {error}") from None
    if not words:
        raise ValueError("must be a command line")
    found = PLACEHOLDER.findall(text)
    unknown = [name for name in found if name and name not in known]
    if unknown:
        raise ValueError(f"has {{{unknown[0]}}}, and knows {', '.join(known)}; a plain brace is written twice")
    if known[0] not in found:
        raise ValueError(f"has no {{{known[0]}}}; write it where the queue's command expects it")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Submit = Annotated[str, AfterValidator(partial(_command, known=IN_SUBMIT))]
OfJob = Annotated[str, AfterValidator(partial(_command, known=("id",)))]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Template(Settings):
    """Commands of any other queue. No shell reads them; {name} stands for a value, and {{ for a brace."""

    submit: Submit
    """Starts {command}, one word that a shell can read, as a job called {name}, and prints the job's id. {folder} is
    the trial's; {cpus}, {gpus}, {memory}, {time} and {nodes} are those of `resources`, empty where left out."""
    id: Pattern = r"(\S+)\s*$"
    """Which part of what `submit` prints is the id: the first group; the last word when left out."""
    poll: OfJob
    """Tells whether job {id} waits or runs."""
    alive: Pattern | None = None
    """It does if `poll` prints this; if `poll` exits with 0 when left out."""
    gone: Pattern | None = None
    """What `poll` prints of a job that the queue has forgotten, where it exits with another code than 0; any other such
    exit is no answer. When left out, none is with `alive`, and without it each of them says that the job is gone."""
    cancel: OfJob
    """Takes job {id} out of the queue."""
    setup: list[str] = []
    """Shell lines in the job before anything runs."""
    python: str | None = None
    """Python interpreter in the job; the one that submits when left out."""


class Profile(Settings):
    """Where and how a run is executed."""

    launcher: Literal["local", "slurm", "template"] = "local"
    """What starts the run: this process, Slurm or, for a sweep's trials, the commands of `template`."""
    resources: Resources = Resources()
    """What a job asks for; with launcher slurm or template."""
    slurm: Slurm = Slurm()
    """How jobs are asked for; with launcher slurm."""
    template: Template | None = None
    """Commands of another queue; with launcher template."""
    set: dict[str, Any] = {}
    """Settings of engine, save and track for this place, by dotted name."""
    environment: dict[str, str] = {}
    """Environment variables of the run's processes."""
    name: str = Field(default="", exclude=True)
    """Filled in from the profile's key."""

    @property
    def lead(self) -> float:
        """Seconds before the time limit at which the run is told to save."""
        if self.slurm.lead is not None:
            return self.slurm.lead
        if self.resources.time is None:
            return _BEFORE_LIMIT
        return max(_LEAST_LEAD, min(_BEFORE_LIMIT, seconds_of(self.resources.time) / 4))

    def warnings(self) -> list[str]:
        """What is allowed and hardly meant."""
        time = self.resources.time
        if self.slurm.lead is None or time is None or self.slurm.lead <= seconds_of(time) / 4:
            return []
        return [
            f"slurm.lead = {self.slurm.lead:g} s of profile {self.name} is more than a quarter of resources.time = "
            f"{time}: a large part of every job is spent waiting"
        ]


class Site(Settings):
    """What is true of this machine or project rather than of an experiment."""

    runs: str | None = None
    """Folder of all runs; relative to the site file. `./runs` when left out."""
    profiles: dict[str, Profile] = {}
    """Places to run at, chosen with `--on NAME`."""


def load_site(start: Path | None = None) -> tuple[Site, Path | None]:
    """The site file's settings and its path; an empty Site when there is none. `runs` comes back absolute."""
    path = find_site(start)
    if path is None:
        return Site(), None
    found = parse_yaml(read_text(path), str(path))
    values = {} if found is None else as_mapping(found, str(path))
    problems: list[Problem] = []
    expanded = _expand(values, (), problems)
    if isinstance(expanded.get("profiles"), dict):
        for name, profile in expanded["profiles"].items():
            if profile is None:
                expanded["profiles"][name] = profile = {}
            if isinstance(profile, dict):
                if "name" in profile:
                    problems.append(
                        Problem(
                            f"profiles.{name}.name", short(profile["name"]), "unknown setting", "the key is the name"
                        )
                    )
                profile["name"] = name
                problems += _check_set(profile.get("set"), f"profiles.{name}.set")
                problems += _check_launcher(profile, f"profiles.{name}")
                problems += check_names(profile.get("environment"), f"profiles.{name}.environment")
    site, wrong = validate(Site, expanded)
    problems += [problem for _, problem in wrong]
    if problems or site is None:
        raise ConfigError(problems, str(path))
    if site.runs is not None:
        runs = Path(os.path.normpath(path.parent / Path(site.runs).expanduser()))
        site = site.model_copy(update={"runs": str(runs)})
    return site, path


def pick_profile(site: Site, name: str, path: Path | None = None) -> Profile:
    """The profile called `name`."""
    if name in site.profiles:
        return site.profiles[name]
    if not site.profiles:
        where = f"{path} has no profiles" if path else f"there is no site file {FILE} here or above"
        raise UseError(f"there is no profile {name!r}: {where}", "write one below `profiles:`")
    raise UseError(
        f"there is no profile {name!r}{f' in {path}' if path else ''}", did_you_mean(str(name), site.profiles)
    )


def apply_profile(name: str) -> Profile:
    """The profile called `name`, its environment variables set for this process and its children."""
    site, path = load_site()
    profile = pick_profile(site, name, path)
    os.environ.update(profile.environment)
    return profile


def restore_profile(name: object, who: str) -> str | None:
    """Set the variables of the profile that something was started with, if any, where no script has set them as they
    were then; returns its name. One that the site file no longer has is told and done without."""
    if not isinstance(name, str):
        return None
    if os.environ.get(ENTERED) == name:
        return name
    site, path = load_site()
    try:
        os.environ.update(pick_profile(site, name, path).environment)
    except UseError as error:
        sys.stderr.write(f"warning: {who} goes on without the environment of its profile: {error.message}\n")
    return name


def _check_set(values: Any, setting: str) -> list[Problem]:
    """Where a run lives never changes what it learns: a profile sets engine, save and track only."""
    if not isinstance(values, Mapping):
        return []
    hint = "what a run learns belongs in the experiment file; a profile may set engine, save and track"
    return [
        Problem(f"{setting}.{key}", short(value), "is no setting of a profile", hint)
        for key, value in values.items()
        if str(key).split(".")[0] not in _SETTABLE
    ]


def _check_launcher(profile: Mapping[str, Any], setting: str) -> list[Problem]:
    """What only a job has is no part of a profile that starts none."""
    launcher = profile.get("launcher", "local")
    needs = {"resources": ("slurm", "template"), "slurm": ("slurm",), "template": ("template",)}
    found = [
        Problem(
            f"{setting}.{key}",
            short(profile[key]),
            f"needs launcher: {' or '.join(kinds)}",
            f"add launcher: {kinds[0]} to the profile",
        )
        for key, kinds in needs.items()
        if key in profile and launcher not in kinds
    ]
    if launcher == "template" and not profile.get("template"):
        hint = "template: {submit: ..., poll: ..., cancel: ...}"
        found.append(Problem(f"{setting}.template", "", "is missing, which says how jobs are submitted", hint))
    return found


def check_names(variables: Any, setting: str) -> list[Problem]:
    """A variable's name is never quoted, in no shell."""
    if not isinstance(variables, Mapping):
        return []
    hint = "letters, digits and _, and no digit first"
    return [
        Problem(f"{setting}.{name}", "", "is no name of an environment variable", hint)
        for name in variables
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", str(name))
    ]


def _expand(value: Any, path: tuple[str, ...], problems: list[Problem]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(inner, (*path, key), problems) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand(inner, (*path, str(i)), problems) for i, inner in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return "${"
        if name not in os.environ:
            problems.append(
                Problem(
                    ".".join(path), short(value), f"the environment variable {name} is not set", f"export {name}=..."
                )
            )
        return os.environ.get(name, "")

    return _VARIABLE.sub(replaced, value)
