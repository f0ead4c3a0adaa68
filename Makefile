# make train     set up once and train the default model
# make test      set up once and run the tests
# make help      all targets
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all bench lint types format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## create .venv and install

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LMForge needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev]'
	@touch $@

train: $(VENV)/.installed  ## train the default model (add words with ARGS="optimizer.lr=1e-3")
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/.installed-dev  ## run the tests (not the slow ones)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/.installed-dev  ## run all tests, the slow ones too
	$(BIN)/python -m pytest $(ARGS)

# Peers live in an environment of their own: once installed, Lightning would import transformers at every start. The
# core one shows what a start costs where nothing optional is installed. litgpt's own pins are older than what it runs
# with, hence --no-deps.
.venv-bench/.installed: benchmarks/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[sweep]' -r benchmarks/requirements.txt
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-nodeps.txt
	@touch $@

.venv-core/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-core
	.venv-core/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

bench: .venv-bench/.installed .venv-core/.installed  ## speed beside the peers, a table and reports/bench.json (ARGS=--quick)
	.venv-bench/bin/python -m benchmarks $(ARGS)

lint: $(VENV)/.installed-dev  ## style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## static types
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## put code into shape
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:  ## remove what can be made again (not runs/)
	rm -rf $(VENV) .venv-bench .venv-core .cache .pytest_cache .ruff_cache .mypy_cache
