"""What any position method must hold: one call checks a method, of this project or of yours.

from alibi.testing import check_position_method

def test_my_method():
    check_position_method(MyMethod, decay=0.5)
"""

from typing import Any

from alibi.positions import PositionMethod, make_position
from alibi.testing.attention import check_blocks, check_bounds, check_half_precision, check_tiles
from alibi.testing.model import SmallModel, check_cache, check_causality, check_layers, check_shift
from alibi.testing.samples import HEAD_DIM, HEADS, TRAIN_LENGTH, WIDTH, PositionMethodError

__all__ = [
    "PositionMethodError",
    "check_blocks",
    "check_bounds",
    "check_cache",
    "check_causality",
    "check_half_precision",
    "check_layers",
    "check_position_method",
    "check_shift",
    "check_tiles",
]


def check_position_method(method: str | type[PositionMethod] | PositionMethod, **options: Any) -> None:
    """Checks what any position method must hold, by the properties that it declares; takes some seconds.

    These are: a bias that attention can take, and can cut anywhere; no influence of later
    tokens; the same result at shifted positions, if it is `shift_invariant`; a prompt in pieces,
    with and without padding before it, and single tokens through a cache as the whole sequence;
    tiles, 8 devices, bfloat16, recomputed and scanned layers as the dense formula in float32, in
    value and in the gradient of every parameter and input; and, if its bias is `bounded`, that no
    bias exceeds its bound and that skipping loses no more than it may.

    Only the check of 8 devices needs more than one: it is made where JAX has 8 or more, as CPUs have after
    `jax.config.update("jax_num_cpu_devices", 8)` before JAX is first used, and else is left out.

    Args:
      method: a class, its name in the registry or `package.module:Class`, or an instance with
        4 heads of 8 features and a training length of 16.
      options: of the method.

    Raises:
      PositionMethodError: which property broke, with the smallest example.
      ValueError: from the method itself, see `alibi.positions.make_position`.
    """
    made = _make(method, options)
    model = SmallModel(made)
    for check in (check_blocks, check_tiles, check_bounds, check_half_precision):
        check(made)
    for check_model in (check_causality, check_shift, check_cache, check_layers):
        check_model(model)


def _make(method: str | type[PositionMethod] | PositionMethod, options: dict[str, Any]) -> PositionMethod:
    if isinstance(method, PositionMethod):
        return method
    return make_position(
        method, num_heads=HEADS, head_dim=HEAD_DIM, width=WIDTH, train_length=TRAIN_LENGTH, options=options
    )
