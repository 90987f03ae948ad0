# make run | test | test-long | lint | bench | setup | clean      (each sets up what it needs, once)
#
#   PYTHON=python3.12     the interpreter to build the environment with (3.11 to 3.13)
#   TORCH_INDEX=URL       take torch from this package index instead of the default one, e.g. a CPU-only index
#   EXTRAS=run,serve,dev  which extras to install; cuda joins by itself where a GPU driver is found
#   ARGS="…"              passed on: make run ARGS='--prompt "Hello"', make test ARGS="-k ledger"
#   WORKERS=2             parallel test processes

SHELL := /bin/bash
.DEFAULT_GOAL := help

comma := ,
PYTHON ?= python3
TORCH_INDEX ?=
EXTRAS ?= run,serve,dev$(if $(wildcard /dev/nvidiactl /dev/dxg),$(comma)cuda)
ARGS ?=
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
# One line per package instead of pip's six.
BRIEF := awk '/^ *(Downloading .*\.(whl|gz) |Building|Installing|Successfully)/ && !/: (started|finished)/ { print substr($$0, 1, 120); fflush() }'

.PHONY: help run test test-long lint bench setup demo clean

help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

run: demo
	@$(BIN)/onebudget run $(ARGS)

test: demo
	@$(PYTEST) $(ARGS)

test-long: demo
	@HYPOTHESIS_PROFILE=long $(PYTEST) -m "long or not long" $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: demo
	@HF_HUB_OFFLINE=1 $(BIN)/python bench/engine.py $(ARGS)

setup: $(STAMP)

# Interrupted anywhere, the stamp is missing and the next call takes the same steps; what is installed stays installed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "onebudget needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not found'): name one, as in make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' can't make virtual environments: install its venv package (python3-venv on Debian and Ubuntu), or name another Python, as in make setup PYTHON=python3.12" >&2; exit 1; }
	@rm -f $@
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "[2/3] torch$(if $(TORCH_INDEX), from $(TORCH_INDEX)) (the largest download)"
	@$(if $(TORCH_INDEX),$(PIP) install --no-deps -c constraints.txt --index-url "$(TORCH_INDEX)" torch)
	@$(PIP) install -c constraints.txt torch
	@echo "[3/3] onebudget with extras $(EXTRAS)"
	@set -o pipefail; $(PIP) install -c constraints.txt --editable ".[$(EXTRAS)]" | $(BRIEF)
	@touch $@
	@echo "ready: $(BIN)/onebudget --help"

demo: setup
	@$(BIN)/python -m onebudget.models.demo >/dev/null

clean:
	@rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
