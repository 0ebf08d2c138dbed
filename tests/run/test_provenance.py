"""Provenance: facts are recorded, and secrets are masked everywhere."""

import json
import subprocess

import pytest

from tests.counts import count
from tiltyard.config.experiment import Experiment
from tiltyard.run import provenance
from tiltyard.run.create import Source, create
from tiltyard.run.provenance import collect_with_diff
from tiltyard.run.redact import mask_command, mask_secrets

# Concatenated at run time, so that secret scanners do not report this file.
GITHUB = "ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0dF3hJ6"
HUGGING = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmQwErTyUi"
OPENAI = "sk-" + "proj-abcDEF123456ghiJKL789012mnoPQR"
AMAZON = "AKIA" + "IOSFODNN7EXAMPLE"
SLACK = "xoxb-" + "123456789012-abcdefGHIJKL"
WANDB = "0123456789abcdef" * 2 + "01234567"
JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N"
KEY_LINES = ["MIIEowIBAAKCAQEA" + "x9Kq" * 12, "Zm9vYmFyYmF6cXV4" + "7Lp2" * 12]
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\n" + "\n".join(KEY_LINES) + "\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"cloned with {GITHUB} today", GITHUB),
        (f"HF={HUGGING}", HUGGING),
        (f'client = OpenAI("{OPENAI}")', OPENAI),
        (f"id {AMAZON};", AMAZON),
        (f"hook {SLACK}", SLACK),
        (f"wandb login {WANDB}", WANDB),
        (f"api.wandb.ai key {WANDB}", WANDB),
        (f"cookie {JWT}", JWT),
        ("password=hunter2", "hunter2"),
        ("Password: 'correct horse battery'", "horse"),
        ('"db_password": "p\\"ss w0rd"', "w0rd"),
        ("os.environ['API_TOKEN'] = 'zzz111yyy'", "zzz111yyy"),
        ("token: abc123", "abc123"),
        ("MY_SECRET_VALUE = qwertz", "qwertz"),
        ("aws_secret_access_key=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("https://user:s3cret@host.example/x", "s3cret"),
        ("postgres://bob:p@ss@db/x", "p@ss"),
        ("Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
        ("-H 'authorization: Basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
        ("mysql --password verysecret", "verysecret"),
        ("run --api-key=abcabc --x 1", "abcabc"),
        (PRIVATE, KEY_LINES[0]),
        ("+" + PRIVATE.replace("\n", "\n+"), KEY_LINES[1]),
        (PRIVATE[:150], KEY_LINES[0]),
        ("\n".join(["@@ -1,9 +1,9 @@", *(" " + line for line in KEY_LINES)]), KEY_LINES[1]),
    ],
)
def test_secrets_are_masked(text, secret):
    masked = mask_secrets(text, {})
    assert secret not in masked and "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        "algo.lr=3e-4",
        "env.options.size=5",
        "tiltyard train cartpole.yaml seed=3 --on cluster",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "https://example.org/a/b@c",
        "token: None",
        "def f(password: str, secret: bool = True):",
        "monkey=3 keyboard: qwerty",
        "+    return self.net(x)",
        "compass: north",
    ],
)
def test_other_text_is_not_masked(text):
    assert mask_secrets(text, {}) == text


def test_values_of_secret_environment_variables_are_masked():
    environment = {
        "WANDB_API_KEY": "plain-looking-value",
        "DB_PASS": "open sesame",
        "SSH_PRIVATE_KEY": PRIVATE,
        "HOME": "/home/me",
        "SHORT_TOKEN": "1",
    }
    text = f"a plain-looking-value b open%20sesame c\n-{KEY_LINES[0]} 1 /home/me"
    masked = mask_secrets(text, environment)
    assert masked == "a *** b *** c\n-*** 1 /home/me"


def test_secret_after_its_option_is_masked():
    assert mask_command(["train", "--token", "abc", "x=1", "--api-key=def", "env.options.password=ghi"], {}) == [
        "train", "--token", "***", "x=1", "--api-key=***", "env.options.password=***"]  # fmt: skip


@pytest.mark.timeout(30)
def test_masking_hostile_text_is_fast():
    for hostile in ("token" * 5_000, "a://" * 5_000, "password=" * 5_000, "-----BEGIN PRIVATE KEY-----" * 2_000, "key " * 5_000,
                    '"' * 20_000, "\\" * 20_000, "password='" + "\\" * 20_000, "sk-" + "a-" * 5_000, "=" * 20_000, "--" + "token" * 5_000,
                    " --token-" * 5_000, "eyJ" + "-eyJ" * 5_000, "password:" + " " * 20_000, "bearer " * 5_000, "pass" * 5_000):  # fmt: skip
        mask_secrets(hostile, {})  # limited by the timeout of the test


