"""The site file: search order, expansion of variables, validation, and the root of runs."""

from pathlib import Path

import pytest

from tiltyard.config.load import load
from tiltyard.config.site import Profile, Resources, Site, Slurm, load_site, pick_profile, seconds_of
from tiltyard.config.site_file import find_site, runs_root
from tiltyard.errors import ConfigError, UseError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A temporary home folder, with the current folder two levels below it and none of the variables set."""
    for name in ("TILTYARD_SITE", "TILTYARD_RUNS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    (home / "project" / "sub").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "project" / "sub")
    return home


def site_at(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_apply_without_a_site_file(home):
    assert load_site() == (Site(), None)
    assert runs_root() == Path.cwd() / "runs"


def test_nearest_site_file_is_used(home, tmp_path, monkeypatch):
    site_at(tmp_path / "tiltyard.yaml", "runs: never")  # above the home folder
    assert find_site() is None
    user = site_at(home / ".config" / "tiltyard" / "tiltyard.yaml", "runs: user")
    assert find_site() == user
    at_home = site_at(home / "tiltyard.yaml", "runs: at_home")
    assert find_site() == at_home
    project = site_at(home / "project" / "tiltyard.yaml", "runs: out")
    assert find_site() == project
    assert find_site(home) == at_home
    assert runs_root() == home / "project" / "out"
    other = site_at(tmp_path / "other.yaml", "runs: ../elsewhere")
    monkeypatch.setenv("TILTYARD_SITE", str(other))
    assert runs_root() == tmp_path.parent / "elsewhere"
    monkeypatch.setenv("TILTYARD_RUNS", str(tmp_path / "first"))
    assert runs_root() == tmp_path / "first"


def test_site_file_in_xdg_config_home_is_found(home, tmp_path, monkeypatch):
    user = site_at(tmp_path / "xdg" / "tiltyard" / "tiltyard.yaml", "runs: /scratch/runs")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert find_site() == user
    assert runs_root() == Path("/scratch/runs")


def test_named_site_file_must_exist(home, monkeypatch):
    monkeypatch.setenv("TILTYARD_SITE", "none.yaml")
    with pytest.raises(UseError, match=r"TILTYARD_SITE names none\.yaml"):
        load_site()


def test_variables_are_expanded_in_every_string(home, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    text = (
        "runs: ${SCRATCH}/runs\nprofiles:\n  big:\n    environment: {A: 'x${SCRATCH}', B: '$${SCRATCH}', C: $SCRATCH}\n"
    )
    site_at(Path("tiltyard.yaml"), text + "    set: {track.wandb.project: '${SCRATCH}'}\n")
    site, path = load_site()
    assert site.runs == "/scratch/me/runs"
    assert path == Path.cwd() / "tiltyard.yaml"
    assert site.profiles["big"].environment == {"A": "x/scratch/me", "B": "${SCRATCH}", "C": "$SCRATCH"}
    assert site.profiles["big"].set == {"track.wandb.project": "/scratch/me"}


def test_empty_site_file_sets_nothing(home):
    site_at(Path("tiltyard.yaml"), "# nothing yet\n")
    assert load_site()[0] == Site()
    site_at(Path("tiltyard.yaml"), "profiles:\n  here:\n")
    assert load_site()[0].profiles == {"here": Profile(name="here")}


def test_all_problems_of_a_site_file_are_reported_at_once(home):
    site_at(
        Path("tiltyard.yaml"),
        "run: x\nruns: ${NOT_SET_ANYWHERE}/runs\nprofiles:\n  a: {launcher: slurmm, name: b}\n"
        "  b: {set: {algo.lr: 3, engine.envs: 4, env: X}, environment: {A: 3}}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_site()
    assert sorted(problem.setting for problem in caught.value.problems) == [
        "profiles.a.launcher", "profiles.a.name", "profiles.b.environment.A", "profiles.b.set.algo.lr", "profiles.b.set.env", "run", "runs",
    ]  # fmt: skip
    for words in (
        "NOT_SET_ANYWHERE is not set",
        "a profile may set engine, save and track",
        "must be one of local, slurm",
        "did you mean 'runs'?",
    ):
        assert words in caught.value.details


def test_profiles_are_selected_by_name_and_applied(home):
    site_at(Path("tiltyard.yaml"), "profiles:\n  cluster: {set: {engine: {envs: 32}, save.seconds: 60}}\n")
    site, path = load_site()
    profile = pick_profile(site, "cluster", path)
    loaded = load("CartPole-v1", ["save.seconds=30"], profile=profile)
    assert (loaded.experiment.engine.envs, loaded.experiment.save.seconds) == (32, 30)
    assert loaded.origins["engine.envs"] == "profile cluster"
    with pytest.raises(UseError) as caught:
        pick_profile(site, "clustr", path)
    assert caught.value.hint == "did you mean 'cluster'?"
    with pytest.raises(UseError, match="there is no site file"):
        pick_profile(Site(), "x")


def test_invalid_value_of_a_profile_is_reported_with_its_name(home):
    with pytest.raises(ConfigError) as caught:
        load("CartPole-v1", profile=Profile(name="big", set={"engine.envs": 0, "engine.workrs": 3}))
    assert "engine.envs = 0: must be at least 1 (profile big)" in caught.value.details
    assert "engine.workrs = 3: unknown setting (profile big)" in caught.value.details


CLUSTER = """
profiles:
  cluster:
    launcher: slurm
    resources: {nodes: 2, cpus: 4, gpus: 1, memory: 8G, tmp: 10G, time: "4:00:00"}
    slurm:
      partition: short
      account: ${ACCOUNT}
      extra: ["--mail-type=END"]
      setup: ["module load anaconda3"]
      container: "apptainer exec img.sif"
      samplers: {nodes: 2, cpus: 8}
    environment: {WANDB_MODE: offline}
    set: {engine.kind: rllib}
