"""The fused kernels: equal to the reference in values and every gradient, lowered for GPUs and TPUs,
and, where libtpu is installed, compiled for TPUs.

test_backend_grid.py compares the kernels for TPUs over shapes, windows and gaps, test_fused_masks.py over masks.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_slopes, attend
from alibi.attention.accelerator import fused, plan, triton, triton_grid
from alibi.attention.accelerator.mosaic_grid import Pass
from alibi.attention.backends import choose, refusal
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.skipping import tiles_needed
from alibi.attention.tiles import make_sides
from alibi.numerics.target import traced_for
from alibi.positions import AlibiBias, make_position
from alibi.positions.fox import FoxBias
from alibi.positions.metric import Metric, MetricBias
from alibi.positions.sided import SidedBias
from tests.attention import calls
from tests.attention.calls import abstract_device, inputs, on

KERNELS = ["mosaic", "triton"]
MASKED = [
    ("alibi_learned", 64, "keys"),
    ("t5", 128, "pairs"),
    ("grid", 64, ""),
    ("grid", 128, "pairs"),
]
METHODS = ["none", "alibi_learned", "t5", "kerple_log", "sandwich", "fox"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    monkeypatch.setattr(plan, "BLOCK", 16)
    monkeypatch.setattr(plan, "GPU_BLOCK", 16)
    monkeypatch.setattr(plan, "LANES", 16)


def bias_of(name, heads, head_dim, batch=2, length=40, **options):
    """Returns the parameters of a method's bias, and the function from them to the bias."""
    if name == "none":
        return {}, lambda params: None
    if name == "grid":
        metric = Metric(32, free_tokens=1, euclidean=True)
        return jnp.asarray(alibi_slopes(heads)), lambda slopes: MetricBias(slopes, metric)
    if name == "fox":
        gates = np.random.default_rng(1).standard_normal((batch, length, heads), np.float32)
        return jnp.cumsum(jax.nn.log_sigmoid(gates), axis=1), lambda c: FoxBias(c, c)
    sizes = {"num_heads": heads, "head_dim": head_dim, "width": heads * head_dim}
    method = make_position(name, **sizes, train_length=16, options=options)
    params = {**method.init(jax.random.key(0)), **method.init_layer(jax.random.key(1))}
    return params, method.bias


def assert_equals_reference(arrays, params, bias, **arguments):
    calls.assert_equals_reference("fused", arrays, bias(params), **arguments)


def test_a_table_on_tpus(small_blocks):
    """With more keys than queries, so that tiles differ in what they see, and the last is filled up.
    Slopes: test_backend_grid.py; with a mask: test_fused_masks.py; on GPUs: below.
    """
    assert_equals_reference(inputs(2, 27, 40, 2, 8), *bias_of("t5", 2, 8))


