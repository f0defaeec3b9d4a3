"""What any position method must hold: one call checks a method, of this project or of yours.

from alibi.testing import check_position_method

def test_my_method():
    check_position_method(MyMethod, decay=0.5)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from alibi.attention import AttentionOptions, method_attention_fn
from alibi.model.config import ModelConfig
from alibi.model.decoder import DecoderLM
from alibi.model.layers import stacked
from alibi.positions import Bias, Part, PositionMethod, make_position
from alibi.positions.bias import Blocks

HEADS, HEAD_DIM, TRAIN_LENGTH = 4, 8, 16
WIDTH = HEADS * HEAD_DIM
TOKENS = 11  # of the sequences that go through a model
LENGTH, BLOCK = 40, 16  # of those that go through attention, and of its tiles: three, the last one filled up


class PositionMethodError(AssertionError):
    """A position method lacks what it must hold, or what it declares."""


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
    model = _Model(made)
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


def _fail(method: PositionMethod, what: str) -> None:
    raise PositionMethodError(f"position method {type(method).__name__}: {what}")


def _params(method: PositionMethod) -> dict[str, Any]:
    """Parameters off their start, where some are zero and would hide mistakes."""
    shared, of_layer = jax.random.split(jax.random.key(0))
    params = {**method.init(shared), **method.init_layer(of_layer)}
    return jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)


def _inputs(length: int, scale: float = 1.0) -> dict[str, Float[Array, "..."]]:
    """What an attention layer works on: its input and its queries, keys and values, for two sequences."""
    rng = np.random.default_rng(0)
    heads = (2, length, HEADS, HEAD_DIM)
    shapes = {"x": (2, length, WIDTH), "query": heads, "key": heads, "value": heads}
    sizes = {"x": 1.0, "query": scale, "key": scale, "value": 1.0}
    return {name: jnp.asarray(sizes[name] * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def _attend(
    method: PositionMethod, options: AttentionOptions, params: Any, inputs: dict[str, Array], queries: int = LENGTH
) -> Array:
    """One layer's attention, at positions from 3 on; of the last `queries` tokens."""
    positions = np.arange(inputs["x"].shape[1]) + 3
    attention = method_attention_fn(
        method.at_length(positions.size),
        params,
        inputs["x"].astype(jnp.float32),
        query_positions=positions[-queries:],
        key_positions=positions,
        options=options,
    )
    return attention(inputs["query"][:, -queries:], inputs["key"], inputs["value"])


def _bias(method: PositionMethod, params: Any, inputs: dict[str, Array]) -> Bias | None:
    method = method.at_length(inputs["x"].shape[1])
    kept = method.keep(params, inputs["x"], inputs["key"], before=None)
    return method.content_bias(params, inputs["query"], kept, kept)


def _is_bounded(method: PositionMethod) -> bool:
    @jax.jit
    def bounded() -> bool:
        bias = _bias(method, _params(method), _inputs(LENGTH))
        return bias is not None and bias.bounded

    return bool(bounded())


def check_blocks(method: PositionMethod) -> None:
    """Any part of a bias, cut from it, is that part of the whole."""

    @jax.jit
    def blocks() -> Any:
        bias = _bias(method, _params(method), _inputs(9))
        if bias is None:
            return None
        positions = jnp.arange(9) + 3
        part = Part((1, 1), (2, 2), (4, 3), (1, 6))
        whole = bias(positions, positions)
        cut = bias.cut(part)(positions[4:7], positions[1:7])
        known = bias.tabulated(np.arange(9) + 3, np.arange(9) + 3).cut(part)(positions[4:7], positions[1:7])
        return whole, cut, known

    if (found := jax.device_get(blocks())) is None:
        return
    whole, cut, known = found
    if whole.dtype != np.float32:
        _fail(method, f"its bias is {whole.dtype}; it must be float32, whatever the model computes in")
    whole = whole if whole.ndim == 4 else np.broadcast_to(whole, (2, *whole.shape))
    expected = whole[1:2, 2:4, 4:7, 1:7]
    visible = (np.arange(4, 7)[:, None] >= np.arange(1, 7)) | (not method.causal)
    for name, got in (("cut", cut), ("tabulated", known)):
        got = got if got.ndim == 4 else got[None]
        if got.shape != expected.shape or not np.allclose(
            np.where(visible, got, 0), np.where(visible, expected, 0), atol=1e-5
        ):
            _fail(
                method,
                f"its bias, {name} to heads 2 and 3, queries 4 to 6 and keys 1 to 6, is not that part of the whole; "
                "declare its fields by per_head, per_query and per_key, as they lie",
            )


