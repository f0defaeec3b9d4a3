"""Every registered method holds what any method must, and the checker finds what one lacks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from alibi import testing
from alibi.config import make_config
from alibi.model.decoder import build_model
from alibi.positions import (
    METHODS,
    Bias,
    DistanceBias,
    PositionMethod,
    make_position,
    per_head,
    per_query,
    shared,
    static,
)
from alibi.positions.bam import Bam, BamBias
from alibi.positions.fox import Fox, FoxBias
from alibi.positions.sinusoidal import Sinusoidal
from alibi.positions.stick_breaking import StickBreaking
from alibi.positions.t5 import T5, T5Bias
from alibi.testing import (
    PositionMethodError,
    check_blocks,
    check_bounds,
    check_few_tokens,
    check_finite,
    check_half_precision,
    check_level,
    check_position_method,
    check_tiles,
)
from alibi.testing.model import (
    SmallModel,
    check_cache,
    check_causality,
    check_segments,
    check_shift,
)
from tests.refusals import assert_refused

SIZES = {"num_heads": 4, "head_dim": 8, "width": 32, "train_length": 16}
# One for each place where a bias enters: by a table of the distance, with a mask in the other direction
# too; by the queries, which adds values too; and by the layer's input. The last two have a field for
# each way in which devices split a bias: of queries, shared, and of keys.
WHOLE = {"t5": {}, "shaw": {"values": True}, "fox": {}}
# What the formulas in positions/ don't show of the others: queries and keys of other sizes and of the
# tokens before; whole rows, carried, of weights, and of all heads, which devices split; the embedding;
# learned numbers that no other method has. Rotary's cache is in model/test_generation.py.
OWN: dict[str, list[Callable]] = {
    "pope": [check_half_precision, check_shift, check_cache],
    "selective_rope": [check_half_precision, check_segments, check_cache],
    "stick_breaking": [check_half_precision, check_segments, check_cache],
    "asentmax": [check_half_precision, check_cache],
    "dape": [check_tiles, check_half_precision, check_segments, check_cache],
    "sinusoidal": [check_cache],
    "fire": [check_tiles],
}
# A convolution longer than a piece of the prompt goes on in the cache: 7 taps reach across several.
SELECTIVE = {"taps": 7, "rank": 0, "silu": True, "gate": True, "norm_after": True}
OPTIONS = {"alibi_learned": {"per_layer": True}, "selective_rope": SELECTIVE}
OF_MODEL = (check_cache, check_causality, check_segments, check_shift)


@pytest.mark.parametrize("name", WHOLE)
def test_a_method_for_each_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "t5":
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    else:
        monkeypatch.setattr(testing, "both_directions", lambda method: [method])
    if name != "fox":
        monkeypatch.setattr(testing, "check_layers", lambda model: None)
    check_position_method(name, **WHOLE[name])


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WHOLE])
def test_methods_with_other_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They enter where another one does; its formula is tested in positions/."""
    if name != "dape":
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    method = make_position(name, **SIZES, options=OPTIONS.get(name, {}))
    for check in (check_finite, check_bounds):
        check(method.at_length(64))
    check_few_tokens(method.at_length(64))  # a power of the distance 0 may have no gradient
    own = OWN.get(name, [])
    model = SmallModel(method) if {*own} & {*OF_MODEL} else None
    for check in own:
        check(model if check in OF_MODEL else method)


def test_slopes_of_two_sides() -> None:
    options = {"slopes_after": "closed_form", "alibi_bias_max": 16.0}
    method = make_position("alibi_learned", **SIZES, causal=False, options=options)
    for check in (check_blocks, check_tiles, check_bounds):
        check(method)


@dataclasses.dataclass(frozen=True)
class SaysShifts(Sinusoidal):
    """Declares what it lacks."""

    shift_invariant = True


