"""Array annotations hold at run time: tests/conftest.py has them checked, and a wrong shape or
dtype is refused.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from alibi.attention import attend
from alibi.model.decoder import build_model
from alibi.model.loss import cross_entropy
from alibi.positions import AlibiBias
from alibi.slopes import alibi_slopes


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        # One head more in the values than in the keys: the shapes of two arguments contradict each
        # other.
        (
            lambda: attend(
                jnp.zeros((1, 5, 2, 4)), jnp.zeros((1, 5, 2, 4)), jnp.zeros((1, 5, 3, 4))
            ),
            "value",
        ),
        # An axis too many, which broadcasting alone would let through.
        (lambda: cross_entropy(jnp.zeros((2, 5, 7)), jnp.zeros((2, 5, 1), jnp.int32)), "targets"),
        (lambda: cross_entropy(jnp.zeros((2, 5, 7)), jnp.zeros((2, 4), jnp.int32)), "targets"),
        # Positions as floating-point numbers are not exact at long lengths.
        (lambda: AlibiBias(alibi_slopes(2))(jnp.arange(3.0), jnp.arange(3)), "query_positions"),
        (lambda: AlibiBias(jnp.ones((2, 1))), "slopes"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match=f"parameter '{argument}'"):
        call()


def test_the_models_own_arguments_are_checked(tiny_config) -> None:
    model = build_model(tiny_config(), 7)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'tokens'"):
        model.init(jax.random.key(0), jnp.zeros(5, jnp.int32))
