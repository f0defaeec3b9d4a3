#!/usr/bin/env bash
# Makes .venv from the pinned requirements; takes under a second if .venv is up to date.
#
#   bash scripts/setup.sh [--test] [--extra=gpu|gpu12|tpu|gcs|s3|torch|harness ...]
#
# --test adds the tools for tests and checks. --extra=torch reads checkpoints of PyTorch (.pt, .bin),
# --extra=harness is for python -m alibi.cli.harness.
# ALIBI_EXTRA="tpu gcs" names extras too. PYTHON=/path/to/python names the interpreter for .venv, also one after 3.14.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
log="$venv/setup.log"
lock="$root/.setup-lock"
requirements=requirements.txt
extra=${ALIBI_EXTRA:-}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

for argument in "$@"; do
  case "$argument" in
    -h | --help) sed -n "2,7s/^# \{0,1\}//p" "$0"; exit 0 ;;
    --test) requirements=requirements-test.txt ;;
    --extra=*) extra="$extra ${argument#--extra=}" ;;
    *) fail "unknown argument '$argument'; known are --test and --extra=gpu|gpu12|tpu|gcs|s3|torch|harness" ;;
  esac
done
set -f
for one in $extra; do
  case "$one" in
    gpu | gpu12 | tpu | gcs | s3 | torch | harness) ;;
    *) fail "unknown extra '$one'; known are gpu, gpu12, tpu, gcs, s3, torch and harness" ;;
  esac
done
set +f

# Prints the version of the interpreter $1; succeeds if it is Python 3.11 to 3.$2.
python_version() {
  local code='import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(not 11 <= sys.version_info[1] <= int(sys.argv[1]))'
  "$1" -c "$code" "$2" 2>/dev/null
}

find_python() {
  local candidate newest version found=""
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
    command -v "$candidate" >/dev/null || continue
    newest=14  # requirements.txt pins nothing for later ones
    [[ "$candidate" != "${PYTHON:-}" ]] || newest=99
    if version=$(python_version "$candidate" "$newest"); then
      # Debian ships Python without ensurepip, which an environment with pip needs.
      if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        command -v "$candidate"
        return
      fi
      version="$version without venv"
    fi
    found="$found${found:+, }$candidate (${version:-does not start})"
  done
  fail "Python 3.11 to 3.14 is needed, with its venv module; found ${found:-no python at all}." \
    "Install it (Debian, Ubuntu: apt install python3.11-venv; macOS: brew install python@3.11)," \
    "or name one, which may also be newer, untested: PYTHON=/path/to/python bash scripts/setup.sh"
}

make_venv() {
  if [[ -d "$venv" ]]; then
    local version
    if version=$(python_version "$venv/bin/python" 99); then return; fi
    [[ -z "$version" ]] || fail "$venv holds Python $version, 3.11 or newer is needed; remove it and start again"
    say ".venv is not whole; making it again"
  fi
  local python
  python=$(find_python)
  say "making .venv with $python"
  "$python" -m venv --clear "$venv" || fail "could not make $venv; is the disk full, or the folder not writable?"
}

# Prints a line that identifies the requirements and the Python version, without extras.
fingerprint() {
  local version files=(requirements.txt)
  version=$(sed -n 's/^version *= *//p' "$venv/pyvenv.cfg")
  [[ "$requirements" == requirements.txt ]] || files+=("$requirements")
  printf '%s %s %s\n' "$requirements" "$(cd "$root" && cat "${files[@]}" | cksum)" "$version"
}

# Prints the installed extras that the stamp $1 names, each between spaces; fails if it names other requirements.
extras_of() {
  local held wanted
  [[ -f "$1" ]] || return 1
  held="$(cat "$1") " wanted="$(requirements=${1##*/.installed-} fingerprint) "
  [[ "$held" == "$wanted"* ]] || return 1
  printf ' %s ' "${held#"$wanted"}"
}

# The requirements of the tests include those of the runtime: after test.sh, quickstart.sh installs nothing.
is_installed() {
  local stamp held one
  for stamp in "$venv/.installed-$requirements" "$venv/.installed-requirements-test.txt"; do
    held=$(extras_of "$stamp") || continue
    for one in $extra; do
      [[ "$held" == *" $one "* ]] || continue 2
    done
    return 0
  done
  return 1
}

