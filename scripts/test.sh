#!/usr/bin/env bash
# Sets up, then runs all tests, several at a time; arguments go to pytest: bash scripts/test.sh [-k NAME ...]
# With --changed first: the quick tests that a change since main may break (tests/changed.py).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --test
chosen=(-m "")
if [[ "${1:-}" == --changed ]]; then
  shift
  tests=$(.venv/bin/python -m tests.changed)
  [[ -n "$tests" ]] || { echo "no test imports what changed"; exit 0; }
  chosen=($tests)  # the bash of macOS has no mapfile
fi
# One process more than cores, since some tests wait for commands that they start; each takes up to 3 GB.
cores=$(getconf _NPROCESSORS_ONLN)
workers=$((cores < 4 ? cores + 1 : 4))
exec .venv/bin/python -m pytest -n "$workers" --dist=worksteal "${chosen[@]}" "$@"
