#!/usr/bin/env bash
# Trains four small models on short sequences, tests them on long ones, prints the table: bash scripts/quickstart.sh [WORKDIR]
set -euo pipefail

case "${1:-}" in
  -h | --help) echo "usage: bash scripts/quickstart.sh [WORKDIR]"; exit 0 ;;
  -*) echo "unknown option '$1'; usage: bash scripts/quickstart.sh [WORKDIR]" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
# exec: a Ctrl-C or a kill reaches the sweep, which saves its state.
exec "$root/.venv/bin/python" "$root/scripts/sweep.py" \
  --sweep="$root/configs/sweeps/quickstart.py" --workdir="${1:-$root/workdirs/quickstart}" --jobs=0
