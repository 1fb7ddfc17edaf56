# Every command works on a fresh machine with Python 3.11+: each sets up the environment it needs first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done 2>/dev/null)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
ARGS ?=
WORKERS ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup serve test check format docs clean

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "snapcap needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Two stamps: the server alone needs neither transformers nor the test tools. Triton lies beside the environment, for
# its interpreter: installed into it, torch's CPU build would take itself for one with a GPU's compiler.
$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@$(PIP) --no-deps --target $(VENV)/triton --upgrade triton 2>$(VENV)/triton.log || echo "WARNING: NO TRITON: THE TEST OF THE KERNELS IS SKIPPED" >&2
	@touch $@ $(VENV)/.serve $(VENV)/.docs

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.serve

setup: $(VENV)/.dev  ## install everything for development into .venv

serve: $(VENV)/.serve  ## run the server with the demo model (ARGS="--port 8001" passes options on)
	@exec $(BIN)/snapcap serve $(ARGS)

test: $(VENV)/.dev  ## run all tests (ARGS="-k parity" passes options on, WORKERS=4 uses four processes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev  ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## build the site of the documents into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
