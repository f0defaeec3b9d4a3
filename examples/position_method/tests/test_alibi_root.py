import jax
import numpy as np

import alibi
from alibi.testing import check_position_method


def test_the_formula():
    method = alibi.make_position("root", num_heads=2, head_dim=4, width=8, train_length=16)
    bias = method.bias(alibi.position_params(method, jax.random.key(0)))
    positions = np.arange(5)
    block = bias(positions[-1:], positions)  # of the last query
    np.testing.assert_allclose(block, [[-np.sqrt([4.0, 3.0, 2.0, 1.0, 0.0])]] * 2, rtol=1e-6)


def test_the_contract():  # a minute or two
    check_position_method("root")
