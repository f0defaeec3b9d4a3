#!/usr/bin/env bash
# Checks and measures this project on a machine with one GPU and no network, in 8 minutes at most.
#
#   bash tools/device_check.sh FOLDER [WHEELS]          # WHEELS: the folder of tools/pack_wheels.sh
#   bash tools/device_check.sh --only=train-124M FOLDER # the parts whose names match the pattern
#   bash tools/device_check.sh --dry FOLDER             # a trial at tiny sizes, on any machine
#
# FOLDER gets what each part printed, and the rows of training and attention. A part that fails or outlasts its time
# does not stop the others; the last lines say which, and which were left out as the 8 minutes were over.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h | --help) sed -n "2,9s/^# \{0,1\}//p" "$0"; exit 0 ;; esac
dry=""
only=""
while [[ "${1:-}" == --* ]]; do
  case "$1" in
    --dry) dry=yes ;;
    --only=*) only=${1#--only=} ;;
    *) echo "device_check: $1 is no option; use --dry or --only=PATTERN" >&2; exit 1 ;;
  esac
  shift
done
[[ $# -ge 1 ]] || { echo "device_check: name the folder for results: bash tools/device_check.sh FOLDER" >&2; exit 1; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=${PYTHON:-python3}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$root" || exit 1
if [[ $# -ge 2 ]]; then
  "$python" -m pip install --quiet --no-index --no-deps --target "$tmp/site" "$2"/*.whl || exit 1
  export PYTHONPATH="$tmp/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export TORCHINDUCTOR_COMPILE_THREADS=2  # contenders are prepared together
if [[ -z "$dry" ]] && ! "$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")'; then
  echo "device_check: JAX sees no GPU here; install jax[cuda13], or try --dry" >&2
  exit 1
fi

most=480 failed="" left_out=""
# Runs a part with a name, for at most so many seconds. If less than half of them is left, it is left out.
part() {
  local name=$1 wanted=$2 left=$((most - SECONDS))
  local seconds=$((wanted < left ? wanted : left))
  shift 2
  [[ "$name" =~ $only ]] || return 0
  ((seconds >= wanted / 2)) || { left_out="$left_out $name"; return 0; }
  echo "== $name: $*"
  timeout -k 5 "$seconds" "$@" 2>&1 | tee "$out/$name.txt" || failed="$failed $name"
}
benchmark() { part "$1" "$3" "$python" -m benchmarks "$2" "${@:4}" --json="$out/$1.json"; }

train="model.num_layers=8,model.width=512,model.num_heads=8,model.feed_forward=2048,model.dtype=bfloat16,length=2048"
tests=$'none\nalibi_learned or fox\nt5\nkerple_log\nbfloat16-80\nbfloat16-256\nfloat32-80\nfloat32-256'
if [[ -n "$dry" ]]; then
  tiny="model.num_layers=1,model.width=32,model.num_heads=4,model.feed_forward=64"
  export ALIBI_WARM_SECONDS=0.1
  part tests 100 env ALIBI_TEST_PLATFORM=cpu xargs -P 6 -d '\n' -I{} \
    "$python" -m pytest -q -p no:cacheprovider -k {} tests/attention/test_device.py <<< t5-64
  benchmark train-tiny train 100 --shapes=25M --dtype=bfloat16 --rounds=1 --preparing=2 --positions=fox \
    --peer=flax --config="$tiny,length=32,train.batch_tokens=64"  # PyTorch's compiler takes minutes on CPUs
  benchmark attention-64 attention 100 --lengths=64 --heads=2 --head_dim=16 --rounds=1 --skip_epsilon=0 --positions=t5 \
    --turn_seconds=0.1 --preparing=2 --backends=blocked
  part train 100 "$python" train.py --workdir="$tmp/run" --config="configs/quickstart.py:position=t5,$tiny,length=32,\
train.batch_tokens=64,train.steps=2,optimizer.warmup_steps=1,eval.every_steps=2,\
checkpoint.every_steps=2,data.max_valid_bytes=64"
else
  # The tests compile for minutes, so eight processes share them, and the GPU's memory.
  part tests 100 env ALIBI_TEST_PLATFORM=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false xargs -P 8 -d '\n' -I{} \
    "$python" -m pytest -q -p no:cacheprovider -k {} tests/attention/test_device.py <<< "$tests"
  # What was never measured comes first; what no time is left for was measured before.
  training=(--lengths=none --dtype=bfloat16 --rounds=3 --preparing=16 --positions=alibi,t5,rotary,fox
    --peer=torch_rotary,torch_flex,flax)
  for shape in 124M 25M; do
    for length in 2048 1024; do
      benchmark "train-$shape-$length" train 110 "${training[@]}" --shapes=$shape --config=length=$length
    done
  done
  # A length takes about 60 s on an H200, most of it to start and warm up 17 processes.
  common=(--dtype=bfloat16 --heads=16 --rounds=3 --turn_seconds=0.1 --preparing=16 --skip_epsilon=none,0
    --backends=fused --positions=none,alibi,t5,kerple_log,fox --peer=cudnn,augmented,flex)
  benchmark attention-64-65536 attention 80 "${common[@]}" --lengths=65536 --head_dim=64
  part train 80 "$python" train.py --workdir="$tmp/run" --config="configs/quickstart.py:position=t5,$train,\
train.batch_tokens=65536,train.steps=60,optimizer.warmup_steps=10,eval.every_steps=60,checkpoint.every_steps=60"
  for length in 4096 16384; do
    benchmark "attention-64-$length" attention 65 "${common[@]}" --lengths=$length --head_dim=64
  done
  benchmark attention-128-16384 attention 70 "${common[@]}" --lengths=16384 --head_dim=128
fi
[[ -z "$left_out" ]] || echo "device_check: no time was left for$left_out; run each by --only=NAME"
[[ -z "$failed" ]] || { echo "device_check: failed:$failed" >&2; exit 1; }
echo "device_check: all parts are done; see $out"
