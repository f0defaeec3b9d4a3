"""Products, sums and kernels that every room uses. Each knows what is fast on which platform."""

import logging
import operator

import jax

TESTED = (0, 10), (0, 13)  # versions of JAX, from the first to before the second
NEEDED = ("make_mesh", "shard_map", "typeof", "sharding.AxisType", "sharding.auto_axes")


def check_jax() -> None:
    """Logs a line if JAX is older or newer than the tested versions.

    Raises:
      ImportError: it lacks a function or class that the library needs.
    """
    first, after = (".".join(map(str, version)) for version in TESTED)
    line = (
        f"jax {jax.__version__} was not tested with this library, and jax from {first} to before {after} was; "
        f'if something fails: pip install "jax>={first},<{after}"'
    )
    for name in NEEDED:
        try:
            operator.attrgetter(name)(jax)
        except AttributeError:
            raise ImportError(f"jax.{name} is missing: {line}") from None
    if not TESTED[0] <= jax.__version_info__ < TESTED[1]:
        logging.getLogger(__name__).warning(line)


check_jax()
