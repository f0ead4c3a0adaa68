# make train     set up once and train the default model
# make test      set up once and run the tests
# make help      all targets
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-lowest test-newest bench parity faults lint types format docs docs-serve \
        config-reference \
        rename docker-build docker-run clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

parity: $(VENV)/.installed-dev  ## every strategy beside one process, a table and reports/parity.json (ARGS="fsdp 3d")
	PYTHONPATH=tests:tests/distributed $(BIN)/python scripts/parity.py $(ARGS)

faults: $(VENV)/.installed  ## every fault once on a real training, a table and reports/faults.json (about five minutes)
	$(BIN)/python -m lmforge.soak

lint: $(VENV)/.installed-dev  ## style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## static types
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## put code into shape
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# Without --quiet, under which mkdocs counts no warnings and --strict never fails.
docs: $(VENV)/.installed-dev  ## build the documentation into site/, offline; a dead link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed-dev  ## show the documentation while you write it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

config-reference: $(VENV)/.installed  ## write docs/config-reference.md from the comments in configs/
	$(BIN)/python scripts/config_reference.py

rename:  ## make it a package of your own: make rename NAME=acme_lm (TITLE="Acme LM")
	@$(PYTHON) scripts/rename.py '$(if $(filter command%,$(origin NAME)),$(NAME))' '$(TITLE)' $(if $(filter 1,$(FORCE)),--force)

test-lowest:  ## run the tests with the lowest versions that pyproject.toml allows
	$(PYTHON) scripts/floors.py > lowest.txt
	$(call test_in,.venv-lowest,-c lowest.txt)

test-newest:  ## run the tests with the newest versions that there are
	$(call test_in,.venv-newest)

define test_in
	rm -rf $(1) && $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) -e '.[test]'
	$(1)/bin/python -m pytest -m "not slow and not gpu" $(ARGS)
endef

# deploy/Dockerfile says what BASE may be.
BASE ?= python:3.11-slim-bookworm
TAG  ?= lmforge
GPUS ?= $(if $(shell command -v nvidia-smi),--gpus all)
SCRIPT ?= train.py
REVISION = $(shell git describe --always --dirty)

docker-build:  ## build the image (BASE=python:3.11-slim-bookworm TAG=lmforge)
	docker build -f deploy/Dockerfile --build-arg BASE=$(BASE) --build-arg REVISION=$(REVISION) -t $(TAG) .

docker-run:  ## train in the image, on all GPUs there are (SCRIPT=evaluate.py ARGS="run=latest")
	mkdir -p runs .cache
	docker run --rm --init --ipc=host $(GPUS) --user "$$(id -u):$$(id -g)" -e HOME=/tmp -e USER=me \
	  -v "$(CURDIR)/runs:/app/runs" -v "$(CURDIR)/.cache:/app/.cache" $(TAG) $(SCRIPT) $(ARGS)

clean:  ## remove what can be made again (not runs/)
	rm -rf $(VENV) .venv-* site lowest.txt .cache .pytest_cache .ruff_cache .mypy_cache
