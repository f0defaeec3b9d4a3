"""The CPU's products and norms against JAX's and Flax's, in value and gradient."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alibi.config import make_config
from alibi.model.decoder import build_model
from alibi.numerics.products import FlatProduct, Products
from alibi.numerics.sums import dot_rows
from alibi.optimizers import make_optimizer
from alibi.parallel.sharding import make_mesh
from alibi.training.step import abstract_state, make_train_step
from tests.programs import AS_USERS

# lhs, rhs, dimension numbers: the products of dense layers and of attention's projections ...
DENSE = [
    ((6, 4), (4, 8), (((1,), (0,)), ((), ()))),
    ((2, 3, 8), (8, 4), (((2,), (0,)), ((), ()))),
    ((2, 3, 4), (4, 2, 5), (((2,), (0,)), ((), ()))),
    ((2, 3, 2, 5), (2, 5, 4), (((2, 3), (0, 1)), ((), ()))),
    ((4,), (4, 8), (((0,), (0,)), ((), ()))),
    ((2, 3, 8), (4, 8), (((2,), (1,)), ((), ()))),  # embeddings: more inputs than outputs, fewer
    ((2, 3, 4), (8, 4), (((2,), (1,)), ((), ()))),
]
# ... and others: a batch dimension, contractions elsewhere, nothing contracted, an empty batch.
OTHERS = [
    ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    ((4, 3), (4, 5), (((0,), (0,)), ((), ()))),
    ((3, 2, 4), (4, 2, 5), (((1, 2), (1, 0)), ((), ()))),
    ((3,), (4,), (((), ()), ((), ()))),
    ((0, 4), (4, 8), (((1,), (0,)), ((), ()))),
]


def _operands(lhs_shape, rhs_shape, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in (lhs_shape, rhs_shape))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, incoming, *operands):
    out, back = jax.vjp(function, *operands)
    return out, *back(incoming)


@pytest.mark.parametrize(("lhs_shape", "rhs_shape", "dimensions"), DENSE + OTHERS)
def test_value_and_gradients_are_those_of_lax(lhs_shape, rhs_shape, dimensions):
    operands = _operands(lhs_shape, rhs_shape)
    products = [
        functools.partial(product, dimension_numbers=dimensions)
        for product in (lax.dot_general, FlatProduct(jnp.float32))
    ]
    shape = jax.eval_shape(products[0], *operands).shape
    incoming = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    expected, actual = (value_and_gradients(product, incoming, *operands) for product in products)
    for got, needed in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, needed, atol=1e-5)


@pytest.mark.parametrize("element_type", [None, jnp.bfloat16])
def test_bfloat16_rounds_the_operands_alone(element_type):
    """Those of the gradients too. Sums and gradients are float32."""
    (x, kernel), incoming = _operands((2, 3, 8), (8, 4)), _operands((2, 3, 4), ())[0]
    incoming = incoming.astype(element_type or jnp.float32)

    product = functools.partial(
        FlatProduct(jnp.bfloat16),
        dimension_numbers=(((2,), (0,)), ((), ())),
        preferred_element_type=element_type,
    )
    rows, weights, rounded = (
        np.asarray(array.astype(jnp.bfloat16), np.float64) for array in (x, kernel, incoming)
    )
    exact = (
        rows @ weights,
        rounded @ weights.T,
        rows.reshape(6, 8).T @ rounded.reshape(6, 4),
    )
    actual = value_and_gradients(product, incoming, x, kernel)
    assert [a.dtype for a in actual] == [incoming.dtype, jnp.float32, jnp.float32]
    for got, right in zip(actual, exact, strict=True):
        share = 2**-8 if got.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(got, np.float64), right, rtol=share, atol=1e-5)


def test_second_derivatives_in_reverse_mode():
    dimensions = (((2,), (0,)), ((), ()))
    x, kernel = _operands((2, 3, 4), (4, 2))

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=1)
    def of_penalty(product, kernel):
        return (jax.grad(lambda x: (product(x, kernel, dimensions) ** 3).sum())(x) ** 2).sum()

    expected = of_penalty(lax.dot_general, kernel)
    np.testing.assert_allclose(of_penalty(FlatProduct(jnp.float32), kernel), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        "position=t5,model.num_kv_heads=1,model.scan_layers=True,model.remat=True,model.qk_norm=True,"
        "model.attention_gate=True",
        "model.attention=blocked,model.normalizer=sink,model.embedding=adaptive,model.cutoffs=(100,),model.adaptive_factor=2",
    ],
)
def test_products_of_a_step_in_bfloat16_take_bfloat16(words):
    """Else XLA's CPU backend converts the operands, and computes without instructions for
    bfloat16. (`reference` and the products of some position methods are float32.)
    """
    keys = "model.num_layers=1,model.width=32,model.num_heads=2,model.feed_forward=64,length=64"
    config = make_config(f"{keys},train.batch_tokens=128,model.dtype=bfloat16,{words}".rstrip(","))
    model = build_model(config, 256)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    state = abstract_state(model, optimizer, make_mesh(config.mesh, jax.devices()[:1]))
    batch = jax.ShapeDtypeStruct((1, 2, 64), jnp.int32)
    lowered = make_train_step(model, optimizer, seed=0).lower(state, batch, batch)
    program = lowered.compile(compiler_options=AS_USERS).as_text()
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", program))
    operands = re.findall(r" dot\(%([\w.\-]+), %([\w.\-]+)\)", program)
    assert (
        len(operands) >= 27
    )  # three of each of six dense layers, six of attention, three of the logits
    assert {dtypes[name] for pair in operands for name in pair} == {"bf16"}


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """Summed in bfloat16, it would be off by up to 2 here, of 49."""
    products = Products.of("auto", jnp.bfloat16)
    layer = nn.Dense(4, dtype=products.layer_dtype, dot_general=products.dot_general)
    x, incoming = jnp.ones((2, 2048, 8)), jax.random.normal(jax.random.key(1), (2, 2048, 4))
    params = layer.init(jax.random.key(0), x)
    gradients = jax.jit(jax.grad(lambda params: jnp.vdot(layer.apply(params, x), incoming)))(params)
    expected = np.asarray(incoming, np.float64).sum(axis=(0, 1))
    np.testing.assert_allclose(gradients["params"]["bias"], expected, atol=1e-3)


def test_only_the_cpu_gets_it(monkeypatch):
    half, full = jnp.bfloat16, jnp.float32
    assert Products.of("auto", full) == Products(False, FlatProduct(full), full, True)
    assert Products.of("auto", half) == Products(False, FlatProduct(half), full, True)
    assert Products.of("plain", half) == Products(True, lax.dot_general, half, False)
    for platform in ("gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert Products.of("auto", half) == Products(False, lax.dot_general, half, False)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (2, 0, 8)])
def test_layer_norm_by_rows_is_that_of_flax(shape):
    rng = np.random.default_rng(0)
    x, incoming = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    norm = nn.LayerNorm(1e-5)
    params = jax.tree.map(lambda p: p + jnp.arange(8.0), norm.init(jax.random.key(0), x))

    def rowwise(params, x):
        return Products.of("auto", jnp.float32).norm(functools.partial(norm.apply, params), x)

    expected, actual = (
        value_and_gradients(apply, incoming, params, x) for apply in (norm.apply, rowwise)
    )
    jax.tree.map(
        lambda got, right: np.testing.assert_allclose(got, right, atol=2e-5), actual, expected
    )


def test_dots_of_rows_are_float32():
    """In bfloat16 a sum of 64 products would be off by some hundredths."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((1, 5, 2, 64)), jnp.bfloat16) for _ in range(2))
    expected = (np.asarray(a, np.float64) * np.asarray(b, np.float64)).sum(axis=-1)
    np.testing.assert_allclose(jax.jit(dot_rows)(a, b), expected, atol=1e-5)
