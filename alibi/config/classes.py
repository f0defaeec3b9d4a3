"""Classes by name: package.module:Class, from this library or from anywhere."""

import importlib
import traceback
from typing import Any


def load_class(key: str, address: str) -> Any:
    """Returns the class at `address`, package.module:Class.

    Args:
      key: names it in an error, such as "position=mine:Bias".

    Raises:
      ValueError: there is no such module or attribute, or the module fails or ends the process.
    """
    module, _, attribute = address.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: {error}; write package.module:Class of a module that Python finds from here "
            "(PYTHONPATH names further directories)"
        ) from error
    except (Exception, SystemExit) as error:  # what the module's own lines raise
        *_, last = traceback.extract_tb(error.__traceback__)
        at = "" if isinstance(error, SyntaxError) else f" ({last.filename}:{last.lineno})"
        raise ValueError(
            f"{key}: the import of {module} fails{at}: {type(error).__name__}: {error}; mend the module, "
            "or name another one"
        ) from error