def check_tiles(method: PositionMethod) -> None:
    """`blocked` and, where there are several devices, eight of them compute what the dense formula does."""
    params, inputs = _params(method), _inputs(LENGTH)

    @functools.partial(jax.jit, static_argnums=2)
    def value_and_gradients(params: Any, inputs: dict[str, Array], options: AttentionOptions) -> Any:
        def loss(params: Any, inputs: dict[str, Array]) -> tuple[Array, Array]:
            attended = _attend(method, options, params, inputs)
            return jnp.sin(3.0 * attended).sum(), attended  # sin: so that each entry has a gradient of its own

        gradients, attended = jax.grad(loss, (0, 1), has_aux=True)(params, inputs)
        return {"value": attended, "parameters": gradients[0], "inputs": gradients[1]}

    expected = value_and_gradients(params, inputs, AttentionOptions(backend="reference"))
    ways = {"blocked": AttentionOptions(backend="blocked", block=BLOCK), "auto": AttentionOptions()}
    if jax.device_count() >= 8:
        devices = np.asarray(jax.devices()[:8]).reshape(2, 4)
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, P("data", None, "tensor"))
        ways["blocked on 8 devices"] = AttentionOptions(backend="blocked", block=BLOCK, sharding=sharding)
    for name, options in ways.items():
        _compare(method, f"attention by {name}", value_and_gradients(params, inputs, options), expected, 2e-4)


def _compare(method: PositionMethod, what: str, got: PyTree, expected: PyTree, tolerance: float) -> None:
    for (path, right), value in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        right, value = np.asarray(right, np.float64), np.asarray(value, np.float64)
        error = np.abs(value - right).max() / (1.0 + np.abs(right).max())
        if not error <= tolerance:
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            _fail(method, f"{what} differs from the dense formula in {place} by {error:.2g} of the largest")


def check_half_precision(method: PositionMethod) -> None:
    """In bfloat16 the result is that of float32 but for the rounding of queries, keys and values."""
    params, inputs = _params(method), _inputs(LENGTH)

    @jax.jit
    def both() -> Any:
        half = {name: x.astype(jnp.bfloat16) for name, x in inputs.items()}
        rounded = {name: x.astype(jnp.float32) for name, x in half.items()}
        options = AttentionOptions(backend="reference")
        return _attend(method, options, params, half), _attend(method, options, params, rounded)

    half, whole = (np.asarray(x, np.float64) for x in both())
    if not np.abs(half - whole).max() < 0.05:
        _fail(method, f"in bfloat16 its result is off by {np.abs(half - whole).max():.2g}; compute in float32 inside")