def git(folder, *words):
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("x = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_commit_and_changes_are_recorded(repository):
    facts, diff = collect_with_diff(["tiltyard"], [repository])
    assert len(facts["git"]["commit"]) == 40 and facts["git"]["dirty"] is False and diff == ""
    (repository / "train.py").write_text("x = 2\n")
    (repository / "new.py").write_text("y = 1\n")
    facts, diff = collect_with_diff(["tiltyard"], [repository])
    assert facts["git"]["dirty"] is True and facts["git"]["untracked"] == ["new.py"]
    assert "-x = 1\n+x = 2" in diff
    assert facts["packages"]["numpy"] and facts["python"] and facts["host"] and facts["cpus"] >= 1


def test_missing_repository_git_or_commit_is_accepted(tmp_path, monkeypatch):
    assert collect_with_diff([], [tmp_path])[0]["git"] is None
    git(tmp_path, "init", "-q")
    assert collect_with_diff([], [tmp_path])[0]["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_with_diff([], [tmp_path])[0]["git"] is None


def test_large_diff_is_truncated(repository, monkeypatch):
    (repository / "train.py").write_text("".join(f"line {n} = {'z' * 60}\n" for n in range(30_000)))
    diff = collect_with_diff([], [repository])[1]
    assert provenance.DIFF_LIMIT <= len(diff) < provenance.DIFF_LIMIT + 200 and "cut here" in diff[-100:]


def test_secret_at_the_truncation_point_is_not_partly_kept(repository, monkeypatch):
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 3000)
    for shift in range(count(300)):
        (repository / "train.py").write_text("y\n" * (1420 + shift) + f"{GITHUB}\n" + "y\n" * 100)
        diff = collect_with_diff([], [repository])[1]
        assert GITHUB[:12] not in diff, shift


def test_diff_runs_no_program_configured_in_the_repository(repository, tmp_path):
    (repository / ".gitattributes").write_text("*.py diff=evil\n")
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o755)
    for setting in ("diff.external", "diff.evil.textconv", "diff.evil.command", "core.fsmonitor"):
        git(repository, "config", setting, str(script))
    (repository / "train.py").write_text("x = 3\n")
    (tmp_path / "ran").unlink(missing_ok=True)  # the git commands above may have run the file system monitor
    assert "x = 3" in collect_with_diff([], [repository])[1]
    assert not (tmp_path / "ran").exists()


def test_no_file_of_a_run_has_a_planted_secret(repository, tmp_path, monkeypatch):
    planted = {
        "WANDB_API_KEY": WANDB, "GITHUB_TOKEN": GITHUB, "MY_PASSWORD": "tr0ub4dor-and-3", "HF_HOME_SECRET": HUGGING,
        "SLURM_JWT": JWT, "TILTYARD_TOKEN": "tilt-secret-value", "UNRELATED": "not-allow-listed-value",
    }  # fmt: skip
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TILTYARD_NOTE", f"see https://me:{OPENAI}@example.org and tr0ub4dor-and-3")
    (repository / "train.py").write_text(
        f'TOKEN = "{GITHUB}"\nkey = "{AMAZON}"\nurl = "https://bob:sw0rdfish@h/"\nw = "{WANDB}"\n{PRIVATE}\npw = "tr0ub4dor-and-3"\n'
    )
    (repository / "sw0rdfish-free.txt").write_text("untracked")
    command = [
        "tiltyard",
        "train",
        "--token",
        "argument-secret",
        f"env.options.api_key={OPENAI}",
        f"https://u:{SLACK}@h/",
    ]
    run = create(
        tmp_path / "runs",
        Experiment.model_validate({"name": "toy", "env": {"id": "CartPole-v1"}}),
        Source(base=[repository], command=command),
    )
    found = {path.name: path.read_text() for path in run.folder.rglob("*") if path.is_file()}
    assert {"provenance.json", "provenance.diff"} <= set(found)
    secrets = [*planted.values(), OPENAI, AMAZON, SLACK, "sw0rdfish@", "argument-secret", *KEY_LINES]
    leaks = [(name, secret) for name, text in found.items() for secret in secrets if secret in text]
    assert leaks == []
    facts = json.loads(found["provenance.json"])
    assert facts["environment"]["SLURM_JOB_ID"] == "4711" and facts["environment"]["SLURM_JWT"] == "***"
    assert "UNRELATED" not in facts["environment"] and "WANDB_API_KEY" not in facts["environment"]
    assert facts["command"][:2] == ["tiltyard", "train"] and "TOKEN" in found["provenance.diff"]


def test_working_folder_is_not_masked() -> None:
    shell = {"PWD": "/home/me/project", "OLDPWD": "/home/me/other", "DB_PWD": "hunter2hunter2"}
    assert mask_secrets("in /home/me/project after /home/me/other with hunter2hunter2", shell) == (
        "in /home/me/project after /home/me/other with ***"
    )
