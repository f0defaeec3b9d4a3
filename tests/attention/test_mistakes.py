"""Each mistake in the arguments of attention is a line that names the argument and the remedy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_attention_fn, alibi_slopes, attend
from alibi.positions import AlibiBias
from alibi.positions.fox import FoxBias
from tests.attention.calls import inputs
from tests.refusals import assert_refused

HEADS = 4
TWO = jnp.tile(jnp.arange(6), (3, 1))  # three rows for two sequences


def turned(**arguments):
    """Returns a call with heads in front of the length."""
    return lambda *x: attend(*(y.swapaxes(1, 2) for y in x), **arguments)


def closure(heads, **arguments):
    return lambda *x: alibi_attention_fn(heads, **arguments)(*x)


def by(**arguments):
    return functools.partial(attend, **arguments)


def split(*axes):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, P(*axes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (closure(8), "for 8 heads and the layer has 4"),
        (closure(4, slopes=[1.0]), r"shape \(1,\); the query's 4 heads need \(4,\)"),
        (closure(4, skip_epsilon="1e-6"), "skip_epsilon='1e-6' must be a number"),
        (closure(4, skip_epsilon=False), "skip_epsilon=False must be a number"),
        (
            closure(4, slopes=np.ones((3, 4), np.float32)),
            r"shape \(3, 4\); .* need \(4,\), or \(2, 4\) for each",
        ),
        (
            by(skip_epsilon=1.5, slopes=alibi_slopes(4)),
            r"skip_epsilon=1\.5 must be a number from 0",
        ),
        (by(slopes=-jnp.ones(4), skip_epsilon=1e-6), "below zero.*use skip_epsilon=0"),
        (by(slopes=jnp.ones(3)), r"4 heads need \(4,\)"),
        (by(slopes=jnp.ones(4), bias=AlibiBias(jnp.ones(4))), "both slopes and bias; give one"),
        (by(slopes="paper"), "'paper' is no array of numbers; give an array or a list"),
        *(
            (by(**{name: [[1, 2], [1]]}), r"rows of several lengths \(\[\[1, 2\], \[1\]\]\)")
            for name in ("slopes", "query_positions", "sink")
        ),
        (by(bias=AlibiBias(jnp.ones(3))), "the bias has 3 heads and the query 4"),
        # a tile beyond the bias would silently get the numbers of other keys
        *(
            (
                by(bias=FoxBias(jnp.zeros((2, queries, 4)), jnp.zeros((2, keys, 4)))),
                rf"FoxBias\.{field} is an array of shape .*, and the call has 6 {side} along axis 1",
            )
            for field, side, queries, keys in (
                ("of_queries", "queries", 5, 6),
                ("of_keys", "keys", 6, 5),
            )
        ),
        (
            by(bias=FoxBias(jnp.zeros((3, 6, 4)), jnp.zeros((3, 6, 4)))),
            r"FoxBias\.of_queries is an array of shape .*, and the call has 2 batch along axis 0",
        ),
        (by(key_positions=np.int32(5)), r"key_positions have shape \(\); key needs \[6\]"),
        (
            lambda q, k, v: attend(q, k[:, :4], v[:, :4], key_positions=np.arange(4)),
            "where 6 queries stand beside 4 keys; give query_positions too",
        ),
        (
            by(bias=np.zeros((4, 6, 6))),
            r"bias is an array of shape \(4, 6, 6\); it must be an alibi.positions.Bias",
        ),
        (by(bias="alibi"), "bias is str; it must be an alibi.positions.Bias"),
        (
            by(dropout_rate=1.5, dropout_rng=jax.random.key(0)),
            r"dropout_rate=1\.5 must be at least 0 and below 1",
        ),
        # rounded to int32, they would be one document
        (by(segment_ids=jnp.full(6, 0.2)), "segment_ids have dtype float32; they must be integers"),
        (by(mask=jnp.ones((3, 6), bool)), r"for \[batch, k\] give mask\[:, None, None\]$"),
        (by(mask=jnp.ones((2, 6, 6), bool)), r"for \[batch, q, k\] give mask\[:, None\]$"),
        (lambda q, k, v: attend(q[0, 0], k[0, 0], v[0, 0]), "of one rank; got query .4, 8."),
        (
            turned(slopes=jnp.ones(4)),
            r"the query's 6 heads need .*key and value are \[\*batch, length, heads, head_dim\]: give x.swap",
        ),
        (turned(bias=AlibiBias(jnp.ones(4))), r"the query 6; .* give x.swapaxes\(-3, -2\) of each"),
        (turned(key_positions=jnp.arange(6)), r"key needs \[4\] .* give x.swapaxes\(-3, -2\)"),
        (by(backend="fast"), "unknown attention backend 'fast'; use auto, reference"),
        (by(backend="single"), "it is for one query of each sequence, and got 6"),
        (by(backend="saved", mask=jnp.ones((1, 1, 6, 6), bool)), "it has no masks"),
        (by(backend="saved", logit_cap=3.0), "it caps no logits; use backend='auto'"),
        (by(backend="augmented", sink=jnp.ones(4)), "its softmax has no sink"),
        (by(logit_cap=0.0), "logit_cap=0.0 must be above 0 and finite"),
        (by(sink=jnp.ones(2)), r"sink has shape \(2,\); it must be \(4,\)"),
        *(
            (by(window=window), "window=.* must be a whole number of positions")
            for window in (0, 2.5, True, float("nan"), 2**31)
        ),
        (lambda q, k, v: attend(q[0], k, v), "all of one rank"),
        (lambda q, k, v: attend(q, k, v[:, :2]), "lengths of key and value"),
        (lambda *x: attend(*(y.astype(int) for y in x)), r"dtypes int32, .*astype.jnp.float32"),
        (by(query_positions=jnp.arange(3)), r"\(3,\); query needs \[6\]"),
        (
            by(query_positions=TWO),
            r"query_positions have shape \(3, 6\); query needs \[6\] or \[2, 6\]",
        ),
        (by(segment_ids=TWO), r"segment_ids have shape \(3, 6\); key needs \[6\] or \[2, 6\]"),
        (by(segment_ids=(jnp.ones((2, 6), int), None)), "given for one side alone"),
        *(
            (by(mask=jnp.ones(shape, bool)), r"mask has shape .*broadcast to .*\(2, 4, 6, 6\)")
            for shape in ((2, 2, 6, 6), (2, 1, 6, 5), (3, 1, 6, 6))
        ),
        (by(mask=jnp.full((1, 1, 6, 6), -1.5)), r"mask holds -1\.5.* -1000 or less .* as bias="),
        (
            by(mask=jnp.asarray([1.0] * 5 + [-1e9])[None, None, None]),
            r"mask holds (-1e\+09|-1000000000).* as bias=",
        ),
        (by(mask=jnp.full((1, 1, 6, 6), 2.5)), r"mask holds 2\.5.* as bias="),
        (
            lambda *x: attend(*x, sharding=split("data", "tensor")),
            r"it may split batch and heads alone: P\('data', None, None\)",
        ),
        (
            lambda *x: attend(*x, sharding=x[0].sharding),
            "sharding is SingleDeviceSharding.*it must be a jax.sharding.NamedSharding",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_mistake_is_a_line(call, message):
    assert_refused(message, lambda: call(*map(jnp.asarray, inputs(2, 6, 6, HEADS, 8)[:3])))
