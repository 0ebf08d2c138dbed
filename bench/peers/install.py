"""Makes the peers' virtual environments from pinned requirement files: `python bench/peers/install.py [NAME ...]`.

One environment per file beside this one, below .bench in the project's folder (or $BENCH_PEERS). Made anew only when
its file changes. torch comes first and by its exact pin: resolved with the rest, a range could bring another one.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
INTO = Path(os.environ.get("BENCH_PEERS", HERE.parents[1] / ".bench"))
PUFFER = (
    "https://files.pythonhosted.org/packages/7c/e1/5292f9b69c6263707b40ba04a87e6b9bcc177281d31092f77afd90c412f1/"
    "pufferlib-3.0.0.tar.gz"
)


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


def install_puffer(environment: Path) -> bool:
    """PufferLib 3.0.0 without its own games: these are fetched from GitHub while it is built, and are not compared.

    Its switch for that, NO_OCEAN, leaves one name of its setup.py undefined: it is defined here. Compiles for minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        with urlopen(PUFFER) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
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
