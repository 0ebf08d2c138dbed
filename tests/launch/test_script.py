"""The job script is a pure function of run and profile: compared with golden files, checked by bash, and hard to fool.

`python -m tests.launch.test_script` writes the golden files anew.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tiltyard.config.experiment import Experiment
from tiltyard.config.site import Profile, Resources, Samplers, Slurm
from tiltyard.errors import UseError
from tiltyard.launch.slurm import Job, check, head, script, set_up, step

GOLDEN = Path(__file__).with_name("golden")
RUN = Path("/scratch/me/runs/cartpole/0007-brisk-otter")
NASTY = "a b'c\"d#e;$(touch /tmp/never)`id`\n%j é"


def job(**parts: object) -> Job:
    folder = parts.pop("folder", RUN)
    profile = Profile(launcher="slurm", name="cluster", **parts)  # type: ignore[arg-type]
    return Job("cartpole/0007-brisk-otter", folder, profile, python="/opt/venv/bin/python")  # type: ignore[arg-type]


JOBS = {
    "one_node": job(resources=Resources(cpus=4, memory="8G", time="4:00:00")),
    "gpu": job(
        resources=Resources(cpus=8, gpus=1, memory="32G", tmp="100G", time="1-00:00:00"),
        slurm=Slurm(
            partition="gpu",
            account="abc",
            qos="normal",
            constraint="a100|h100",
            exclude="node7",
            extra=["--mail-type=END", "--mail-user=me@example.org"],
            setup=["module load anaconda3", 'source "$HOME/venv/bin/activate"'],
            python="python3.11",
            lead=600,
            keep_ld_preload=True,
        ),
        environment={"WANDB_MODE": "offline", "NOTE": "it's $HOME; rm -rf"},
    ),
    "container": job(
        resources=Resources(cpus=4, time="4:00:00"),
        slurm=Slurm(container="apptainer exec --nv 'my image.sif'", python="/usr/bin/python3"),
        environment={"WANDB_API_KEY": "0123456789abcdef"},
    ),
    "many_nodes": job(resources=Resources(nodes=3, cpus=4, time="4:00:00")),
    "samplers": job(
        resources=Resources(cpus=8, gpus=1, memory="32G", time="4:00:00"),
        slurm=Slurm(partition="gpu", samplers=Samplers(nodes=2, cpus=16, partition="cpu", memory="16G")),
    ),
    "odd_names": job(folder=Path('/scratch/it\'s 100% "mine"; $(id)/runs/cartpole/0007-brisk-otter')),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name: str) -> None:
    assert script(JOBS[name]) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_short_and_bash_understands_it(name: str) -> None:
    text = script(JOBS[name])
    assert text.count("\n") < 80
    assert max(map(len, text.splitlines())) <= 160
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_no_secret_is_in_the_script() -> None:
    text = script(JOBS["container"])
    assert "0123456789abcdef" not in text and f". {RUN}/job/secrets.sh" in text


def test_whatever_is_named_runs_nothing_and_arrives(tmp_path: Path) -> None:
    """The part before srun, run by bash: the run's folder and the variables are what they were."""
    folder = tmp_path / NASTY / "runs" / "n" / "0001-x-y"
    (folder / "logs").mkdir(parents=True)
    nasty = job(folder=folder, environment={"TOLD": NASTY}, resources=Resources(cpus=1))
    text = script(nasty)
    before = text[: text.index("# One agent")]
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "1"}
    shown = f'{before}printf "%s|%s|%s" "$run" "$TOLD" "$TILTYARD_RUNS"'
    subprocess.run(["bash"], input=shown, text=True, env=env, check=True, cwd=tmp_path)
    written = (folder / "logs" / "job-5.out").read_text()  # a path that no #SBATCH line can hold
    assert written.split("|") == [str(folder), NASTY, str(folder.parent.parent)]
    assert [line for line in text.splitlines() if line.startswith("#SBATCH --output")] == ["#SBATCH --output=/dev/null"]


def test_parts_for_short_jobs() -> None:
    profile = JOBS["samplers"].profile
    lines = head(profile, "doctor", "/x/%N.out", time="2:00", nodes=2, requeue=False)
    assert "#SBATCH --time=2:00" in lines and "#SBATCH --nodes=2" in lines and "#SBATCH --no-requeue" in lines
    assert not any("hetjob" in line or "--signal" in line for line in lines)
    assert "export PYTHONUNBUFFERED=1" in set_up(profile)
    assert step(profile, ["-m", "x"], "'a b'", python="py", nodes=2) == [
        "srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 --cpu-bind=none --kill-on-bad-exit=0 \\",
        "  py -m x 'a b'",
    ]


def test_ld_preload_is_unset_and_that_is_said(tmp_path: Path) -> None:
    def told(name: str) -> str:
        lines = "\n".join(line for line in set_up(JOBS[name].profile) if "LD_PRELOAD" in line)
        command = ["bash", "-c", f'{lines}\necho "left: ${{LD_PRELOAD:-nothing}}"']
        done = subprocess.run(command, env={"LD_PRELOAD": "/nowhere.so"}, capture_output=True, text=True)
        return done.stdout

    assert "LD_PRELOAD=/nowhere.so of this site is unset" in told("one_node")
    assert "left: nothing" in told("one_node") and told("gpu") == "left: /nowhere.so\n"


def test_several_nodes_are_for_the_engine_that_can_use_them() -> None:
    serial = Experiment.model_validate({"env": {"id": "CartPole-v1"}, "engine": {"kind": "serial"}})
    for name in ("many_nodes", "samplers"):
        with pytest.raises(UseError, match=r"asks for several nodes, and engine.kind = serial uses one"):
            check(JOBS[name].profile, serial)
    check(JOBS["gpu"].profile, serial)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each, described in JOBS.items():
        (GOLDEN / f"{each}.sh").write_text(script(described))
