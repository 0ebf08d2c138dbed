# Everything from a clean clone needs only Python 3.11 or newer with pip, and make.
#
#   make demo    train CartPole, evaluate it, plot its learning curve, record a video (everything below ./demo)
#   make check   the inner loop: lint and the quick tests, under three minutes
#   make test    lint and all tests             make test-long   the same, with ten times the repetitions
#   make bench   Tiltyard beside its peers, hours; less: make bench ARGS="--tasks cartpole --blocks 3"
#   make docs    regenerate docs/reference and the tables of floors
#   make dist    build the packages in ./dist and try the wheel in a fresh environment (docs/releasing.md)
#   make lint    ruff and mypy                  make clean       remove what the others made, except $(VENV) and runs/

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 4

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SLURM  := $(VENV)/.slurm
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Four test processes on two cores: tests of Slurm and Ray mostly wait. Each has one torch thread, because several thread
# pools would compete for the same cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --maxschedchunk 1

.DEFAULT_GOAL := check
.PHONY: venv lint check test test-long docs dist demo bench clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "error: there is no '$(PYTHON)'; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit("error: Tiltyard needs Python 3.11 or newer and $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "installing into $(VENV); the first time this takes a few minutes" >&2
	@"$(PYTHON)" -m venv "$(VENV)"
	@# torch by its pin first: resolved together with the rest, a range could bring gigabytes of GPU packages
	@$(PIP) install -qq -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@found=$$($(PIP) check 2>&1) || { echo "error: $$found" >&2; exit 1; }
	@touch "$@"

# A real Slurm for the tests of jobs, where it may be installed; the tests say what they miss otherwise.
$(SLURM): tests/cluster/install.sh | $(STAMP)
	@tests/cluster/install.sh "$@"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint $(SLURM)
	$(PYTEST) -m "not slow"

test: lint $(SLURM)
	$(PYTEST) --durations=25

test-long: lint $(SLURM)
	TILTYARD_LONG=1 $(PYTEST) --durations=25

docs: $(STAMP)
	$(BIN)/python docs/generate.py

# Built without build/ and *.egg-info of earlier builds, which would bring deleted files back.
dist: $(STAMP)
	rm -rf build dist tiltyard.egg-info
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	.ci/try-wheel "$(PYTHON)" dist/*.whl

# A peer that cannot be installed here is left out, and the tables say so.
bench: $(STAMP)
	-$(BIN)/python bench/peers/install.py
	$(BIN)/python bench/run.py $(ARGS)

# Exported to the recipe's commands: `last` is the newest run below this root.
demo: export TILTYARD_RUNS := demo/runs
demo: $(STAMP)
	@mkdir -p demo
	$(BIN)/tiltyard train examples/cartpole.yaml stop.return=475 --expect 'return>=475'
	$(BIN)/tiltyard eval last --episodes 20 --video --out demo/evaluation
	$(BIN)/tiltyard show last --plot demo/learning-curve.png
	@echo
	@echo "picture   demo/learning-curve.png"
	@echo "video     $$(ls -t demo/evaluation/*.mp4 | head -n 1)"
	@echo "run       $$(ls -d demo/runs/cartpole/[0-9]* | tail -n 1)"
	@echo
	@echo "type next"
	@echo "  . $(BIN)/activate"
	@echo "  export TILTYARD_RUNS=demo/runs"
	@echo "  tiltyard ls                                            # all runs"
	@echo "  tiltyard train examples/cartpole.yaml algo.lr=3e-4     # the same with one change"
	@echo "  tiltyard train CartPole-v1 stop.env_steps=1e5          # no file at all"

clean:
	rm -rf demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
