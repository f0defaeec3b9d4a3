"""The test for any position method, ours or yours.

from alibi.testing import check_position_method

def test_my_method():
    check_position_method(MyMethod, decay=0.5)
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from alibi.positions import PositionMethod, make_position
from alibi.positions.contract import check_contract
from alibi.testing.attention import (
    both_directions,
    check_blocks,
    check_bounds,
    check_few_tokens,
    check_finite,
    check_half_precision,
    check_level,
    check_tiles,
)
from alibi.testing.model import (
    WINDOW,
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
    "check_level",
    "check_position_method",
    "check_segments",
    "check_shift",
    "check_tiles",
]


def check_position_method(
    method: str | type[PositionMethod] | PositionMethod,
    model_keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Checks a position method against the contract and its own declarations, in a minute or less, and
    prints each check that passes.

    The bias is checked under a causal mask and without one, unless the method refuses either with a
    ValueError. The checks are:

    - the bias is finite, and equal wherever attention cuts it. Weights sum to at most 1.
    - a token depends on no later token, and through `keep` or a row on no earlier segment.
    - a `shift_invariant` method gives the same result at shifted positions.
    - a cache, with a prompt in pieces, padding and single tokens, gives the same features.
    - tiles (on 4 devices, if there are 4), recomputed layers and scanned layers agree with the dense
      formula in value and gradients, and bfloat16 in value.
    - a `bounded` bias keeps its bounds, at several values of its parameters.

    Position parameters are moved at random off their initial values. The model has a layer with a
    window and one without, and heads that share keys if the method allows it.

    Call `jax.config.update("jax_num_cpu_devices", 4)` before the first use of JAX for 4 devices on
    CPUs.

    Args:
      method: a class, a name in the registry, `package.module:Class`, or an instance with 4 heads of
        8 features and a training length of 16.
      model_keys: values for keys of `config.model`, such as {"qk_norm": True}.
      options: values for the method's options.

    Raises:
      PositionMethodError: names the broken property, with the smallest example.
      ValueError: from the method itself, see `alibi.positions.make_position`.

    Example:
      >>> check_position_method("none")  # doctest: +ELLIPSIS
      check_finite under a causal mask: passed in ... s
      ...
      check_layers: passed in ... s
    """
    if not isinstance(method, PositionMethod):
        method = make_position(
            method,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            width=WIDTH,
            train_length=TRAIN_LENGTH,
            options=options,
        )
    kv_heads = HEADS // 2 if method.takes_shared_keys else HEADS
    check_contract(type(method).__name__, method, kv_heads)

    def passes(check: Callable[[Any], object], checked: Any, note: str = "") -> None:
        started = time.perf_counter()
        check(checked)
        seconds = time.perf_counter() - started
        print(f"{check.__name__}{note}: passed in {seconds:.1f} s", flush=True)

    for direction in both_directions(method):
        mask = " under a causal mask" if direction.causal else " without a mask"
        for check in (check_finite, check_blocks, check_tiles, check_bounds, check_level):
            passes(check, direction, mask)
    passes(check_half_precision, method)
    keys: dict[str, Any] = {"num_kv_heads": kv_heads, **(model_keys or {})}
    if not keys.keys() & {"window", "logit_scale", "max_position"}:
        keys["window"] = (0, WINDOW)  # in the second layer
    model = SmallModel(method, **keys)
    for check_model in (check_causality, check_shift, check_segments, check_cache, check_layers):
        passes(check_model, model)
