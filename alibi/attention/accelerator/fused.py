"""Flash attention with its bias inside the kernel, for GPUs and TPUs.

The algorithm is `alibi.attention.blocked`, in one kernel for the forward pass and two for the backward
pass (Dao 2023, arXiv 2307.08691). On GPUs a third one makes the diagonals' gradient. The kernels know
three kinds of bias, for query i at position p_i and key j at p_j:

    slopes      -m (p_i - p_j), or -m |p_i - p_j|, or -m times another distance
    diagonals   a number for each i - j
    terms       a number for the query plus a number for the key

They make its values in each tile, and sum its gradients in a fixed order. No array [q, k] exists.
Hidden tiles, and tiles that the bias makes too light (`alibi.attention.skipping`), are not in a
kernel's list (a range on GPUs), and cost nothing.
"""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float

from alibi.attention.accelerator.augmented import compute_capability, padded
from alibi.attention.accelerator.plan import (
    LANES,
    MOST_TILES,
    Backward,
    KernelPlan,
    Operands,
    make_plan,
)
from alibi.attention.call import ATTENDED, AttentionCall
from alibi.attention.skipping import tiles_needed
from alibi.attention.tiles import make_sides
from alibi.numerics.sums import dot_rows
from alibi.positions.bias import MASKED

WIDEST = 256  # features of a head that fit into a kernel's memory


