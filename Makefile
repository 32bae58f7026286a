# `make quickstart` and `make test` do all the set-up themselves: they make .venv when it is missing or out of date.

BIN := .venv/bin
READY := .venv/.ready

# Small models run slower with several OpenMP threads that wait actively; the commands choose their own thread counts.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

# Tests run on so many processes; the tests of a file stay together. JOBS=0 runs them in one, as a debugger needs it.
JOBS ?= logical

.PHONY: help quickstart test lint slow gpu clean

help:
	@echo "make quickstart   train a tiny model in under three minutes; ARGS='--seed 1 --json out.json' adds flags"
	@echo "make test         lint, contracts, unit and end-to-end tests"
	@echo "make lint         ruff and mypy"
	@echo "make slow         tests that take minutes"
	@echo "make gpu          tests that need a CUDA device"
	@echo "make clean        remove .venv and caches"

$(READY): pyproject.toml constraints.txt scripts/make_venv.sh
	@PYTHON='$(PYTHON)' scripts/make_venv.sh

quickstart: $(READY)
	@$(BIN)/miles quickstart $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile --durations=10 $(ARGS)

slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout=1800 $(ARGS)

gpu: $(READY)
	$(BIN)/python -m pytest -m gpu --timeout=600 $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