"""


def test_slurm_profile_is_read(home, monkeypatch):
    monkeypatch.setenv("ACCOUNT", "abc")
    site_at(Path("tiltyard.yaml"), CLUSTER)
    profile = load_site()[0].profiles["cluster"]
    assert (profile.launcher, profile.name) == ("slurm", "cluster")
    assert profile.resources == Resources(nodes=2, cpus=4, gpus=1, memory="8G", tmp="10G", time="4:00:00")
    assert (profile.slurm.partition, profile.slurm.account, profile.slurm.qos) == ("short", "abc", None)
    assert profile.slurm.extra == ["--mail-type=END"]
    assert profile.slurm.samplers is not None
    assert (profile.slurm.samplers.nodes, profile.slurm.samplers.cpus) == (2, 8)


def test_job_settings_are_refused_for_a_local_launcher(home):
    site_at(Path("tiltyard.yaml"), "profiles:\n  here: {resources: {cpus: 2}, slurm: {partition: x}}\n")
    with pytest.raises(ConfigError) as caught:
        load_site()
    assert [problem.setting for problem in caught.value.problems] == ["profiles.here.resources", "profiles.here.slurm"]
    assert "needs launcher: slurm" in caught.value.details


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("resources", "{memory: lots}", "like 8G"),
        ("resources", "{time: soon}", "must be a time like 4:00:00"),
        ("resources", '{time: "0:30"}', "must be at least one minute"),
        ("resources", "{nodes: 0}", "at least 1"),
        ("slurm", "{partition: 'a b'}", "a word without spaces"),
        ("slurm", '{account: "x\\n#SBATCH --uid=0"}', "a word without spaces"),
        ("slurm", '{extra: ["--a\\nrm -rf"]}', "must be one line"),
        ("slurm", "{partitoin: x}", "did you mean 'slurm.partition'?"),
    ],
)
def test_invalid_job_settings_are_reported(home, setting, value, words):
    site_at(Path("tiltyard.yaml"), f"profiles:\n  c:\n    launcher: slurm\n    {setting}: {value}\n")
    with pytest.raises(ConfigError) as caught:
        load_site()
    assert words in caught.value.details.replace("profiles.c.", "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("4:00:00", 14400), ("1-12", 129600), ("1-0:30", 88200), ("2-1:2:3", 176523)],
)
def test_time_limits_are_parsed_like_slurm_does(text, seconds):
    assert seconds_of(text) == seconds


def test_default_lead_depends_on_the_time_limit():
    def profile(time: str | None, lead: float | None = None) -> Profile:
        return Profile(launcher="slurm", name="c", resources=Resources(time=time), slurm=Slurm(lead=lead))

    assert [profile(time).lead for time in (None, "4:00:00", "4:00", "1:00")] == [120, 120, 60, 15]
    assert profile("4:00:00", 600).lead == 600
    assert profile("4:00:00", 600).warnings() == []
    assert "more than a quarter of resources.time = 10:00" in profile("10:00", 600).warnings()[0]
