"""The example notebook in a real Jupyter kernel: train with workers, evaluate, film, plot; resume in a new process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.conftest import in_own_process
from tiltyard.run import metrics
from tiltyard.run.folder import find

EXAMPLE = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
FORK_IN_A_THREAD = """
import threading

gymnasium.register("Corridor-v0", entry_point=Corridor, max_episode_steps=3)
settings = {"env": "Corridor-v0", "stop": {"env_steps": 7_000}, "eval": {"at_end": False}, "name": "edited"}
thread = threading.Thread(target=tiltyard.fork, args=[run], kwargs=settings)
thread.start()
thread.join()
"""
SCRIPTED = """
class Left:
    def __init__(self, spec): pass
    def reset(self, seed): pass
    def act(self, obs, mask): return 0

print(tiltyard.evaluate(run, episodes=2, policy=Left).mean)
"""


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


@pytest.mark.timeout(900)
def test_example_notebook_runs_in_a_kernel(runs: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    edited = next(cell.source for cell in notebook.cells if "class Corridor" in cell.source)
    edited = edited.replace("float(self.place == LENGTH - 1)", "-7.0")
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in (edited, FORK_IN_A_THREAD, SCRIPTED)]
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    training, evaluation, plot, _, in_a_thread, scripted = notebook.cells[-6:]

    (panel,) = outputs(training, "display_data")
    assert "6,144 of 6,000 env steps" in panel.data["text/plain"]
    assert panel.data["text/html"].startswith("<pre")
    assert "color: #" in panel.data["text/html"]
    printed = "".join(output.text for output in outputs(training, "stream") if output.name == "stdout")
    assert "2 workers" in printed
    assert "finished: stop.env_steps=6,000 reached" in printed
    assert evaluation.outputs[0].text == "1.00 [1.00, 1.00]\n"
    assert (tmp_path / "corridor.mp4").read_bytes()[4:8] == b"ftyp"
    assert "image/png" in plot.outputs[0].data

    run = find("corridor", runs)
    assert run.experiment().env.id == "plugins/notebook.py:Corridor"
    assert run.experiment().model.id == "plugins/notebook.py:Net"
    in_own_process("resume", "corridor", "stop.env_steps=7_000", "eval.video=true")
    assert run.status()["progress"]["env_steps"] == 7_168

    fork = find("edited", runs)
    assert fork.state == "finished", in_a_thread.outputs
    assert fork.experiment().env.time_limit == 3
    assert fork.experiment().engine.workers == 2
    assert metrics.read(fork)[-1]["metrics"]["train/return"] < 0, "the edited env has reward -7"
    assert scripted.outputs[0].text == "0.0\n", "the first run keeps its env"