def check_bounds(method: PositionMethod) -> None:
    """No bias exceeds what its bound says, and skipping far keys loses no more than `skip_epsilon`."""
    if not _is_bounded(method):
        return
    length, block = 512, 32
    params, inputs = _params(method), _inputs(length)

    @jax.jit
    def found() -> Any:
        bias: Any = _bias(method, params, inputs)
        positions = np.arange(length)
        first = positions.reshape(-1, block)[:, 0]
        behind = first[:, None] - first[None, :] - (block - 1)
        count = np.full((1, 1, 1, first.size), block)
        blocks = Blocks(jnp.asarray(behind)[None], jnp.asarray(behind.T)[None], first.size, first.size, count)
        whole = bias(jnp.asarray(positions), jnp.asarray(positions))
        return whole, bias.upper_bound(blocks), bias.log_sum_bound(blocks)

    whole, bound, log_sum = jax.device_get(found())
    hidden = np.arange(length)[:, None] < np.arange(length) if method.causal else np.zeros((length, length), bool)
    tiles = np.where(hidden, -np.inf, whole).reshape(-1, HEADS, length // block, block, length // block, block)
    checks = {"upper_bound": (tiles.max(axis=(3, 5)), bound)}
    with np.errstate(divide="ignore"):
        checks["log_sum_bound"] = (np.log(np.exp(tiles).sum(axis=5)).max(axis=3), log_sum)
    for name, (largest, claimed) in checks.items():
        wrong = np.argwhere(largest > claimed + 1e-4 * (1.0 + np.abs(claimed)))
        if wrong.size:
            _, head, q_block, k_block = min(map(tuple, wrong), key=lambda index: index[2] - index[3])
            _fail(
                method,
                f"its bias exceeds {name} in head {head} between queries {q_block * block} to "
                f"{(q_block + 1) * block - 1} and keys {k_block * block} to {(k_block + 1) * block - 1}: up to "
                f"{largest[..., head, q_block, k_block].max():.4g} where it says "
                f"{np.broadcast_to(claimed, largest.shape)[..., head, q_block, k_block].max():.4g}",
            )
    _check_skipping(method, params)


def _check_skipping(method: PositionMethod, params: Any) -> None:
    """With far keys that weigh as much as they can: they lie along the queries, and near ones against them."""
    inputs = _inputs(LENGTH)
    along = jnp.ones((2, LENGTH, HEADS, HEAD_DIM)) * 0.7
    far = (jnp.arange(LENGTH) < 4)[None, :, None, None]
    inputs |= {"query": along, "key": jnp.where(far, along, -along)}
    epsilon = 1e-3
    most = 2 * epsilon * float(jnp.abs(inputs["value"]).max()) + 1e-6

    @functools.partial(jax.jit, static_argnums=(0, 1, 2))
    def attend(backend: str, queries: int, skip_epsilon: float | None) -> Array:
        options = AttentionOptions(backend=backend, block=8, skip_epsilon=skip_epsilon)
        return _attend(method, options, params, inputs, queries)

    exact = np.asarray(attend("reference", LENGTH, None))
    for backend, queries in (("blocked", LENGTH), ("decoding", 1)):
        lost = np.abs(exact[:, -queries:] - np.asarray(attend(backend, queries, epsilon))).max()
        if not lost <= most:
            _fail(method, f"{backend} with skip_epsilon={epsilon} is off by {lost:.2g}, where {most:.2g} is the most")


class _Model:
    """A small model of two layers, and its parameters."""

    def __init__(self, method: PositionMethod):
        self.method = method
        config = ModelConfig(num_layers=2, width=WIDTH, num_heads=HEADS, feed_forward=WIDTH, window=0)
        self.model = DecoderLM(config, method, vocab_size=TOKENS)
        self.tokens = jnp.stack([jnp.arange(TOKENS), jnp.arange(TOKENS)[::-1]])
        self.params = jax.jit(self.model.init)(jax.random.key(0), self.tokens)["params"]

    def changed(self, **keys: Any) -> DecoderLM:
        return self.model.clone(config=dataclasses.replace(self.model.config, **keys))

    @functools.cached_property
    def features(self) -> Float[Array, "batch length width"]:
        apply = functools.partial(self.model.apply, method="features")
        return jax.jit(apply)({"params": self.params}, self.tokens)


def check_causality(model: _Model) -> None:
    """Each token's features have a gradient with respect to the token itself, and none to a later one."""
    if not model.method.causal:
        return

    @jax.jit
    def gradients(embedding: Array) -> Array:
        def features(embedding: Array) -> Array:
            params = {**model.params, "embedding": embedding}
            return model.model.apply({"params": params}, model.tokens[:1], method="features")[0]

        _, to_gradient = jax.vjp(features, embedding)
        each = jnp.eye(TOKENS)[:, :, None] * jnp.cos(jnp.arange(WIDTH, dtype=jnp.float32))[None, None]
        return jax.vmap(lambda cotangent: to_gradient(cotangent)[0])(each)

    depends = np.abs(np.asarray(gradients(model.params["embedding"]))).max(axis=-1) > 0  # [token, on token]
    if not depends.diagonal().all():
        _fail(model.method, f"the features of token {depends.diagonal().argmin()} don't depend on the token itself")
    if not depends[-1, 0]:
        _fail(model.method, f"in a sequence of {TOKENS} tokens the last one doesn't depend on the first")
    ahead = np.argwhere(np.triu(depends, 1))
    if ahead.size:
        query, key = min(ahead, key=lambda pair: (pair[1], pair[0]))
        _fail(
            model.method, f"it is not causal: in a sequence of {key + 1} tokens, token {query} depends on token {key}"
        )


def check_shift(model: _Model) -> None:
    """If the method says so, the same tokens at later positions give the same features."""
    if not model.method.shift_invariant:
        return
    apply = jax.jit(functools.partial(model.model.apply, method="features"))
    for shift in (1, 5):
        shifted = apply({"params": model.params}, model.tokens, positions=jnp.arange(TOKENS) + shift)
        error = np.abs(np.asarray(shifted - model.features)).max(axis=(0, 2))
        if error.max() > 1e-3:
            token = int(np.argmax(error > 1e-3))
            _fail(
                model.method,
                f"it declares shift_invariant and is not: with positions greater by {shift}, the features of token "
                f"{token} differ by {error[token]:.2g} in a sequence of {token + 1}",
            )


class _Decoding(ModelConfig):
    """A model whose attention reads one token by the loop over blocks of keys, however few there are."""

    def attention_options(self, sharding: Any) -> AttentionOptions:
        return dataclasses.replace(super().attention_options(sharding), backend="decoding", block=4)


def check_cache(model: _Model) -> None:
    """A prompt in two pieces, then single tokens, through a cache, give the features of the whole sequence.

    The cache has more slots than there are tokens, and before the second sequence there is padding. With a bias that
    is `bounded`, single tokens are read again by the loop that skips keys. Only causal methods have a cache.
    """
    if not model.method.causal:
        return
    lm, padding = model.model, np.asarray([0, 3])
    positions = np.arange(TOKENS)[None] - padding[:, None]
    tokens = np.stack([np.roll(row, shift) for row, shift in zip(np.asarray(model.tokens), padding, strict=True)])
    read, empty = _reader(model, lm), jnp.zeros((2, TOKENS + 5), jnp.int32)
    cache = jax.jit(lambda: lm.init(jax.random.key(0), empty, decode=True, total=TOKENS)["cache"])()
    of_prompt = []
    for part in (slice(0, 4), slice(4, 8)):
        features, cache = read(cache, tokens[:, part], positions=positions[:, part])
        of_prompt.append(features)
    ways = {"decoded after the prompt": read}
    if _is_bounded(model.method):
        config = _Decoding(**dataclasses.asdict(lm.config))
        ways["decoded by the loop over keys"] = _reader(model, lm.clone(config=config))
    for how, read_one in ways.items():
        held, of_all = cache, list(of_prompt)
        for number in range(8, TOKENS):
            features, held = read_one(held, tokens[:, number : number + 1])
            of_all.append(features)
        _compare_features(model, np.concatenate(of_all, axis=1), padding, how)


def _reader(model: _Model, lm: DecoderLM) -> Callable[..., Any]:
    """A function of a cache and new tokens that gives their features and the cache with them."""
    apply = jax.jit(functools.partial(lm.apply, decode=True, mutable=["cache"], method="features"))

    def read(cache: PyTree, tokens: Any, **positions: Any) -> tuple[Array, PyTree]:
        features, updated = apply({"params": model.params, "cache": cache}, tokens, **positions)
        return features, updated["cache"]

    return read


def _compare_features(model: _Model, got: np.ndarray, padding: np.ndarray, how: str) -> None:
    """Compares the features of sequences that begin after `padding` with those of whole ones."""
    whole = np.asarray(model.features)
    off: dict[tuple[int, int], float] = {}
    for row, before in enumerate(padding):
        error = np.abs(got[row, before:] - whole[row, : TOKENS - before]).max(axis=1)
        off |= {(before + token, row): error[token] for token in np.flatnonzero(~(error < 1e-3))}
    if off:
        first = min(off)
        place, row = first
        after = f" after {padding[row]} tokens of padding" if padding[row] else ""
        how = "in a prompt of two pieces" if place < 8 else how
        _fail(
            model.method,
            f"with a cache, token {place - padding[row]}{after}, {how}, is off by {off[first]:.2g} from the whole "
            "sequence",
        )


def check_layers(model: _Model) -> None:
    """Layers that are recomputed, or run by one scanned block, give the same loss and gradients."""

    def loss(params: Any, lm: DecoderLM) -> Array:
        params = stacked(params) if lm.config.scan_layers else params
        nll: Any = lm.apply({"params": params}, model.tokens, model.tokens, method="token_nll")
        return nll.sum()

    compute: Callable[..., Any] = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = compute(model.params, model.changed())
    for keys in ({"remat": True}, {"scan_layers": True}):
        got = compute(model.params, model.changed(**keys))
        _compare(model.method, f"a model with {next(iter(keys))}", got, expected, 1e-4)
