# Shortcuts. `make test` is what continuous integration runs; the others are its parts and need its environment (.venv, or
# the active one), which `make test` or `make env` makes.
PATH := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)/bin:$(PATH)
SHELL := /bin/bash

.PHONY: help env test lint format types slow docs quickstart clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env:  ## make the environment, with what the checks need
	bash -c 'set -euo pipefail; source scripts/setup_env.sh; setup_env dev'

test:  ## all checks: lint, format, types, import layers, tests
	bash scripts/test.sh

lint:  ## ruff and the import layers
	ruff check .
	ruff format --check .
	lint-imports

format:  ## let ruff rewrite what it can
	ruff check --fix .
	ruff format .

types:  ## mypy
	mypy

slow:  ## the tests that the default suite leaves out
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} pytest -m slow --timeout 3600

docs:  ## write the pages of docs/ that are made from the code (options.md, api.md)
	python -m scripts.document

quickstart:  ## the whole pipeline on a small real model
	bash scripts/quickstart.sh

clean:  ## remove caches and builds; keeps .venv, checkpoints and data
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
