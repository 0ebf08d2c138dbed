"""Makes the peers' virtual environments from pinned requirement files: `python bench/peers/install.py [NAME ...]`.

One environment per file beside this one, below .bench in the project's folder (or $BENCH_PEERS). Made anew only when
its file changes. torch comes first and by its exact pin: resolved with the rest, a range could bring another one.
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
        sys.exit(f"error: could not be installed: {', '.join(failed)}; the benchmark leaves them out")


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
        (environment / "bin" / "python").unlink()  # the benchmark takes an environment without Python as missing
    return done


def pip(environment: Path, *arguments: str, **variables: str) -> bool:
    command = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode == 0


def source_of(environment: Path, file: str) -> str:
    """Where a package's source lies, by the index that pip is set up with: `pip download` would begin to build it."""
    asked = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    ways = (["-m", "pip", "config", "get", "global.index-url"], ["-c", asked])
    said = (subprocess.run([environment / "bin" / "python", *way], capture_output=True, text=True) for way in ways)
    index = os.environ.get("PIP_INDEX_URL") or next(each.stdout.strip() for each in said if each.stdout.strip())
    page = f"{index.rstrip('/')}/{file.partition('-')[0]}/"
    with urlopen(Request(page, headers={"Accept": "text/html"})) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read().decode())
    return urljoin(page, next(link for link in links if link.endswith(f"/{file}")))


def install_puffer(environment: Path) -> bool:
    """PufferLib 3.0.0 without its own games: these are fetched from GitHub while it is built, and are not compared.

    Its switch for that, NO_OCEAN, leaves one name of its setup.py undefined: it is defined here. Compiles for minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        with urlopen(source_of(environment, PUFFER)) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder) / "pufferlib-3.0.0"
        setup = source / "setup.py"
        mended = setup.read_text().replace("\nc_extensions = []\n", "\nc_extensions = c_extension_paths = []\n")
        setup.write_text(mended)
        # A PATH without a CUDA compiler: it would be taken for a wish to build for a GPU.
        variables = {"NO_OCEAN": "1", "PATH": f"{environment / 'bin'}:/usr/bin:/bin"}
        return pip(environment, "--no-build-isolation", "--no-deps", str(source), **variables)


if __name__ == "__main__":
    main()