def fused_attention(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes attention in one kernel, with memory linear in the length.

    It is differentiable once, in reverse mode, in queries, keys, values, the bias and the sink. A CPU
    interprets the kernels, for tests.
    """
    call = call.with_mask_in_segments()
    plan = make_plan(call)
    sides = make_sides(call, plan)
    needed = tiles_needed(call.with_own_heads(), plan, sides)
    rows = [x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value)]
    of_side = plan.q_blocks, plan.k_blocks, plan.k_blocks
    query, key, value = (
        padded(x.transpose(0, 2, 1, 3), 2, blocks * plan.block)
        for x, blocks in zip(rows, of_side, strict=True)
    )
    names = ["query_segments", "key_segments"]
    if plan.first is None:
        names += ["query_positions", "key_positions"]
    of_tokens = {
        name: x.reshape(-1, 1, x.shape[-1]) for name in names if (x := sides[name]) is not None
    }
    if plan.metric is not None:  # causal masks and windows read places too, in their order
        positions = ("query_positions", "key_positions")
        of_tokens |= {name: plan.metric.places(of_tokens[name]) for name in positions}
    if (mask := sides["mask"]) is not None:
        whole = (*mask.shape[:2], query.shape[2], key.shape[2])
        of_tokens["mask"] = jnp.broadcast_to(mask, whole).astype(jnp.int8)
    operands = Operands(
        query,
        key,
        value,
        _bias_arrays(call, plan),
        None if call.sink is None else call.sink.astype(jnp.float32),
        of_tokens,
    )
    attended = _attention(operands, needed, plan)
    attended = attended[:, :, : call.query.shape[-3]].transpose(0, 2, 1, 3)
    return attended.reshape(*call.query.shape[:-1], -1)


def cannot_fuse(call: AttentionCall) -> str:
    """Returns why `fused_attention` can't do the call, or an empty string."""
    bias, platform = call.bias, call.options.platform
    if not (
        bias is None
        or bias.slopes is not None
        or bias.diagonals is not None
        or bias.query_term is not None
    ):
        return (
            "its bias is none of slopes, of distances at consecutive positions known when it is traced, or of a "
            "number of the query plus a number of the key"
        )
    if bias is not None and bias.metric and bias.metric.columns and any(call.sight):
        return "its kernels hide no keys by order in a grid"
    mask, pairs = call.with_mask_in_segments().mask, call.weights_shape[-2:]
    if mask is not None and mask.shape[-2:] != pairs:
        return (
            "it takes a mask of keys for all heads or of pairs, and others would be spread to pairs"
        )
    if mask is not None and platform == "gpu" and math.prod((*mask.shape[:-2], *pairs)) >= 2**31:
        return "Triton counts the elements of a mask in 32 bits"
    if call.devices > 1:
        return "its kernels run on one device, and several need sharding= to split the call"
    dtypes = {x.dtype for x in (call.query, call.key, call.value)}
    if len(dtypes) > 1 or call.query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 or float32, one for all, and got {', '.join(map(str, sorted(dtypes, key=str)))}"
    if platform == "gpu" and jax.default_backend() == "gpu" and compute_capability() < 8.0:
        return "Triton needs an NVIDIA GPU of compute capability 8.0 or more"
    if max(call.query.shape[-1], call.value.shape[-1]) > WIDEST:
        return f"it takes heads of up to {WIDEST} features"
    block, least = call.options.block, LANES if platform == "tpu" else 16
    if block and (block < least or block & (block - 1)):
        return f"its blocks are powers of two from {least} on, and got {block}"
    try:
        plan = make_plan(call)
    except ValueError as error:
        return str(error)
    if plan.most_tiles > MOST_TILES and platform == "tpu":
        return f"its lists hold {MOST_TILES:,} tiles, and this call can need {plan.most_tiles:,}"
    return missing(plan.on_gpu)


@functools.cache
def missing(on_gpu: bool) -> str:
    """Returns why the kernels can't be imported, or an empty string. Logs the reason, once per process."""
    try:
        _kernels(on_gpu)
    except ImportError as error:
        name = "Triton" if on_gpu else "Mosaic"
        reason = (
            f"JAX {jax.__version__} has no Pallas for {name} ({error}); jax 0.10 to 0.12 have it"
        )
        logging.getLogger(__name__).warning("no fused attention: %s", reason)
        return reason
    return ""


def _bias_arrays(call: AttentionCall, plan: KernelPlan) -> dict[str, Array]:
    """Returns the arrays for `Operands.bias`."""
    if call.bias is None:
        return {}
    if call.bias.slopes is not None:
        return {"slopes": jnp.asarray(call.bias.slopes, jnp.float32)}
    bias = call.bias.folded(call.query.ndim - 3)
    more_queries, more_keys = plan.padding
    if bias.diagonals is not None:
        around = (0, 0), (more_keys + 1, more_queries)
        values = jnp.pad(bias.diagonals.astype(jnp.float32), around, mode="edge")
        return {"diagonals": values[:, ::-1].reshape(len(values), -1, 1, plan.block)}
    terms = {"query_term": (bias.query_term, more_queries), "key_term": (bias.key_term, more_keys)}
    arrays = {}
    for name, (term, more) in terms.items():
        whole = padded(term.astype(jnp.float32), 1, term.shape[1] + more)
        arrays[name] = whole.transpose(0, 2, 1)[:, :, None]
    return arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(
    operands: Operands, needed: Bool[Array, "batch heads q_blocks k_blocks"], plan: KernelPlan
) -> Float[Array, "batch heads q value_dim"]:
    return _kernels(plan.on_gpu).forward(
        plan, _in_units(operands, plan), needed, operands.value.dtype
    )[0]


def _in_units(operands: Operands, plan: KernelPlan) -> Operands:
    bias = {
        name: x if name in ("query_term", "key_term") else plan.unit * x
        for name, x in operands.bias.items()
    }
    sink = None if operands.sink is None else plan.unit * operands.sink
    return operands._replace(bias=bias, sink=sink)


def _kernels(on_gpu: bool) -> Any:
    """Returns the module with the kernels. Its import takes a while."""
    if on_gpu:
        from alibi.attention.accelerator import triton

        return triton
    from alibi.attention.accelerator import mosaic

    return mosaic


def _forward(operands: Any, needed: Any, plan: KernelPlan) -> tuple[Array, Any]:
    # The names are keys of a dictionary, since what is saved must be arrays.
    learned = {name: () for name, x in operands.bias.items() if x.perturbed}
    operands, needed = jax.tree.map(lambda x: x.value, (operands, needed))
    operands = _in_units(operands, plan)
    # `out` is kept in float32 for delta: rounded to half precision, it would make the errors of dq
    # and dk up to 1.4 times as large.
    results = _kernels(plan.on_gpu).forward(plan, operands, needed, jnp.float32)
    out, lse = checkpoint_name(results, ATTENDED)
    # Rows that fill the last block have no weights: what a bias adds to them is arbitrary.
    rows = jnp.arange(lse.shape[-1])[None, None, None]
    lse = jnp.where(rows < plan.q_length, lse, -MASKED)
    return out.astype(operands.value.dtype), (operands, needed, out, lse, learned)


def _backward(plan: KernelPlan, saved: Any, dout: Any) -> tuple[Any, ...]:
    operands, needed, out, lse, learned = saved
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    backward = Backward(dout, lse, dot_rows(dout, out)[:, :, None])
    dquery = _kernels(plan.on_gpu).backward_queries(plan, operands, needed, backward)
    names = tuple(name for name in learned if name != "query_term")
    dkey, dvalue, learnt = _kernels(plan.on_gpu).backward_keys(
        plan, operands, needed, backward, names
    )
    if plan.shared_by > 1:
        dkey, dvalue = (
            x.reshape(plan.batch, -1, plan.shared_by, *x.shape[2:]).sum(axis=2)
            for x in (dkey, dvalue)
        )
    dbias = {name: jnp.zeros_like(x) for name, x in operands.bias.items()} | learnt
    dsink = None
    if operands.sink is not None:
        # A query's term shifts all its logits alike, which only a sink notices.
        of_queries = (
            jnp.exp((operands.sink[None, :, None, None] - lse) / plan.unit) * backward.delta
        )
        dsink = -of_queries.sum(axis=(0, 2, 3))
        if "query_term" in learned:
            dbias["query_term"] = of_queries
    dkey, dvalue = dkey.astype(operands.key.dtype), dvalue.astype(operands.value.dtype)
    dsides: dict[str, Any] = dict.fromkeys(operands.sides)
    return Operands(dquery, dkey, dvalue, dbias, dsink, dsides), None


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
