"""Keeps pages true, finds faults and checks devices: python -m tools.NAME, or bash tools/NAME.sh."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
