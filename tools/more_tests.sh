#!/usr/bin/env bash
# Runs the tests that .ci/run skips, since what they need is large: compilers for GPUs and TPUs, lm-eval, the
# metric services, scikit-learn for a notebook, a Slurm of two nodes.
#
#   bash tools/more_tests.sh                # all of harness, tpu, gpu, notebooks, services
#   bash tools/more_tests.sh tpu harness    # some
#   bash tools/more_tests.sh slurm          # as root, with the packages at the head of tools/cluster_test.sh
#
# They are installed into .venv/more, over the packages of .venv (tpu 0.7 GB, gpu 3 GB); .venv stays as it is.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n "2,9s/^# \{0,1\}//p" "$0"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --test --extra=torch
more=.venv/more
if [[ ! -e $more/bin/python ]]; then
  .venv/bin/python -m venv "$more"
  # The packages of .venv come after its own.
  (cd .venv/lib/python3.*/site-packages && pwd) > "$(echo $more/lib/python3.*/site-packages)/base.pth"
fi
failed=""
for part in ${@:-harness tpu gpu notebooks services}; do
  install=() tests=()
  case "$part" in
    harness) install=(lm-eval==0.4.13) tests=(tests/evaluation/test_harness.py) ;;
    tpu) install=("jax[tpu]") tests=(tests/attention/test_fused.py -k compiles_for_tpus) ;;
    gpu) install=("jax[cuda13]")
      tests=(tests/attention/test_fused.py tests/test_training_peers.py -k "compiles_for_gpus or flex") ;;
    notebooks) install=(scikit-learn) tests=(tests/test_notebooks.py -k grids) ;;
    services) install=(wandb trackio) tests=(tests/training/test_metric_writers.py) ;;
    slurm) tests=(tests/test_slurm.py) ;;
    *) echo "more_tests: no part $part; there are harness, tpu, gpu, notebooks, services and slurm" >&2; exit 1 ;;
  esac
  [[ ${#install[@]} == 0 ]] || "$more/bin/python" -m pip install --quiet -c requirements.txt "${install[@]}"
  echo "== $part"
  "$more/bin/python" -m pytest -m "" "${tests[@]}" || failed="$failed $part"
done
[[ -z "$failed" ]] || { echo "more_tests: failed:$failed" >&2; exit 1; }
