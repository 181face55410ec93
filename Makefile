# make serve: from nothing to a served model. make test: everything that needs neither root nor a device.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is new enough; choose another with `make PYTHON=...`.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$python"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct
SERVE_ARGS ?= -pp 2 --cpu-devices 2
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
SOAK_SECONDS ?= 3600

PROJECT_FILES := pyproject.toml setup.py stagemesh/pyproject.toml stagemesh/setup.py stagemesh/version.py
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt
SERVE_EXTRAS := gateway,worker,convert,certs
SERVE_STAMP := $(VENV)/.installed-serve
TEST_STAMP := $(VENV)/.installed-test

.NOTPARALLEL:
.PHONY: help serve install install-test model test test-system chaos proto check-proto docs check-docs lint format types check-aarch64 bench soak clean

help:
	@echo "make serve         install, fetch the demo model, serve it on two stages"
	@echo "make test          install what tests need and run them (no root)"
	@echo "make test-system   tests that need root: network namespaces, Debian packages"
	@echo "make chaos         storms of kills and stops over a running mesh, about 10 minutes"
	@echo "make lint types    ruff; mypy"
	@echo "make proto         generate the stubs; make check-proto: style, drift, breaking changes"
	@echo "make docs          write the pages made from tables; make check-docs: they are up to date"
	@echo "make check-aarch64 every extra resolves to aarch64 wheels"
	@echo "make bench         benchmarks"
	@echo "make soak          an hour of load with cancels (SOAK_SECONDS), and what it leaves"
	@echo "make clean         remove what was built (the model cache stays)"

serve: install model
	@exec $(BIN)/stagemesh serve $(MODEL) $(SERVE_ARGS)

install: $(SERVE_STAMP)

install-test: $(TEST_STAMP)

model: $(SERVE_STAMP)
	@$(BIN)/stagemesh model fetch $(MODEL)

# Most tests wait for processes that start, so two files run at a time; what measures time runs alone.
BY_DEFAULT := not slow and not chaos and not system and not npu
test: $(TEST_STAMP) model
ifeq ($(strip $(PYTEST_ARGS)),)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "$(BY_DEFAULT) and not quiet"
	$(BIN)/python -m pytest -m "$(BY_DEFAULT) and quiet"
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-system: $(TEST_STAMP) model
	@if [ "$$(id -u)" != 0 ]; then echo "make test-system: needs root (network namespaces)" >&2; exit 1; fi
	@if ! command -v ip >/dev/null; then apt-get update -qq && apt-get install -y -qq iproute2; fi
	$(BIN)/python -m pytest tests/system -m system $(PYTEST_ARGS)

# Not captured: each kill and stop is a line, and so is what came of a storm.
chaos: $(TEST_STAMP) model
	$(BIN)/python -m pytest tests/chaos -m "chaos or not chaos" -s $(PYTEST_ARGS)

proto: $(TEST_STAMP)
	$(BIN)/python -m tools.protos generate

check-proto: $(TEST_STAMP)
	$(BIN)/python -m tools.protos lint
	$(BIN)/python -m tools.protos drift
	$(BIN)/python -m tools.protos breaking

docs: $(TEST_STAMP)
	$(BIN)/python -m tools.documents generate

check-docs: $(TEST_STAMP)
	$(BIN)/python -m tools.documents drift

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(TEST_STAMP)
	$(BIN)/mypy

check-aarch64: $(TEST_STAMP)
	$(BIN)/python -m tools.check_aarch64

bench: $(TEST_STAMP) model
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: $(TEST_STAMP)
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS)

clean:
	rm -rf .venv build dist *.egg-info stagemesh/build stagemesh/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: Stagemesh needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is not Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv "$(VENV)" || { \
		echo "make: no virtual environment; on Debian: apt-get install python3-venv" >&2; rm -rf "$(VENV)"; exit 1; }

# Editable, so that the code in this tree runs; without build isolation, so that
# setuptools too comes from the pins. A stamp makes the second time instant.
$(SERVE_STAMP): constraints.txt $(PROJECT_FILES) | $(BIN)/python
	@echo "Installing Stagemesh [$(SERVE_EXTRAS)] into $(VENV) (some minutes the first time)"
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation -e ./stagemesh -e '.[$(SERVE_EXTRAS)]'
	@touch $@

# One installation for both: what tests need holds what serving needs.
$(TEST_STAMP): constraints.txt $(PROJECT_FILES) | $(BIN)/python
	@echo "Installing Stagemesh [$(SERVE_EXTRAS),ray,dev] into $(VENV) (some minutes the first time)"
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation -e ./stagemesh -e '.[$(SERVE_EXTRAS),ray,dev]'
	@touch $(SERVE_STAMP) $@
