"""Settings of the site file: the folder of all runs, and profiles for the places where a run can be executed.

    profiles.NAME   launcher: local      this machine
                    launcher: slurm      a Slurm job; `resources` set its size, `slurm` its options
                    launcher: template   trials of a sweep, with any commands that submit, poll and cancel

site_file.py finds the file. `${VAR}` is expanded in every string; `$${` is a literal `${`.
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

ENTERED = "TILTYARD_PROFILE"  # name of the profile whose variables are set in this process
_SETTABLE = ("engine", "save", "track")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")


PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w*)\}")
IN_SUBMIT = ("command", "name", "folder", "nodes", "cpus", "gpus", "memory", "time")
_DURATION = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<clock>\d{1,6}(?::\d{1,2}){0,2})")
_SIZE = re.compile(r"\d{1,12}[KMGT]?")
_BEFORE_LIMIT = 120.0  # seconds; Slurm may signal up to a minute early, and saving takes time
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
        raise ValueError("must be at least one minute, because Slurm counts in minutes")
    return text


def _size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise ValueError("must be a whole number with K, M, G or T, like 8G")
    return text


def _word(text: str) -> str:
    """A value of an #SBATCH line, where Slurm has no reliable quoting."""
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
    """A number of equal nodes, and the resources on each of them."""

    nodes: Count = 1
    """Number of nodes."""
    cpus: Count = 1
    """CPUs on each node."""
    gpus: CountOrZero = 0
    """GPUs on each node."""
    memory: Size | None = None
    """Memory on each node, like 8G. Default: the site's."""
    tmp: Size | None = None
    """Free space on each node's local disk, like 10G."""


class Resources(Nodes):
    """Resources of a job."""

    time: Duration | None = None
    """Time limit of a job, like 4:00:00 or 1-12:00:00. Default: the partition's. A run may span many jobs."""


class Samplers(Nodes):
    """The second group of a heterogeneous job: nodes that only sample."""

    partition: Word | None = None
    """Partition of these nodes. Default: that of the job."""
    constraint: Word | None = None
    """Features that these nodes must have."""


class Slurm(Settings):
    """Options of Slurm jobs at this site, and how to prepare their environment."""

    partition: Word | None = None
    """Partition. Default: the site's."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, like avx512."""
    exclude: Word | None = None
    """Nodes not to use, like node[3,7-9]."""
    extra: list[Line] = []
    """Further options, copied unchanged after #SBATCH: --mail-type=END."""
    setup: list[str] = []
    """Shell lines to run first, on the first node: module load anaconda3."""
    python: str | None = None
    """Python interpreter on the nodes. Default: the one that submits the job."""
    container: str | None = None
    """Command put before the interpreter: apptainer exec image.sif."""
    lead: Positive | None = None
    """Seconds before the time limit at which the run saves and stops. Default: derived from the limit and from
    how long saves take."""
    requeues: CountOrZero = 100
    """How often a run is requeued at its time limit. Preemptions do not count."""
    retry: CountOrZero = 2
    """How often a killed trainer (kill -9, out of memory) is restarted inside its job."""
    wait: NotNegative = 300.0
    """Seconds to wait until all nodes of a job are up."""
    samplers: Samplers | None = None
    """Nodes that only sample, while those of `resources` learn: a heterogeneous job."""
    keep_ld_preload: bool = False
    """Keep the site's LD_PRELOAD, which breaks Ray at many sites."""
    exclude_failed: bool = False
    """Exclude nodes that `tiltyard doctor --on` found bad."""