class LaterBias(Bias):
    """Its head axis is declared where there is none."""

    table: jax.Array = per_head(axis=1)

    def __call__(self, query_positions, key_positions):
        return jnp.broadcast_to(
            self.table[:, :1, None], (self.table.shape[0], query_positions.size, key_positions.size)
        )


@dataclasses.dataclass(frozen=True)
class WrongAxis(PositionMethod):
    def bias(self, params):
        return LaterBias(jnp.arange(16.0).reshape(4, 4))


class WrongTerm(FoxBias):
    @property
    def key_term(self):
        return self.of_keys


@dataclasses.dataclass(frozen=True)
class AddsOtherKeys(Fox):
    def content_bias(self, params, query, of_queries, of_keys):
        return WrongTerm(of_queries, of_keys)


@dataclasses.dataclass(frozen=True)
class LooksAhead(PositionMethod):
    """Adds to each token what stands one position behind it."""

    def embed(self, params, x, positions):
        return x + jnp.roll(x, -1, axis=-2)


class OfDistance(DistanceBias):
    """One number a distance, for all heads but the first: there it is 0."""

    m: jax.Array = per_head()
    kind: str = static(default="log")

    def at(self, distance):
        distance = jnp.asarray(distance).astype(jnp.float32)
        values = {
            "log": -distance * jnp.log(distance),  # 0 times -inf
            "pole": 1 / (7.0 - distance),
            "others": jnp.where(distance == 0, -jnp.inf, -distance),
            "near": jnp.where(distance > 3, -jnp.inf, -distance),
        }[self.kind]
        later = (jnp.arange(self.m.size) > 0).reshape(-1, *(1,) * values.ndim)
        return jnp.where(later, values, 0.0) * self.m.reshape(later.shape)


@dataclasses.dataclass(frozen=True)
class NotFinite(PositionMethod):
    kind: str = "log"

    def bias(self, params):
        return OfDistance(jnp.ones(self.num_heads), self.kind)


class RootBias(DistanceBias):
    m: jax.Array = per_head()

    def at(self, distance):
        return -jnp.sqrt(jnp.multiply.outer(self.m, distance))


class SlopedBias(T5Bias):
    """T5's bias and a slope, which far keys feel too."""

    level_from = 32

    def at(self, distance):
        return super().at(distance) - 0.1 * distance[None]


@dataclasses.dataclass(frozen=True)
class FalselyLevel(T5):
    def bias(self, params):
        return SlopedBias(params["table"], self.farthest, signed=not self.causal)


@dataclasses.dataclass(frozen=True)
class InfiniteGradient(PositionMethod):
    """The root's slope at distance 0 is infinite, and 0 times that is no number."""

    def init(self, key):
        return {"m": jnp.ones(self.num_heads)}

    def bias(self, params):
        return RootBias(params["m"])


@dataclasses.dataclass(frozen=True)
class Delays(PositionMethod):
    """Gives each token the vector of the one before it, and not its own."""

    def embed(self, params, x, positions):
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


@dataclasses.dataclass(frozen=True)
class CountsInside(PositionMethod):
    """Counts tokens by itself in place of taking the positions that it is given."""

    def queries(self, params, query, positions, kept):
        return query * (1.0 + jnp.arange(query.shape[1], dtype=query.dtype)[None, :, None, None])


@dataclasses.dataclass(frozen=True)
class KeepsMean(PositionMethod):
    """Turns queries by the mean over all tokens, with a gate that is zero at first."""

    def init(self, key):
        return {"gate": jnp.zeros(())}

    def keep(self, params, x, key, padding, before, segments=None):
        return jnp.broadcast_to(x.mean(1, keepdims=True)[..., :1], key.shape[:3])

    def queries(self, params, query, positions, kept):
        return query * jnp.cos(params["gate"] * kept)[..., None]


