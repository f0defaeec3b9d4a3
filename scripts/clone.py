"""Puts the clone on the path of imports: the scripts work without an installed project. A missing package
is a line.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from alibi.extras import EXTRAS, needs

try:
    needs(pathlib.Path(sys.argv[0]).name, *EXTRAS["train"])
except ImportError as error:
    sys.exit(f"error: {error}")
