"""The job script: equal to golden files, valid bash, safe with any name.

`python -m tests.slurm.test_script` regenerates the golden files.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tiltyard.config.experiment import Experiment
from tiltyard.config.site import Profile, Resources, Samplers, Slurm
from tiltyard.errors import UseError
from tiltyard.slurm.script import Array, Job, header_lines, script, setup_lines, step_lines, tick_command, with_nodes
from tiltyard.slurm.submit import check

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
    "array": Job(
        "cartpole/sweep-0001/array-0002-1f3a9c02",
        RUN.parent / "sweep-0001" / "slurm" / "array-0002",
        Profile(
            launcher="slurm",
            name="cluster",
            resources=Resources(cpus=4, time="4:00:00"),
            environment={"WANDB_API_KEY": "0123456789abcdef"},
        ),
        python="/opt/venv/bin/python",
        array=Array(tasks=30, at_once=4, pause=2.5),
    ),
    "odd_names": job(folder=Path('/scratch/it\'s 100% "mine"; $(id)/runs/cartpole/0007-brisk-otter')),
}


@pytest.mark.parametrize("name", JOBS)
def test_script_equals_golden_file(name: str) -> None:
    assert script(JOBS[name]) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_script_is_short_and_valid_bash(name: str) -> None:
    text = script(JOBS[name])
    assert text.count("\n") < 80
    assert max(map(len, text.splitlines())) <= 160
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_script_contains_no_secret() -> None:
    text = script(JOBS["container"])
    assert "0123456789abcdef" not in text and f". {RUN}/job/secrets.sh" in text
    text = script(JOBS["array"])
    assert "0123456789abcdef" not in text and f". {JOBS['array'].folder}/secrets.sh" in text


def test_ticks_run_outside_containers() -> None:
    """They use the submitting interpreter, because an image does not have the Slurm commands."""
    inside = Profile(launcher="slurm", slurm=Slurm(container="apptainer exec x.sif", python="/usr/bin/python3"))
    assert tick_command(inside, "/opt/python").startswith("/opt/python -m tiltyard.sweep.tick ")
    assert tick_command(Profile(launcher="slurm", slurm=Slurm(python="py")), "/opt/python").startswith("py -m ")


def test_array_task_finds_its_trial_under_any_folder_name(tmp_path: Path) -> None:
    """Run the part before srun in bash as two tasks of one array, then as a task of an abandoned array."""
    sweep = tmp_path / NASTY / "runs" / "n" / "sweep-0001"
    folder = sweep / "slurm" / "array-0001"
    folder.mkdir(parents=True)
    (folder / "trials").write_text("0003-calm-crow\n0009-brisk-otter\n")
    (folder / "secrets.sh").write_text("")
    array = Job("n", folder, Profile(launcher="slurm", environment={"NOTE": NASTY}), array=Array(2, 1))
    text = script(array)
    before = text[: text.index("while of=")]
    shown = f'{before}printf "%s|%s|%s|%s" "$run" "$NOTE" "$TILTYARD_RUNS" "$id"'
    for task, trial in enumerate(("0003-calm-crow", "0009-brisk-otter")):
        (sweep / trial / "logs").mkdir(parents=True)
        env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": f"{task}", "SLURM_JOB_END_TIME": "1"}
        env |= {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": f"{task}"}
        subprocess.run(["bash"], input=shown, text=True, env=env, check=True, cwd=tmp_path)
        written = (sweep / trial / "logs" / f"job-70_{task}.out").read_text()
        assert written.split("|") == [str(sweep / trial), NASTY, str(sweep.parent.parent), f"70_{task}"]
    assert (folder / "number").read_text() == "70\n"
    (folder / "forgotten").touch()
    subprocess.run(["bash"], input=f"{before}touch ran", text=True, env=env, check=True, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_names_and_variables_are_never_evaluated(tmp_path: Path) -> None:
    """Run the part before srun in bash: the run folder and the variables must be unchanged."""
    folder = tmp_path / NASTY / "runs" / "n" / "0001-x-y"
    (folder / "logs").mkdir(parents=True)
    nasty = job(folder=folder, environment={"NOTE": NASTY}, resources=Resources(cpus=1))
    text = script(nasty)
    before = text[: text.index("# One agent")]
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "1"}
    shown = f'{before}printf "%s|%s|%s" "$run" "$NOTE" "$TILTYARD_RUNS"'
    subprocess.run(["bash"], input=shown, text=True, env=env, check=True, cwd=tmp_path)
    written = (folder / "logs" / "job-5.out").read_text()  # an #SBATCH line cannot contain this path
    assert written.split("|") == [str(folder), NASTY, str(folder.parent.parent)]
    assert [line for line in text.splitlines() if line.startswith("#SBATCH --output")] == ["#SBATCH --output=/dev/null"]


def test_script_parts_can_be_used_for_short_jobs() -> None:
    profile = with_nodes(JOBS["samplers"].profile, 2)
    lines = header_lines(profile, "doctor", "/x/%N.out", time="2:00", requeue=False)
    assert "#SBATCH --time=2:00" in lines and "#SBATCH --nodes=2" in lines and "#SBATCH --no-requeue" in lines
    assert not any("hetjob" in line or "--signal" in line for line in lines)
    assert "export PYTHONUNBUFFERED=1" in setup_lines(profile)
    assert step_lines(profile, ["-m", "x"], "'a b'", python="py") == [
        "srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 --cpu-bind=none --kill-on-bad-exit=0 \\",
        "  py -m x 'a b'",
    ]


def test_ld_preload_is_unset_with_a_message(tmp_path: Path) -> None:
    def output(name: str) -> str:
        lines = "\n".join(line for line in setup_lines(JOBS[name].profile) if "LD_PRELOAD" in line)
        command = ["bash", "-c", f'{lines}\necho "left: ${{LD_PRELOAD:-nothing}}"']
        done = subprocess.run(command, env={"LD_PRELOAD": "/nowhere.so"}, capture_output=True, text=True)
        return done.stdout

    assert "LD_PRELOAD=/nowhere.so is unset" in output("one_node")
    assert "left: nothing" in output("one_node") and output("gpu") == "left: /nowhere.so\n"


def test_several_nodes_need_an_engine_that_uses_them() -> None:
    serial = Experiment.model_validate({"env": {"id": "CartPole-v1"}, "engine": {"kind": "serial"}})
    for name in ("many_nodes", "samplers"):
        with pytest.raises(UseError, match=r"requests several nodes, but engine.kind = serial uses one"):
            check(JOBS[name].profile, serial)
    check(JOBS["gpu"].profile, serial)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each, described in JOBS.items():
        (GOLDEN / f"{each}.sh").write_text(script(described))
