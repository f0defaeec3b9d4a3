"""The test of any position method, of this project or of yours.

from alibi.testing import check_position_method

def test_my_method():
    check_position_method(MyMethod, decay=0.5)
"""

import time
from collections.abc import Callable
from typing import Any

from alibi.positions import PositionMethod, make_position
from alibi.testing.attention import (
    both_directions,
    check_blocks,
    check_bounds,
    check_few_tokens,
    check_finite,
    check_half_precision,
    check_tiles,
)
from alibi.testing.model import (
    SmallModel,
    check_cache,
    check_causality,
    check_layers,
    check_segments,
    check_shift,
)
from alibi.testing.samples import HEAD_DIM, HEADS, TRAIN_LENGTH, WIDTH, PositionMethodError

__all__ = [
    "PositionMethodError",
    "check_blocks",
    "check_bounds",
    "check_cache",
    "check_causality",
    "check_few_tokens",
    "check_finite",
    "check_half_precision",
    "check_layers",
    "check_position_method",
    "check_segments",
    "check_shift",
    "check_tiles",
]


def check_position_method(
    method: str | type[PositionMethod] | PositionMethod, **options: Any
) -> None:
    """Checks the contract of a position method and its own declarations, and prints each check that
    passes with its time: a minute or two in all.

    The bias is checked both under a causal mask and without one, unless the method raises
    ValueError for either.

    Checked are: a finite bias, which attention can take and cut anywhere; no influence of later
    tokens, nor of earlier segments through `keep`; the same result at shifted positions, if
    it is `shift_invariant`; a cache, with a prompt in pieces, padding and single tokens; tiles, on 4
    devices if there are so many, bfloat16, recomputed and scanned layers against the dense formula in float32, in value
    and in the gradient of every parameter and input; and, if the bias is `bounded`, its bound and
    the loss by skipping.

    CPUs have 4 devices after `jax.config.update("jax_num_cpu_devices", 4)` before the first use of
    JAX.

    Args:
      method: a class, its name in the registry or `package.module:Class`, or an instance with
        4 heads of 8 features and a training length of 16.
      options: of the method.

    Raises:
      PositionMethodError: names the broken property, with the smallest example.
      ValueError: from the method itself, see `alibi.positions.make_position`.
    """
    if not isinstance(method, PositionMethod):
        sizes: dict[str, Any] = {
            "num_heads": HEADS,
            "head_dim": HEAD_DIM,
            "width": WIDTH,
            "train_length": TRAIN_LENGTH,
        }
        method = make_position(method, **sizes, options=options)

    def passes(check: Callable[[Any], object], what: Any, note: str = "") -> None:
        started = time.perf_counter()
        check(what)
        seconds = time.perf_counter() - started
        print(f"{check.__name__}{note}: passed in {seconds:.1f} s", flush=True)

    for direction in both_directions(method):
        mask = " under a causal mask" if direction.causal else " without a mask"
        for check in (check_finite, check_blocks, check_tiles, check_bounds):
            passes(check, direction, mask)
    passes(check_half_precision, method)
    model = SmallModel(method)
    for check_model in (check_causality, check_shift, check_segments, check_cache, check_layers):
        passes(check_model, model)
