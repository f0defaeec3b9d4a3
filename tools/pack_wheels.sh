#!/usr/bin/env bash
# Downloads the wheels of requirements-device.txt into FOLDER, 60 MB or less, to carry to a machine without a network.
#
#   bash tools/pack_wheels.sh FOLDER [PYTHON_VERSION]   # 3.12 by default
set -euo pipefail
case "${1:-}" in -h | --help) sed -n "2,4s/^# \{0,1\}//p" "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -ge 1 ]] || { echo "pack_wheels: name the folder: bash tools/pack_wheels.sh FOLDER" >&2; exit 1; }
platforms=()
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "${2:-3.12}" \
  "${platforms[@]}" --dest "$1" --requirement "$root/requirements-device.txt"
size=$(du -sm "$1" | cut -f1)
echo "pack_wheels: $(ls "$1" | wc -l) wheels, $size MB, in $1"
[[ "$size" -le 60 ]] || { echo "pack_wheels: more than 60 MB; carry less" >&2; exit 1; }
