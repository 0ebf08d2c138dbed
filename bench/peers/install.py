"""Create the peers' virtual environments from pinned requirements: `python bench/peers/install.py [NAME ...]`.

One environment per requirement file in this folder, in .bench of the project's folder (or $BENCH_PEERS). It is
rebuilt only when its file changes. torch is installed first with its exact pin: together with the rest, pip could
resolve another one.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
INTO = Path(os.environ.get("BENCH_PEERS", HERE.parents[1] / ".bench"))
PUFFER = "pufferlib-3.0.0.tar.gz"


def main() -> None:
    wanted = sys.argv[1:] or sorted(file.stem for file in HERE.glob("*.txt"))
    failed = [name for name in wanted if not install(HERE / f"{name}.txt", INTO / name)]
    if failed:
        sys.exit(f"error: could not install: {', '.join(failed)}; the benchmark skips them")


def install(requirements: Path, environment: Path) -> bool:
    text, stamp = requirements.read_text(), environment / "installed.txt"
    if stamp.exists() and stamp.read_text() == text:
        return True
    print(f"installing {environment}", file=sys.stderr)
    venv.create(environment, with_pip=True, clear=True)
    torch = next(line for line in text.splitlines() if line.startswith("torch=="))
    done = pip(environment, torch) and pip(environment, "-r", str(requirements))
    if done and requirements.stem == "puffer":
        done = install_puffer(environment)
    if done:
        stamp.write_text(text)
    else:
        (environment / "bin" / "python").unlink()  # for the benchmark, an environment without Python is not installed
    return done


def pip(environment: Path, *arguments: str, **variables: str) -> bool:
    command = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode == 0


def source_of(environment: Path, file: str) -> str:
    """URL of a package's source in the index that pip is configured for; `pip download` would start to build it."""
    program = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    ways = (["-m", "pip", "config", "get", "global.index-url"], ["-c", program])
    answers = (subprocess.run([environment / "bin" / "python", *way], capture_output=True, text=True) for way in ways)
    index = os.environ.get("PIP_INDEX_URL") or next(each.stdout.strip() for each in answers if each.stdout.strip())
    page = f"{index.rstrip('/')}/{file.partition('-')[0]}/"
    with urlopen(Request(page, headers={"Accept": "text/html"})) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read().decode())
    return urljoin(page, next(link for link in links if link.endswith(f"/{file}")))


def install_puffer(environment: Path) -> bool:
    """Install PufferLib 3.0.0 without its own games, which are not compared and which its build fetches from GitHub.

    Its switch for this, NO_OCEAN, leaves a name in its setup.py undefined, so it is defined here. Compiles for minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        with urlopen(source_of(environment, PUFFER)) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder) / "pufferlib-3.0.0"
        setup = source / "setup.py"
        patched = setup.read_text().replace("\nc_extensions = []\n", "\nc_extensions = c_extension_paths = []\n")
        setup.write_text(patched)
        # A PATH without a CUDA compiler, because otherwise it would build for a GPU.
        variables = {"NO_OCEAN": "1", "PATH": f"{environment / 'bin'}:/usr/bin:/bin"}
        return pip(environment, "--no-build-isolation", "--no-deps", str(source), **variables)


if __name__ == "__main__":
    main()