@dataclasses.dataclass(frozen=True)
class RunningSum(PositionMethod):
    """Queries and keys grow and shrink with a feature's sum over the tokens so far."""

    takes_shared_keys = False  # each head has its own sum

    forgets: bool = False
    leaks: bool = False

    def keep(self, params, x, key, padding, before, segments=None):
        of_tokens = jnp.where(False if padding is None else padding[..., None], 0.0, x[..., :1])
        sums = jnp.cumsum(of_tokens, axis=1) + jnp.zeros(self.num_heads)[None, None]
        if segments is not None and not self.leaks:
            same = jnp.tril(segments[:, :, None] == segments[:, None])
            sums = jnp.einsum("bij,bjh->bih", same, jnp.broadcast_to(of_tokens, sums.shape))
        return sums if before is None or self.forgets else sums + before[:, None]

    def queries(self, params, query, positions, kept):
        return (query * jnp.cos(kept)[..., None]).astype(query.dtype)

    def keys(self, params, key, positions, kept):
        return (key * jnp.sin(kept)[..., None]).astype(key.dtype)


def test_the_cache_keeps_the_newest_tokens_data_alone_where_no_bias_reads_the_rest() -> None:
    sizes = "model.num_layers=1,model.width=32,model.num_heads=4"
    model = build_model(make_config(f"position={__name__}:RunningSum,{sizes}"), 40)
    tokens = jnp.zeros((2, 19), jnp.int32)
    held = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, decode=True)["cache"])
    held = held["layers_0"]["held"]
    assert (held.key.shape, held.kept.shape) == ((2, 4, 8, 19), (2, 1, 4))


class FutureGates(Bias):
    """Its logits of queries with all keys, which each tile gets whole, are gates of later keys."""

    query: jax.Array = per_query()
    keys: jax.Array = flax.struct.field(metadata={"axes": {"batch": 0, "heads": 2}})
    vectors: jax.Array = shared()

    def __call__(self, query_positions, key_positions):
        logits = jnp.einsum("bqhd,bkhd->bhqk", self.query, self.keys) * self.query.shape[-1] ** -0.5
        later = jnp.arange(self.keys.shape[1])[None] >= query_positions[:, None]
        counted = jnp.where(later[None, None], jax.nn.sigmoid(logits), 0.0).sum(axis=-1)
        nearer = (query_positions[:, None] - key_positions[None])[None, None]
        strength = jnp.einsum("bqhd,d->bhq", self.query, self.vectors)
        return strength[..., None] * jnp.tanh(counted)[..., None] * nearer


@dataclasses.dataclass(frozen=True)
class ReadsAllKeys(PositionMethod):
    """As a method had to before whole rows were given: each tile gets all keys by a field of its own.

    The vectors begin at zero, so that nothing wrong shows before they are trained.
    """

    takes_shared_keys = False

    def init_layer(self, key):
        return {"vectors": jnp.zeros(self.head_dim)}

    def keep(self, params, x, key, padding, before, segments=None):
        return key.astype(jnp.float32)

    def content_bias(self, params, query, of_queries, of_keys):
        return FutureGates(query.astype(jnp.float32), of_keys, params["vectors"])


class FalselyBoundedBias(BamBias):
    """With a power below zero it rises with the distance."""

    bounded = True


@dataclasses.dataclass(frozen=True)
class FalselyBounded(Bam):
    def bias(self, params):
        bias = super().bias(params)
        return FalselyBoundedBias(bias.scale, bias.power, bias.mean, self.epsilon)


class HeavyRows(Bias):
    """Sigmoids of many keys sum to more than 1."""

    reads_rows = True
    gives_weights = True

    def of_rows(self, logits, visible, query_positions, key_positions):
        return jax.nn.sigmoid(logits)


class LostCarryBias(StickBreaking):
    """Each tile begins anew."""

    def of_tile(self, logits, visible, query_positions, key_positions, carry):
        return super().of_tile(logits, visible, query_positions, key_positions, 0.0 * carry)


