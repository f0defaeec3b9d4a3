#!/usr/bin/env bash
# Trains and scores configs/sweeps/gpu_study.py on one GPU, three runs at a time.
#
#   bash scripts/gpu_study.sh FOLDER [SECONDS]   # stops after so many seconds; defaults to never
#   bash scripts/gpu_study.sh --dry FOLDER       # a trial at tiny sizes, on any machine
#
# FOLDER gets the rows, the NLL of each token and what was printed, as at most eight files of at most 16 MB. The same
# command goes on with the runs that have no rows yet, on another machine with that FOLDER, too. It needs
# data/long-books (scripts/join_books.py), or its texts as .xz, and jax[cuda13]. PYTHON is the interpreter. Nine runs
# take about 12 minutes on an H200, estimated from single runs: `bash scripts/gpu_study.sh FOLDER 540` and once more.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in -h | --help) sed -n "2,11s/^# \{0,1\}//p" "$0"; exit 0 ;; esac
sweep=gpu_study jobs=$(($(nproc) < 3 ? $(nproc) : 3))
[[ "${1:-}" != --dry ]] || { sweep=gpu_study_dry jobs=1; export JAX_PLATFORMS=cpu; shift; }
[[ $# -ge 1 ]] || { echo "gpu_study: name the folder for results: bash scripts/gpu_study.sh FOLDER" >&2; exit 1; }
for tool in timeout sha256sum tar split nproc; do
  command -v "$tool" >/dev/null || { echo "gpu_study: $tool is missing; install GNU coreutils and tar" >&2; exit 1; }
done
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
python=${PYTHON:-python3}
cd "$root" || exit 1
if [[ $sweep == gpu_study ]]; then
  if ! "$python" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")'; then
    echo "gpu_study: JAX sees no GPU here; install jax[cuda13], or try --dry" >&2
    exit 1
  fi
  for text in train valid test unseen; do
    [[ -e data/long-books/$text.txt ]] || xz -dk "data/long-books/$text.txt.xz" ||
      { echo "gpu_study: make data/long-books/$text.txt by scripts/join_books.py first" >&2; exit 1; }
  done
fi
# The work directory is named by FOLDER, since checkpoints stay out of it.
work=workdirs/$sweep-$(printf %s "$out" | sha256sum | head -c 8)
mkdir -p "$work"
if [[ -e $out/study.tar.gz.00 ]]; then  # another machine may have added rows: those of here stay
  cat "$out"/study.tar.gz.* | tar -xz --skip-old-files -C "$work" || exit 1
fi
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # the runs share the GPU's memory
timeout -s TERM -k 30 "${2:-0}" "$python" scripts/sweep.py --sweep="configs/sweeps/$sweep.py" --workdir="$work" \
  --jobs="$jobs" --noreport 2>&1 | tee "$work/log.txt"
code=$?
rm -f "$out"/new.tar.gz.*
(cd "$work" && tar -cz --exclude=runs --exclude=tasks ./*) | split -d -b 16000000 - "$out/new.tar.gz." ||
  { echo "gpu_study: no new files in $out, is the disk full? The old ones stay, and $work has all rows" >&2; exit 1; }
rm -f "$out"/study.tar.gz.*
for file in "$out"/new.tar.gz.*; do mv "$file" "$out/study.tar.gz.${file##*.}"; done
files=$(find "$out" -name 'study.tar.gz.*' | wc -l)
[[ $files -le 8 ]] || { echo "gpu_study: $files files of 16 MB, more than eight" >&2; exit 1; }
echo "gpu_study: $files files in $out; unpack them by cat $out/study.tar.gz.* | tar -xz"
exit $code