def _command(text: str, known: Sequence[str]) -> str:
    """Check a command line with placeholders; the first of `known` is required."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"must be a command line: {error}") from None
    if not words:
        raise ValueError("must be a command line")
    found = PLACEHOLDER.findall(text)
    unknown = [name for name in found if name and name not in known]
    if unknown:
        raise ValueError(f"unknown placeholder {{{unknown[0]}}}; known: {', '.join(known)}; write {{{{ for a brace")
    if known[0] not in found:
        raise ValueError(f"must contain {{{known[0]}}}")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    return text


Submit = Annotated[str, AfterValidator(partial(_command, known=IN_SUBMIT))]
OfJob = Annotated[str, AfterValidator(partial(_command, known=("id",)))]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Template(Settings):
    """Commands of another queue. They run without a shell; {name} is replaced by a value, and {{ is a brace."""

    submit: Submit
    """Command that submits {command} (one shell word) as a job called {name} and prints the job's id. {folder} is the
    trial's folder; {cpus}, {gpus}, {memory}, {time} and {nodes} are those of `resources`, empty if not set."""
    id: Pattern = r"(\S+)\s*$"
    """Pattern for the id in the output of `submit`: its first group. Default: the last word."""
    poll: OfJob
    """Command that reports whether job {id} is waiting or running."""
    alive: Pattern | None = None
    """Pattern in the output of `poll` for a job that waits or runs. Default: `poll` exits with 0."""
    gone: Pattern | None = None
    """Pattern in the output of `poll`, if it fails, for a job that the queue no longer knows; other failures are
    ignored. Default: with `alive`, every failure is ignored; without it, every failure means that the job is gone."""
    cancel: OfJob
    """Command that cancels job {id}."""
    setup: list[str] = []
    """Shell lines to run first in the job."""
    python: str | None = None
    """Python interpreter in the job. Default: the one that submits."""


class Profile(Settings):
    """Where and how a run is executed."""

    launcher: Literal["local", "slurm", "template"] = "local"
    """What starts the run: this process, Slurm or, for trials of a sweep, the commands of `template`."""
    resources: Resources = Resources()
    """Resources of a job; with launcher slurm or template."""
    slurm: Slurm = Slurm()
    """Options of Slurm jobs; with launcher slurm."""
    template: Template | None = None
    """Commands of another queue; with launcher template."""
    set: dict[str, Any] = {}
    """Settings of engine, save and track for this profile, by dotted name."""
    environment: dict[str, str] = {}
    """Environment variables for the run's processes."""
    name: str = Field(default="", exclude=True)
    """Set from the profile's key."""

    @property
    def lead(self) -> float:
        """Seconds before the time limit at which the run saves and stops."""
        if self.slurm.lead is not None:
            return self.slurm.lead
        if self.resources.time is None:
            return _BEFORE_LIMIT
        return max(_LEAST_LEAD, min(_BEFORE_LIMIT, seconds_of(self.resources.time) / 4))

    def warnings(self) -> list[str]:
        """Settings that are allowed but probably a mistake."""
        time = self.resources.time
        if self.slurm.lead is None or time is None or self.slurm.lead <= seconds_of(time) / 4:
            return []
        return [
            f"slurm.lead = {self.slurm.lead:g} s of profile {self.name} is more than a quarter of resources.time = "
            f"{time}: a large part of every job is lost"
        ]


class Site(Settings):
    """Settings of this machine or project, not of an experiment."""

    runs: str | None = None
    """Folder of all runs, relative to the site file. Default: `./runs`."""
    profiles: dict[str, Profile] = {}
    """Places to run on, selected with `--on NAME`."""


def load_site(start: Path | None = None) -> tuple[Site, Path | None]:
    """The site file's settings and its path; an empty Site if there is none. `runs` is made absolute."""
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
                    setting, given = f"profiles.{name}.name", short(profile["name"])
                    problems.append(Problem(setting, given, "unknown setting", "the key is the name"))
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
        raise UseError(f"there is no profile {name!r}: {where}", "add it under `profiles:`")
    hint = did_you_mean(str(name), site.profiles)
    raise UseError(f"there is no profile {name!r}{f' in {path}' if path else ''}", hint)


def apply_profile(name: str) -> Profile:
    """The profile called `name`; sets its environment variables for this process and its children."""
    site, path = load_site()
    profile = pick_profile(site, name, path)
    os.environ.update(profile.environment)
    return profile


def restore_profile(name: object, what: str) -> str | None:
    """Set the variables of the profile that `what` was started with, unless a job script has set them; its name.

    If the site file no longer has that profile, warn and continue without it.
    """
    if not isinstance(name, str):
        return None
    if os.environ.get(ENTERED) == name:
        return name
    site, path = load_site()
    try:
        os.environ.update(pick_profile(site, name, path).environment)
    except UseError as error:
        sys.stderr.write(f"warning: {what} continues without the environment of its profile: {error.message}\n")
    return name


def _check_set(values: Any, setting: str) -> list[Problem]:
    """A profile sets engine, save and track only: where a run is executed must not change what it learns."""
    if not isinstance(values, Mapping):
        return []
    hint = "a profile may set engine, save and track; put other settings in the experiment file"
    return [
        Problem(f"{setting}.{key}", short(value), "cannot be set by a profile", hint)
        for key, value in values.items()
        if str(key).split(".")[0] not in _SETTABLE
    ]


def _check_launcher(profile: Mapping[str, Any], setting: str) -> list[Problem]:
    """Settings of jobs are allowed only in a profile whose launcher submits jobs."""
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
        found.append(Problem(f"{setting}.template", "", "is missing; launcher: template needs it", hint))
    return found


def check_names(variables: Any, setting: str) -> list[Problem]:
    """Names of environment variables must be valid in a shell, where they cannot be quoted."""
    if not isinstance(variables, Mapping):
        return []
    hint = "use letters, digits and _, not starting with a digit"
    return [
        Problem(f"{setting}.{name}", "", "is not a valid name of an environment variable", hint)
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
