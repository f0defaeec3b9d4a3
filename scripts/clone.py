"""Puts the clone on the path of imports: the scripts work without an installed project."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