# Reads pip's output; shows errors and one line that counts the packages.
show_progress() {
  local line count=0
  while IFS= read -r line; do
    case "$line" in
      "Collecting "* | "Processing "*)
        count=$((count + 1))
        [[ ! -t 1 ]] || printf '\rsetup: %d packages fetched' "$count" ;;
      "Installing collected"*)
        [[ ! -t 1 ]] || printf '\n'
        say "installing $count packages" ;;
      ERROR* | *"No matching distribution"*) printf '%s\n' "$line" ;;
    esac
  done
}

# Runs pip install with $@ and writes its output to the log.
pip_install() {
  # --no-compile halves the time; compile_imports compiles the modules that are used.
  "$venv/bin/python" -m pip install --no-compile --disable-pip-version-check "$@" 2>&1 | tee -a "$log" | show_progress
}

# Compiles the modules that the project imports. Where Python can't write to .venv later, as in many containers,
# each process would otherwise compile JAX again, for 5 s.
compile_imports() {
  local modules="alibi.training.loop, alibi.evaluation.evaluate, alibi.sweeps.execute, alibi.reporting.report"
  [[ "$requirements" == requirements.txt ]] || modules="$modules, hypothesis, pytest"
  say "compiling the modules"
  (cd "$root" && env -u PYTHONDONTWRITEBYTECODE JAX_PLATFORMS=cpu "$venv/bin/python" -c "import $modules") \
    >>"$log" 2>&1 || say "some modules failed; $log says why"
}

# Removes the lock of the killed process $1, unless another set-up removed and took it meanwhile.
remove_dead_lock() {
  if mkdir "$lock.removal" 2>/dev/null; then
    [[ "$(cat "$lock/pid" 2>/dev/null)" != "$1" ]] || rm -rf "$lock"
    rm -rf "$lock.removal"
  else
    sleep 0.2
  fi
}

# One set-up at a time: a second one waits for the first.
take_lock() {
  local owner told=""
  until mkdir "$lock" 2>/dev/null; do
    [[ -w "$root" ]] || fail "$root can't be written; .venv is made there"
    owner=$(cat "$lock/pid" 2>/dev/null) || owner=""
    if [[ -n "$owner" ]] && ! kill -0 "$owner" 2>/dev/null; then
      remove_dead_lock "$owner"
      continue
    fi
    [[ -n "$told" ]] || say "waiting for another set-up of this folder${owner:+ (process $owner)}; if there is none, remove $lock"
    told=1
    sleep 0.2
  done
  printf '%s\n' "$$" >"$lock/pid"
  trap 'rm -rf "$lock"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
}

take_lock
make_venv
if ! is_installed; then
  for stamp in "$venv"/.installed-*; do
    extra="$extra $(extras_of "$stamp" || true)"  # installed extras stay
  done
  rm -f "$venv"/.installed-*
  : >"$log"
  say "installing $requirements (about 400 MB to download, a few minutes; details in $log)"
  start=$SECONDS
  ok=1
  pip_install -r "$root/$requirements" || ok=0
  for one in $extra; do
    case "$one" in gpu) package="jax[cuda13]" ;; gpu12) package="jax[cuda12]" ;; tpu) package="jax[tpu]" ;; gcs) package=gcsfs ;; s3) package=s3fs ;; torch) package=torch==2.13.0 ;; harness) package=lm-eval==0.4.13 ;; esac
    [[ $ok == 0 ]] || pip_install -c "$root/requirements.txt" "$package" || ok=0
  done
  if [[ $ok == 0 ]]; then
    fail "the installation failed; the last lines of $log:" "$(tail -n 3 "$log")" \
      "A connection to a Python package index is needed once (PIP_INDEX_URL names a mirror), and 2 GB of disk." \
      "Start again then: pip keeps the downloaded packages."
  fi
  compile_imports
  printf '%s %s\n' "$(fingerprint)" "$(echo $extra)" >"$venv/.installed-$requirements"
  say "installed in $((SECONDS - start)) s"
fi

# Makes the packages alibi and configs importable from anywhere, without a build.
site=$(echo "$venv"/lib/python3.*/site-packages)
[[ -f "$site/alibi-jax.pth" && "$(cat "$site/alibi-jax.pth")" == "$root" ]] || printf '%s\n' "$root" >"$site/alibi-jax.pth"