@dataclasses.dataclass(frozen=True)
class Heavy(PositionMethod):
    def bias(self, params):
        return HeavyRows()


@dataclasses.dataclass(frozen=True)
class LostCarry(PositionMethod):
    def bias(self, params):
        return LostCarryBias()


@pytest.mark.parametrize(
    ("method", "options", "check", "message"),
    [
        (
            SaysShifts,
            {},
            check_shift,
            "shift_invariant .* the features of token 0",
        ),
        (FalselyLevel, {}, check_level, "its bias changes beyond level_from=32"),
        (FalselyBounded, {}, check_bounds, "its bias exceeds upper_bound in head"),
        (
            WrongAxis,
            {},
            check_blocks,
            "heads 2 and 3, queries 4 to 6 and keys 1 to 6",
        ),
        (
            AddsOtherKeys,
            {},
            check_blocks,
            "key_term",
        ),
        (
            InfiniteGradient,
            {},
            check_tiles,
            "attention's parameters/m is not finite by the dense formula",
        ),
        (LooksAhead, {}, check_causality, "in a sequence of 2 tokens, token 0 depends on token 1"),
        # Vectors of zeros once hid it.
        (ReadsAllKeys, {}, check_causality, "in a sequence of 3 tokens, token 1 depends on"),
        (
            CountsInside,
            {},
            check_cache,
            "with a cache.*, token 1, in a prompt of two pieces, is off by",
        ),
        (
            RunningSum,
            {"forgets": True},
            check_cache,
            "with a cache, token 4, in a prompt of two",
        ),
        (
            RunningSum,
            {"leaks": True},
            check_segments,
            "with a segment from token 9 on, token 10 depends on tokens",
        ),
        (Heavy, {}, check_finite, "HeavyRows .*sum to"),
        (LostCarry, {}, check_tiles, "attention by blocked.* differs from the dense formula"),
    ],
)
def test_what_a_method_lacks_is_named_with_the_smallest_example(
    method: type, options: dict[str, bool], check: Callable, message: str
) -> None:
    made = make_position(method, **SIZES, options=options)
    assert_refused(
        message,
        lambda: check(SmallModel(made) if check in OF_MODEL else made),
        raised=PositionMethodError,
    )


@pytest.mark.slow
def test_the_checker_names_the_first_check_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(
        "Delays: the features of token 0",
        check_position_method,
        Delays,
        raised=PositionMethodError,
    )
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("check_half_precision: passed in ")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (NotFinite, {}, r"its bias is nan in head 1 at distance 0 \(query 0, key 0\); it must be"),
        (
            NotFinite,
            {"kind": "pole"},
            r"its bias is inf in head 1 at distance 7 \(query 127, key 120\)",
        ),
        (
            NotFinite,
            {"kind": "others"},
            r"its bias is -inf in head 1 at distance 0 \(query 0, key 0\)",
        ),
        (NotFinite, {"kind": "near"}, ""),  # hides far keys, and may
        (InfiniteGradient, {}, "the gradient by m of its first 12 tokens is not finite"),
        (LooksAhead, {}, "not causal: in a sequence of 12 tokens, token 10 depends on token 11"),
        (KeepsMean, {}, "not causal: in a sequence of 12 tokens, token 1 depends on token 11"),
        (RunningSum, {}, ""),
        ("learned", {}, ""),
    ],
)
def test_a_method_is_looked_at_before_it_is_trained(method, options: dict, message: str) -> None:
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 128}
    made = make_position(method, **sizes, options=options)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_finite(made, moved=0.0)
        check_few_tokens(made)


class Transposed(Bias):
    m: jax.Array = per_head()

    def __call__(self, query_positions, key_positions):
        return jnp.zeros((self.m.size, key_positions.size, query_positions.size))


class Counts(Bias):
    """Distances as they are."""

    m: jax.Array = per_head()

    def __call__(self, query_positions, key_positions):
        distance = query_positions[:, None] - key_positions[None]
        return jnp.broadcast_to(-distance, (self.m.size, *distance.shape))


