# README's two commands: `make train` and `make test`. Both make .venv when it is missing and reuse it when it is there.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train test test-layouts test-mutants test-golden-faults test-storage test-http test-faults soak lint clean

# The first interpreter that starts and is 3.10 to 3.13; `make PYTHON=/path/to/python3.12 train` overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 && { command -v $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.slime-installed

# one thread per process: the ranks and the engine are the parallelism
export OMP_NUM_THREADS := 1
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1
export PYTHONUNBUFFERED := 1

help:
	@echo "make train         train the addition example: data, warm-up, GRPO, report (about 5 minutes, no GPU)"
	@echo "make test          lint, repository shape, workflows, tests"
	@echo "make test-layouts  every parallel layout with every algorithm, in real processes, and long runs (minutes)"
	@echo "make test-mutants  every planted fault against the tests that concern it; prints the survivors (half an hour)"
	@echo "make test-golden-faults  planted faults that the golden run must catch, each with its first cause (ten minutes)"
	@echo "make test-storage  disks that fail and processes that die in the middle of every kind of save (five minutes)"
	@echo "make test-http     100,000 mutated HTTP requests against the engine (two minutes)"
	@echo "make test-faults   real runs broken by every kind of fault in every process; prints the table (20 minutes)"
	@echo "make soak HOURS=2  one long run; fails where a process of it grows"
	@echo "make lint          ruff and mypy only"
	@echo "make clean         remove .venv and runs/"

$(STAMP): setup.py pyproject.toml tools/install.py slime/tested_versions.py
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found. Install one, or: make PYTHON=/path/to/python train"; exit 2; }
	@if [ ! -x $(BIN)/python ]; then echo "[1/3] creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); else echo "[1/3] $(VENV) is there"; fi
	@$(BIN)/python tools/install.py
	@touch $(STAMP)

train: $(STAMP)
	@$(BIN)/python -m examples.addition.run $(ARGS)

test: $(STAMP)
	@mkdir -p runs
	@echo "[1/4] ruff"; $(BIN)/ruff check .; $(BIN)/ruff format --check .
	@echo "[2/4] repository shape"; $(BIN)/python tools/repo_shape.py
	@echo "[3/4] generated workflows"; $(BIN)/python .github/workflows/generate_github_workflows.py --check
	@echo "[4/4] pytest"; $(BIN)/python -m pytest -q -n 2 --max-worker-restart 0 -o faulthandler_timeout=660 --durations=15 --junitxml=runs/test-report.xml $(ARGS)

test-layouts: $(STAMP)
	@mkdir -p runs
	@$(BIN)/python -m pytest -q -m slow_layouts --durations=15 --junitxml=runs/test-layouts-report.xml
	@$(BIN)/python tools/layout_matrix.py $(ARGS)

test-mutants: $(STAMP)
	@$(BIN)/python tools/mutants/run.py --jobs 2 $(ARGS)

test-golden-faults: $(STAMP)
	@$(BIN)/python tools/mutants/golden.py $(ARGS)

test-storage: $(STAMP)
	@$(BIN)/python tools/chaos/storage.py --seconds 300 $(ARGS)

test-http: $(STAMP)
	@$(BIN)/python tools/chaos/engine_http.py $(ARGS)

test-faults: $(STAMP)
	@$(BIN)/python tools/chaos/loops.py $(ARGS)

HOURS ?= 2
soak: $(STAMP)
	@$(BIN)/python tools/chaos/soak.py --hours $(HOURS) $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
