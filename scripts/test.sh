#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, format, types, import layers, tests. Needs no GPU and no account.
#
#   bash scripts/test.sh                          all of it
#   bash scripts/test.sh tests/models -k cache    the same, with these arguments for pytest
#
# FORETOKEN_TEST_WORKERS (2) is the number of test processes. Each has one OpenMP thread unless OMP_NUM_THREADS says
# otherwise: threads of programs that run side by side would wait for each other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

step "environment" setup_env dev
step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "mypy" mypy
step "import layers" lint-imports
step "pytest" pytest -q -n "${FORETOKEN_TEST_WORKERS:-2}" "$@"

printf '\nAll checks passed in %d s.\n' "$SECONDS"