class Misdeclared(Bias):
    """Has one number a head, and no second axis."""

    m: jax.Array = per_head(axis=1)
    kind: str = shared()

    def __call__(self, query_positions, key_positions):
        return jnp.zeros((4, query_positions.size, key_positions.size))


class NoTile(Bias):
    m: jax.Array = per_head()
    reads_rows = True
    carried = 1


class NoRows(NoTile):
    carried = 0


class Silent(Bias):
    m: jax.Array = per_head()


class Unbounded(Bias):
    m: jax.Array = per_head()
    bounded = True

    def __call__(self, query_positions, key_positions):
        return jnp.zeros((self.m.size, query_positions.size, key_positions.size))


class AddsNothing(Unbounded):
    bounded = False
    adds_values = True


class NoFunction(DistanceBias):
    m: jax.Array = per_head()


@dataclasses.dataclass(frozen=True)
class Lacking(PositionMethod):
    kind: str = "Silent"

    def bias(self, params):
        m = jnp.ones(4)
        made = {
            "array": functools.partial(jnp.zeros, (4, 2, 3)),
            "axis": functools.partial(Misdeclared, m, jnp.ones(())),
            "text": functools.partial(Misdeclared, m[None], "text"),
        }
        classes = (Transposed, Counts, Silent, NoFunction, Unbounded, AddsNothing, NoTile, NoRows)
        made |= {bias.__name__: functools.partial(bias, m) for bias in classes}
        return made[self.kind]()


@dataclasses.dataclass(frozen=True)
class Twice(PositionMethod):
    def init(self, key):
        return {"scale": jnp.ones(())}

    def init_layer(self, key):
        return {"scale": jnp.ones(())}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("array", r"must be an alibi.positions.Bias, and is an array"),
        ("Transposed", r"Transposed.__call__ .* returned float32\[4, 3, 2\]; it must return"),
        ("Counts", r"returned int32\[4, 2, 3\]; .*, here float32\[4, 2, 3\]"),
        ("axis", r"Misdeclared.m \(.*test_testing.py:\d+\) is an array of shape \[4\], and it "),
        ("text", r"Misdeclared.kind \(.*test_testing.py:\d+\) is 'text', and it declares an array"),
        ("Silent", r"Silent needs __call__\(query_positions, key_positions\)"),
        ("NoFunction", r"NoFunction needs at\(distance\)"),
        ("Unbounded", r"Unbounded is bounded and needs upper_bound\(blocks\)"),
        ("AddsNothing", r"AddsNothing adds values and needs of_values\(weights, ...\)"),
        ("NoTile", r"bias.py.* NoTile declares a carry and needs of_tile\(logits, visible"),
        ("NoRows", r"bias.py.* NoRows reads rows and needs of_rows\(logits, visible"),
    ],
)
def test_what_a_bias_lacks_is_named_when_its_method_is_made(kind: str, message: str) -> None:
    assert_refused(
        f":Lacking'.*{message}",
        make_position,
        f"{__name__}:Lacking",
        **SIZES,
        options={"kind": kind},
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_package.file:Method",
            r"position=no_such_package.file:Method: No module named .*package.module:Class",
        ),
        ("alibi.slopes:Nothing", "has no attribute 'Nothing'"),
        ("alibi.slopes:alibi_slopes", "is no subclass of alibi.positions.PositionMethod"),
        (f"{__name__}:Bare", "has decay, which are no options of it; put @dataclasses.dataclass"),
        (f"{__name__}:Twice", "init and init_layer both make scale"),
    ],
)
def test_a_method_from_outside_that_is_none_is_refused(name: str, message: str) -> None:
    assert_refused(message, make_position, name, **SIZES)


class Bare(PositionMethod):
    """No dataclass of its own, so that its option is none."""

    decay: float = 0.5