@pytest.mark.parametrize("kernels", KERNELS)
def test_packed_documents_shared_keys_a_window_a_sink_and_a_cap(kernels, monkeypatch, small_blocks):
    """With sums of gates as large as after 10,000 tokens, of which only the differences count;
    test_fused_masks.py has them with slopes and a mask.
    """
    monkeypatch.setattr(plan, "INTERPRET_GPU", kernels == "triton")
    arrays = inputs(2, 40, 40, 4, 8, kv_heads=2, value_dim=12)
    tokens = np.arange(40)
    segments = jnp.asarray(np.stack([tokens // 15, 0 * tokens]))
    positions = jnp.asarray(np.stack([tokens % 15, tokens]))
    sides = {"query_positions": positions, "key_positions": positions, "segment_ids": segments}
    sums, bias = bias_of("fox", 4, 8)
    assert_equals_reference(
        arrays,
        jnp.round(64 * sums) / 64 - 8192.0,  # exactly
        bias,
        sink=jnp.asarray([0.0, 0.5, -1.0, 2.0]),
        window=12,
        logit_cap=2.0,
        **sides,
    )


@pytest.mark.parametrize(
    ("ahead", "arguments"),
    [
        (0, {"sink": jnp.asarray([0.5, -1.0]), "logit_cap": 2.0, "window": 44}),
        (0, {"segment_ids": jnp.asarray(np.arange(120).reshape(2, 60) // 25)}),
        (80, {}),  # all keys are far
        (30, {"causal": False}),  # later keys are near
    ],
)
def test_far_keys_of_one_bucket(ahead, arguments, monkeypatch, small_blocks):
    """Their gradient is one number: on GPUs the kernel of keys sums it in tiles with far pairs alone, and
    a tile that two kernels sum, or none, would show.
    """
    monkeypatch.setattr(plan, "INTERPRET_GPU", True)
    params, bias = bias_of("t5", 2, 8, max_distance=9, num_buckets=6)
    positions = {"query_positions": np.arange(60) + ahead, "key_positions": np.arange(60)}
    assert_equals_reference(inputs(2, 60, 60, 2, 8), params, bias, **positions, **arguments)


def t5_plan(length=2**16, head_dim=64, **changes):
    """Returns the plan of a T5 call on a GPU with a largest distance of 128, and its operands."""
    plain = call_of("gpu", None, length, head_dim, **changes)
    _, bias = bias_of("t5", 4, head_dim, max_distance=128)
    table = bias({"table": jnp.zeros((32, 4))})
    table = table.tabulated(plain.query_positions, plain.key_positions)
    of_call = plan.make_plan(dataclasses.replace(plain, bias=table))
    sides = {} if plain.query_segments is None else {"query_segments": plain.query_segments}
    arrays = plain.query, plain.key, plain.value
    return of_call, plan.Operands(*arrays, {"diagonals": table}, None, sides)


def test_few_diagonals_of_t5_have_a_kernel_of_their_own():
    """Under a largest distance of 128, three of 1,024: tiles of 64 from the distance 128 + 63 on are far."""
    of_call, _ = t5_plan()
    assert triton.near_diagonals(of_call, 64) == range(-2, 1)
    far = dataclasses.replace(of_call, level_from=None)
    assert triton.near_diagonals(far, 64) == range(-1023, 1)


@pytest.mark.parametrize(
    ("options", "far"),
    [
        ({}, True),
        ({"length": 1024}, False),
        ({"causal": False}, False),
        ({"options": AttentionOptions(platform="gpu", window=4096)}, False),
        (dict.fromkeys(("query_segments", "key_segments"), jnp.zeros((1, 2**16), int)), False),
    ],
)
def test_tiles_of_t5_are_larger_where_nearly_all_are_far(options, far):
    """At 1,024 tokens, without a causal mask or under a window many tiles are near. Where segments may hide
    a pair, all are computed as near ones.
    """
    of_call, operands = t5_plan(**options)
    for kernel in (triton_grid.FORWARD, triton_grid.QUERIES, triton_grid.KEYS):
        larger = triton_grid.OF_FAR_TILES if far else {}
        expected = larger.get((kernel, 128), triton_grid.BY_DISTANCE)
        assert triton_grid.size_of(of_call, kernel, operands) == expected


def test_tiles_of_t5_stay_small_with_heads_of_128():
    """Larger ones don't fit into the registers of an H100."""
    of_call, operands = t5_plan(head_dim=128)
    for kernel in (triton_grid.FORWARD, triton_grid.QUERIES, triton_grid.KEYS):
        assert triton_grid.size_of(of_call, kernel, operands) == triton_grid.BY_DISTANCE


@pytest.mark.parametrize(
    ("name", "far_from", "arguments"),
    [
        ("alibi_learned", 16, {"window": 35}),
        ("none", 16, {"causal": False, "window": 35}),
        # far keys share a bucket: tiles seen whole and far, before and after others
        ("t5", 16, {"window": 100}),
        ("t5", 1, {}),  # larger tiles: the forward pass has more rows than the sums along diagonals
    ],
)
def test_rows_and_columns_of_gpu_kernels(name, far_from, arguments, monkeypatch):
    """Several in a block, so that there are tiles with and without a mask, far and near."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    monkeypatch.setattr(plan, "INTERPRET_GPU", True)
    monkeypatch.setattr(plan, "GPU_BLOCK", 32)
    sizes = {
        triton_grid.FORWARD: (32, 16),
        triton_grid.QUERIES: (16, 32),
        triton_grid.KEYS: (16, 16),
        triton_grid.DIAGONALS: (16, 16) if far_from == 1 else (32, 32),
    }
    sizes = {(kernel, 128): triton_grid.Size(*size, 4, 1) for kernel, size in sizes.items()}
    monkeypatch.setattr(triton_grid, "SIZES", sizes)
    monkeypatch.setattr(triton_grid, "OF_FAR_TILES", sizes)
    monkeypatch.setattr(triton_grid, "FAR_FROM", far_from)
    by_distance = (16, 16) if far_from == 1 else (32, 16)
    monkeypatch.setattr(triton_grid, "BY_DISTANCE", triton_grid.Size(*by_distance, 4, 1))
    options = {"max_distance": 20, "num_buckets": 8} if name == "t5" else {}
    params, bias = bias_of(name, 2, 8, **options)
    arrays = (
        inputs(1, 110, 120, 2, 8, kv_heads=1)
        if name == "alibi_learned"
        else inputs(1, 120, 120, 2, 8)
    )
    assert_equals_reference(arrays, params, bias, **arguments)


def test_queries_that_fill_a_block_add_nothing_to_keys_that_none_needs(small_blocks):
    """A row of keys without a needed tile computes its first, whose added queries have no bias of
    their own.
    """
    arrays = inputs(1, 20, 64, 2, 8)
    slopes = jnp.asarray([200.0, 100.0])
    bias = SidedBias(AlibiBias(slopes), AlibiBias(slopes))
    assert_equals_reference(arrays, bias, lambda bias: bias)


def test_tiles_out_of_reach_are_no_steps(small_blocks):
    """Under steep slopes a block sees itself and the one before: the grid has so many steps."""
    query, key, value, _ = (jnp.asarray(x) for x in inputs(1, 160, 160, 2, 8))
    call = AttentionCall(
        query,
        key,
        value,
        bias=AlibiBias(jnp.asarray([64.0, 0.0])),
        causal=True,
        query_positions=np.arange(160),
        key_positions=np.arange(160),
    )
    of_call = plan.make_plan(call)
    needed = tiles_needed(call, of_call, make_sides(call, of_call))
    assert np.asarray(needed).sum(axis=(0, 2, 3)).tolist() == [10 + 9, 55]
    for by_keys in (False, True):
        assert Pass(of_call, needed, by_keys=by_keys).counts.tolist() == [10 + 9, 55]
    assert of_call.most_tiles == 2 * 55, "known when it is traced: those that causality leaves"


def call_of(platform, bias, length=1024, head_dim=64, dtype=jnp.bfloat16, **changes):
    array = jnp.zeros((1, length, 4, head_dim), dtype)
    options = AttentionOptions(platform=platform)
    positions = {"query_positions": np.arange(length), "key_positions": np.arange(length)}
    arguments = {"bias": bias, "causal": True, "devices": 1, "options": options} | positions
    return AttentionCall(array, array, array, **(arguments | changes))


def tabulated(name, call):
    params, bias = bias_of(name, 4, 64)
    return bias(params).tabulated(call.query_positions, call.key_positions)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_auto_takes_it_on_accelerators(platform):
    plain = call_of(platform, None)
    known = call_of(platform, AlibiBias(alibi_slopes(4)))
    assert choose(known) == choose(plain) == "fused"
    several = dataclasses.replace(known, devices=4)
    assert choose(several) == ("augmented" if platform == "gpu" else "reference")
    assert choose(call_of(platform, tabulated("t5", plain))) == "fused"
    assert choose(call_of(platform, tabulated("kerple_log", plain))) == "fused"
    assert choose(call_of(platform, None, length=256)) == "reference", "the logits are small"
    assert choose(call_of("tpu", None, length=512)) == "fused"
    assert choose(call_of("gpu", None, length=512)) == "reference"


@pytest.mark.parametrize(
    ("platform", "pallas", "kernels", "next_one"),
    [("gpu", "triton", "triton", "augmented"), ("tpu", "tpu", "mosaic", "blocked")],
)
@pytest.mark.parametrize("lacks", ["the module", "CompilerParams"])
def test_auto_takes_the_next_backend_where_jax_lacks_the_pallas_of_a_platform(
    lacks, platform, pallas, kernels, next_one, monkeypatch, caplog
):
    """Or where it keeps the module without a class that the kernels need."""
    module = importlib.import_module(f"jax.experimental.pallas.{pallas}")
    for name in (kernels, f"{kernels}_grid"):
        folder = importlib.import_module("alibi.attention.accelerator")
        monkeypatch.delattr(folder, name, raising=False)
        monkeypatch.delitem(sys.modules, f"{folder.__name__}.{name}", raising=False)
    if lacks == "the module":
        monkeypatch.setitem(sys.modules, module.__name__, None)
    else:
        monkeypatch.delattr(module, lacks)
    monkeypatch.setattr(fused, "missing", functools.cache(fused.missing.__wrapped__))
    call = call_of(platform, AlibiBias(alibi_slopes(4)), length=8192)
    assert choose(call) == choose(call) == next_one
    assert "has no Pallas for" in refusal("fused", call)
    assert len(caplog.messages) == 1, "the reason is logged once"


def test_a_call_that_it_cannot_do_is_refused_with_the_reason():
    plain = call_of("tpu", None)
    params, fire = bias_of("fire", 4, 64)
    t5_params, t5 = bias_of("t5", 4, 64)
    later = {"bias": t5(t5_params), "key_positions": jnp.arange(1024)}
    blocks = AttentionOptions(platform="tpu", block=64)
    # in blocks of 1,024, of which there are 256
    long = call_of("tpu", None, length=2**18, head_dim=1)
    shorter = call_of("tpu", None, length=2**17, head_dim=1)
    changed = functools.partial(dataclasses.replace, plain)
    for call, reason in (
        (changed(bias=fire(params)), "its bias is none of slopes"),
        (changed(**later), "positions known when it is"),
        (changed(devices=4), "several need sharding="),
        (changed(dropout_rng=jax.random.key(0), dropout_rate=0.5), "no dropout"),
        (changed(precision=jax.lax.Precision.HIGH), "default precision or the highest"),
        (changed(value=plain.value.astype(jnp.float32)), "one for all, and got bfloat16, float32"),
        (changed(options=blocks), "powers of two from 128 on"),
        (call_of("tpu", None, head_dim=512), "heads of up to 256 features"),
        (call_of("tpu", None, dtype=jnp.float16), "takes bfloat16 or float32"),
        (long, "hold 131,072 tiles, and this call can need 131,584"),
    ):
        assert reason in refusal("fused", call)
    for call in (plain, shorter, on(long, "gpu")):  # whose kernels hold no list
        assert refusal("fused", call) == ""
    assert plan.make_plan(shorter).block == 1024
    with jax.default_matmul_precision("high"):
        assert "default precision or the highest, and got high" in refusal("fused", plain)


def gradients(name, head_dim, length, batch=2, heads=4, mask=""):
    """Returns a function that computes attention and all gradients, and shapes of its arguments.

    Args:
      mask: "keys" or "pairs" for a mask, as one more argument.
    """
    params, bias = bias_of(name, heads, head_dim, batch, length)
    how = {"causal": name != "grid", "backend": "fused"}

    def computed(query, key, value, params, incoming, *masks):
        def attention(query, key, value, params):
            own = dict(zip(["mask"], masks, strict=False))
            return attend(query, key, value, bias=bias(params), **how, **own)

        attended, to_gradients = jax.vjp(attention, query, key, value, params)
        return attended, *to_gradients(incoming)

    array = jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)
    shapes = {"keys": [(batch, 1, 1, length)], "pairs": [(batch, 1, length, length)]}.get(mask, [])
    masks = [jax.ShapeDtypeStruct(shape, bool) for shape in shapes]
    return computed, (array, array, array, jax.eval_shape(lambda: params), array, *masks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mask"), [("alibi_learned", "keys"), ("t5", "pairs"), ("fox", ""), ("grid", "")]
)
@pytest.mark.parametrize(("platform", "target"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_lowers_without_a_square_of_pairs(platform, target, name, mask, monkeypatch):
    """By Pallas' own lowering, of Triton or Mosaic; neither compiler is here. A mask of keys and a grid
    need no array of pairs either.
    """
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    function, shapes = gradients(name, 80, 1000, mask=mask)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract_device(target))
    with traced_for(platform, 1), jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(target,))
    module = lowered.as_text()
    kernel = "tpu_custom_call" if platform == "tpu" else "__gpu$xla.gpu.triton"
    diagonals = platform == "gpu" and name == "t5"  # in a kernel of its own
    assert module.count(f"@{kernel}") == 3 + diagonals
    of_pairs = re.findall(r"(?:1000x1000|1024x1024)x([a-z]+[0-9]*)", module)
    assert set(of_pairs) <= ({"i1", "i8"} if mask == "pairs" else set())


GPUS = {  # compute capability, KiB that a program can share
    "NVIDIA A100-SXM4-80GB": ("8.0", 163),
    "NVIDIA GeForce RTX 4090": ("8.9", 99),
    "NVIDIA H100 80GB HBM3": ("9.0", 227),
}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared} shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: 100 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.5
  device_memory_size: 85899345920 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 }} device_description_str: "{kind}"
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="XLA's compiler for NVIDIA GPUs is not installed: bash scripts/setup.sh --extra=gpu",
)
@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize(
    ("name", "head_dim", "mask"),
    [
        *((name, 128, "") for name in METHODS),
        *((name, 64, "") for name in ("none", "alibi_learned", "t5")),
        ("t5", 256, ""),
        *MASKED,
    ],
)
def test_compiles_for_gpus(kind, name, head_dim, mask):
    """Without a GPU; the kernels fit into what a program can share."""
    from jax.experimental import topologies

    capability, shared = GPUS[kind]
    major, minor = capability.split(".")
    target = TARGET.format(kind=kind, major=major, minor=minor, shared=shared * 1024)
    (device,) = topologies.get_topology_desc(
        platform="cuda", topology_name=kind, topology="1x1x1", target_config=target
    ).devices
    compiled = compiled_for("gpu", device, gradients(name, head_dim, 4096, 1, 8, mask))
    # One [q, k] array of a head in bfloat16 would be 32 MiB, of all heads 256 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**27


def compiled_for(platform, device, function_and_shapes):
    function, shapes = function_and_shapes
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    target = abstract_device("cuda" if platform == "gpu" else "tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=target)
    with traced_for(platform, 1), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).lower(*shapes).compile()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the compiler for TPUs, is not installed: bash scripts/setup.sh --extra=tpu",
)
@pytest.mark.parametrize(
    ("topology", "name", "head_dim", "mask"),
    [
        *(("v5e:2x2", name, dim, "") for dim in (64, 128) for name in METHODS),
        *((other, "t5", dim, "") for dim in (64, 128) for other in ("v5p:2x2x1", "v6e:2x2")),
        *(("v5e:2x2", *masked) for masked in MASKED),
    ],
)
def test_compiles_for_tpus(topology, name, head_dim, mask, monkeypatch):
    from jax.experimental import topologies

    for variable, value in (
        ("SKIP_MDS_QUERY", "1"),
        ("ACCELERATOR_TYPE", "v5litepod-8"),
        ("WORKER_ID", "0"),
        ("WORKER_HOSTNAMES", "localhost"),
    ):
        monkeypatch.setitem(os.environ, f"TPU_{variable}", value)
    monkeypatch.setitem(os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # in other workers
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    compiled = compiled_for("tpu", device, gradients(name, head_dim, 8192, 1, 8, mask))
    # One [q, k] array of a head in bfloat16 would be 128 MiB, of all heads 1 GiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29
