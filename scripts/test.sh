#!/usr/bin/env bash
# Sets up, then runs all tests, several at a time; arguments go to pytest: bash scripts/test.sh [-k NAME ...]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --test
exec .venv/bin/python -m pytest -n auto --maxprocesses=4 --dist=worksteal "$@"
