"""The other methods against formulas written out in NumPy, and the registry."""

import contextlib
import dataclasses
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_slopes
from alibi.config import ModelConfig, make_config
from alibi.config.classes import installed
from alibi.config.fields import annotations, checked
from alibi.model.decoder import build_model
from alibi.model.positions import randomised_positions
from alibi.positions import (
    METHODS,
    DistanceBias,
    PositionMethod,
    make_position,
    method_class,
    per_head,
)
from alibi.positions.rotary import Rotary
from alibi.positions.t5 import causal_buckets
from tests.refusals import assert_refused


def make(name: str, **options: object) -> PositionMethod:
    return make_position(name, num_heads=4, head_dim=8, width=32, train_length=16, options=options)


def test_sinusoidal_is_the_papers_code() -> None:
    """Sines then cosines, positions from 2, half - 1 in the exponent: each is easy to get wrong."""
    embedded = jax.jit(make("sinusoidal").embed)({}, np.zeros((1, 5, 32), np.float32), np.arange(5))
    embedding = np.asarray(embedded)[0]
    for position in range(5):
        for i in range(16):
            angle = (position + 2) * np.exp(-i * np.log(10_000) / 15)
            np.testing.assert_allclose(embedding[position, i], np.sin(angle), atol=1e-6)
            np.testing.assert_allclose(embedding[position, 16 + i], np.cos(angle), atol=1e-6)


def test_learned_table_ends_at_the_training_length() -> None:
    method = make("learned")
    params = jax.jit(method.init)(jax.random.key(0))
    assert params["table"].shape == (16, 32)
    x, embed = np.ones((2, 3, 32), np.float32), jax.jit(method.embed)
    rows = np.asarray(params["table"])[4:7]
    np.testing.assert_allclose(embed(params, x, np.asarray([4, 5, 6])), x + rows[None], rtol=1e-6)
    outside = embed(params, x, np.asarray([15, 16, -1]))
    assert np.isnan(outside).any(axis=(0, 2)).tolist() == [False, True, True], (
        "never a neighbour's row"
    )
    for longest, longer in ((16, method), (32, make("learned", num_positions=32))):
        longer.check_length(longest)
        assert_refused(
            f"{longest} positions .* use {longest} or fewer", longer.check_length, longest + 1
        )


def test_the_config_in_each_docstring_makes_the_method() -> None:
    for name in METHODS:
        keys = re.search(r"Config: `(.*)`", method_class(name).__doc__ or "")[1]
        model = build_model(make_config(f"{keys},length=128"), 256)
        assert type(model.pattern[0].position) is method_class(name)


def test_random_slopes_are_options_of_the_method() -> None:
    np.testing.assert_array_equal(
        make("alibi", slopes="random", draw=3).bias({}).slopes, alibi_slopes(4, "random", 3)
    )


def test_slopes_may_differ_by_layer() -> None:
    config = (
        "length=8,position=alibi_by_layer,position_options.factor=1.0:0.5:0.0,model.num_layers=3"
    )
    layers = build_model(make_config(config), 256).pattern
    of_layers = [kind.position.bias({}).slopes for kind in layers]
    expected = [factor * alibi_slopes(8) for factor in (1.0, 0.5, 0.0)]
    np.testing.assert_allclose(of_layers, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "alibi_learned"])
def test_a_list_of_slopes_is_an_option(name: str) -> None:
    method = make(name, slopes=[0.5, 0.25, 0.125, 1])
    assert hash(method) == hash(make(name, slopes=(0.5, 0.25, 0.125, 1)))
    params = method.init(jax.random.key(0))
    np.testing.assert_allclose(method.bias(params).slopes, [0.5, 0.25, 0.125, 1.0], rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "options", "needed"),
    [
        ("alibbi", {}, "unknown position method 'alibbi'; did you mean 'alibi'"),
        ("t5", {"num_bucket": 3}, "no option 'num_bucket'; did you mean 'num_buckets'"),
        ("none", {"bucket": 3}, "no option 'bucket'; it has none"),
        # The field's other names are not the nearest by letters: those of RoPE are pope and none.
        ("RoPE", {}, "RoPE'; did you mean 'rotary'? there are: alibi,"),
        ("NoPE", {}, "NoPE'; did you mean 'none'? there are: alibi,"),
        ("kerple", {}, "kerple'; did you mean 'kerple_log'? there are: alibi,"),
        ("xyzzy", {}, "unknown position method 'xyzzy'; there are: alibi,"),
        ("sinusoid", {}, "did you mean 'sinusoidal'"),
        ("t5", {"num_buckets": None}, "must be of type int, such as 32"),
        (
            "t5",
            {"max_distance": [128, 64]},
            "option max_distance=(128, 64) of position method 't5' must be of type int",
        ),
        ("t5", {"max_distance": 128.0}, "must be of type int, such as 0"),
        ("shaw", {"max_distance": True}, "must be of type int, such as 16"),
        ("shaw", {"values": 1}, "must be of type bool, such as False"),
        (
            "kerple_power",
            {"exponent": "two"},
            "option exponent='two' of position method 'kerple_power' must be of type",
        ),
        ("kerple_power", {"exponent": True}, "must be of type float | None"),
        ("rotary_interpolated", {"factor": "four"}, "must be of type float | None"),
        ("rotary", {"base": (1.0, 2.0)}, "must be of type float, such as 10000.0"),
        (
            "rotary",
            {"base": float("nan")},
            "option base=nan of position method 'rotary' must be 0 or of a size from 1.2e-38",
        ),
        (
            "xpos",
            {"scale_base": 1e308},
            "must be 0 or of a size from 1.2e-38 to 3.4e+38, as in float32",
        ),
        (
            "sinusoidal",
            {"max_period": 1e-45},
            "option max_period=1e-45 of position method 'sinusoidal' must be 0 or of",
        ),
        (
            "rotary_ntk",
            {"factor": 10**400},
            "of position method 'rotary_ntk' must be 0 or of a size from",
        ),
        ("rotary", {"share_of": 3}, "must be of type str, such as 'features'"),
        (
            f"{__name__}:Elsewhere",
            {"size": "x"},
            "Elsewhere' must be of type int, such as",
        ),
        (
            "alibi",
            {"slopes": ("x", 1, 1, 1)},
            "must be of type str | tuple[float | int, ...], such as 'paper'",
        ),
        (
            "alibi",
            {"slopes": (True, 1, 1, 1)},
            "must be of type str | tuple[float | int, ...], such as 'paper'",
        ),
        (
            "alibi",
            {"causal": False, "slopes_after": {1, 2}},
            "must be of type str | tuple[float | int, ...] | None",
        ),
    ],
)
def test_unknown_names_and_options_of_another_type_are_named(
    name: str, options: dict[str, Any], needed: str
) -> None:
    sizes = {"num_heads": 4, "head_dim": 8, "width": 32, "train_length": 16}
    causal = options.pop("causal", True)
    assert_refused(re.escape(needed), make_position, name, **sizes, causal=causal, options=options)


def test_whole_numbers_have_a_largest_one() -> None:
    """Larger ones overflowed, or were arrays larger than memory, only when a run had begun."""
    for name in METHODS:
        kinds, options = annotations(method_class(name)), method_class(name).options()
        for option in (option for option in options if kinds[option] is int):
            for beyond in (2**40, 10**400):
                assert_refused(option, make, name, **{option: beyond})


@dataclasses.dataclass(frozen=True)
class Annotated(PositionMethod):
    """Options of a method from outside."""

    sizes: tuple[int, ...] = ()
    pair: tuple[str, float] = ("a", 1.0)
    limit: float | None = None
    absent: float = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Elsewhere(PositionMethod):
    """Its option's annotation is a name that only a type checker imports."""

    size: "Imported" = 3  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("option", "value", "taken"),
    [
        ("sizes", [1, 2], (1, 2)),
        ("sizes", 3, (3,)),
        ("sizes", (1.5,), None),
        ("pair", ["b", 2], ("b", 2.0)),
        ("pair", ("b",), None),
        ("limit", 2, 2.0),
        ("limit", None, None),
        ("absent", None, None),
    ],
)
def test_options_are_read_as_they_are_annotated(option: str, value: Any, taken: Any) -> None:
    annotated = dict(annotations(Annotated))
    refused = taken is None and value is not None
    with (
        pytest.raises(ValueError, match="must be of type") if refused else contextlib.nullcontext()
    ):
        got = checked(option, value, annotated[option], Annotated.options()[option])
        assert (got, type(got)) == (taken, type(taken))


def test_an_annotation_that_names_what_is_not_there_leaves_the_type_of_the_default() -> None:
    assert annotations(Elsewhere)["size"] is int
    assert (
        make_position(
            Elsewhere, num_heads=1, head_dim=2, width=2, train_length=4, options={"size": 5}
        ).size
        == 5
    )


def test_a_function_of_distance_is_evaluated_once_a_distance() -> None:
    """Also where positions are known only when the program runs, as in a cache with free slots."""
    asked = []

    class Counting(DistanceBias):
        slopes_of_heads: jax.Array = per_head()

        def at(self, distance):
            asked.append(np.shape(distance))
            return -self.slopes_of_heads.reshape(-1, *(1,) * jnp.ndim(distance)) * distance[None]

    q, k = jnp.asarray([[5, 6, 7, 8] * 2]), jnp.asarray([[*range(9), *[2**30] * 55]])
    bias = Counting(jnp.asarray([1.0, 2.0]))
    table = bias.tabulated(q, k)
    assert asked == [(64,)], "one value for each distance that 64 slots can have"
    got, pairs = jax.jit(lambda table, bias: (table(q, k), bias(q, k)))(table, bias)
    visible = np.asarray(k)[:, None, None, :] <= np.asarray(q)[:, None, :, None]
    np.testing.assert_array_equal(np.where(visible, got, 0), np.where(visible, pairs, 0))
    sides = [np.asarray(side)[0, :9] for side in (q, k)]
    assert np.isfinite(jax.jit(lambda table: table(*map(jnp.asarray, sides)))(table)).all()


@pytest.mark.parametrize("name", ["sandwich", "kerple_log"])
def test_a_function_of_distance_is_evaluated_once_a_distance_of_drawn_positions(name: str) -> None:
    """Known only when the program runs, they lie farther apart than there are tokens."""
    method = make(name)
    bias = method.bias(method.init(jax.random.key(0)))
    config = ModelConfig(max_position=300)
    drawn = randomised_positions(16, config, 2, jax.random.key(1))(np.arange(16))
    table = bias.up_to(299)
    assert table.tabulated(drawn, drawn) is table
    assert table.values.shape == (4, 300)
    got, pairs = jax.jit(lambda table, bias: (table(drawn, drawn), bias(drawn, drawn)))(table, bias)
    visible = np.tri(16, dtype=bool)
    np.testing.assert_allclose(np.where(visible, got, 0), np.where(visible, pairs, 0), atol=1e-4)


def test_randomised_positions_are_sorted_samples_without_replacement() -> None:
    """New ones for each sequence and key; each of the 64 positions as often as any other."""
    config = ModelConfig(max_position=64)
    place = jax.jit(lambda key: randomised_positions(16, config, 512, key)(np.arange(16)))
    drawn = np.asarray(place(jax.random.key(0)))
    assert drawn.shape == (512, 16)
    assert (np.diff(drawn, axis=1) > 0).all(), "ascending, so also distinct"
    assert (drawn.min(), drawn.max()) == (0, 63)
    assert len({tuple(row) for row in drawn}) == 512, "each sequence has its own"
    assert (drawn != np.asarray(place(jax.random.key(1)))).any(axis=1).all(), "and each key"
    counts = np.bincount(drawn.reshape(-1), minlength=64)
    # 512 draws with a chance of 16 in 64 each: 128 times, with a standard deviation of 9.8.
    assert abs(counts - 128).max() < 5 * 9.8


def test_what_shares_a_sample_of_positions() -> None:
    """A sequence's is the same in all layers; a batch, a layer and a test can have their own."""

    def drawn(depth: int | None, key: int | None = 0, **keys: object):
        config = ModelConfig(max_position=64, **keys)
        key = None if key is None else jax.random.key(key)
        return np.asarray(randomised_positions(16, config, 3, key, depth)(np.arange(16)))

    plain, batch = drawn(None), drawn(1, batch_draws=True)
    np.testing.assert_array_equal(drawn(1), plain)
    np.testing.assert_array_equal(batch, batch[:1].repeat(3, axis=0))
    np.testing.assert_array_equal(drawn(0, batch_draws=True), batch)
    layers = [drawn(depth, layer_draws=True) for depth in (None, 0, 1)]
    np.testing.assert_array_equal(layers[0], plain)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (layers[one] != layers[other]).any(axis=1).all()
    spread = (np.arange(16) + 1) * 65 // 17 - 1
    np.testing.assert_array_equal(drawn(0, None, layer_draws=True), spread)
    tests = [drawn(depth, None, layer_draws=True, test_draws=7) for depth in (0, 1)]
    for found in tests:
        assert (np.diff(found, axis=1) > 0).all()
        np.testing.assert_array_equal(found, found[:1].repeat(3, axis=0))
    assert len({tuple(row) for row in (*np.concatenate(tests), spread)}) == 3
    assert (drawn(0, None, test_draws=8) != drawn(0, None, test_draws=7)).any()


@pytest.mark.parametrize(
    ("name", "length", "options", "value", "expected"),
    [
        ("t5", 512, {}, "farthest", 128),  # Raffel et al. 2020
        ("t5", 3072, {}, "farthest", 768),
        ("t5", 32, {}, "farthest", 32),  # the buckets
        ("t5", 32, {"causal": False}, "farthest", 16),  # the buckets of a side
        ("t5", 32, {"max_distance": 128}, "farthest", 128),
        ("xpos", 1024, {}, "base_length", 512.0),  # Sun et al. 2022
        ("xpos", 128, {}, "base_length", 64.0),
        ("xpos", 128, {}, "max_length", 8_173),  # 160 b / ln 3.5
        ("xpos", 128, {"scale_base": 512.0}, "max_length", 65_391),
        ("yarn", 4096, {}, "fast_turns", 32.0),  # Peng et al. 2023
        ("yarn", 2048, {}, "fast_turns", 16.0),
        ("yarn", 128, {}, "fast_turns", 2.0),  # twice `slow`
        ("yarn", 128, {"slow": 4.0}, "fast_turns", 8.0),
        ("yarn", 8192, {"original_length": 4096}, "fast_turns", 32.0),
        ("yarn", 128, {"fast": 32.0}, "fast_turns", 32.0),
    ],
)
def test_lengths_are_a_share_of_the_training_length_as_in_their_source(
    name, length, options, value, expected
):
    sizes = {"num_heads": 2, "head_dim": 8, "width": 16, "train_length": length}
    causal = options.get("causal", True)
    options = {option: given for option, given in options.items() if option != "causal"}
    method = make_position(name, **sizes, causal=causal, options=options)
    assert getattr(method, value) == expected
    assert getattr(method.at_length(4 * length), value) == expected


@pytest.mark.parametrize(("length", "threshold"), [(2048, 512), (128, 32), (3, 1)])
def test_fire_starts_with_a_threshold_of_a_quarter_of_the_training_length(length, threshold):
    method = make_position("fire", num_heads=2, head_dim=8, width=16, train_length=length)
    assert method.bias(method.init_layer(jax.random.key(0))).threshold == threshold


def test_training_reaches_all_buckets_of_t5_that_any_distance_has():
    """With the source's 128 tokens, ten of 32 buckets would stay as they began at L = 32."""
    for length in (32, 64, 128, 512, 2048):
        method = make_position("t5", num_heads=2, head_dim=8, width=16, train_length=length)
        trained = causal_buckets(32, method.farthest)[:length]
        assert set(trained) == set(causal_buckets(32, method.farthest))
    assert 32 - len(set(causal_buckets(32, 128)[:32])) == 10


OWN = """import dataclasses
import jax
import jax.numpy as jnp
from alibi.positions import DistanceBias, PositionMethod, per_head

class Root(DistanceBias):
    scale: jax.Array = per_head()

    def at(self, distance):
        return {at}

@dataclasses.dataclass(frozen=True)
class Method(PositionMethod):
    def queries(self, params, query, positions, kept):
        return {queries}

    def bias(self, params):
        return Root(jnp.ones(self.num_heads))
"""


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"at": "-self.scale[:3, None] * jnp.sqrt(distance)"},
            "position method '{name}:Method': Root.at ({file}:10) fails: TypeError: mul got incompatible "
            "shapes for broadcasting: (3, 1), (2, 3); it must return [heads, *distance.shape]",
        ),
        (
            {"at": "self.missing"},
            "Root.at ({file}:10) fails: AttributeError: 'Root' object has no attribute 'missing'; it must return",
        ),
        (
            {"at": "-jnp.sqrt(distance)"},
            "Root.at ({file}:9) returned float32[2, 3]; it must return [heads, *distance.shape], here "
            "float32[4, 2, 3]",
        ),
        (
            {"at": "-jnp.multiply.outer(self.scale, distance).astype(jnp.float16)"},
            "Root.at ({file}:9) returned float16[4, 2, 3]; it must return [heads, *distance.shape], here float32[4,",
        ),
        (
            {"at": "-jnp.multiply.outer(jnp.arange(4), distance)"},
            "Root.at ({file}:9) returned int32[4, 2, 3]; it must return [heads, *distance.shape], here float32[4,",
        ),
        (
            {
                "def queries": "def init(self, key):\n        return {'m': jnp.arange(4)}\n\n    def queries"
            },
            "Method.init ({file}:14) returned int32[4]; it must return a dictionary of float32 arrays",
        ),
        (
            {"def queries": "def init(self, key):\n        return {'m': 0.5}\n\n    def queries"},
            "Method.init ({file}:14) returned float; it must return a dictionary of float32 arrays",
        ),
        ({"at": "None"}, "Root.at ({file}:9) returned NoneType; it must return"),
        (
            {"queries": "query.sum(-2)"},
            "Method.queries ({file}:14) returned float32[1, 3, 8]; it must return [batch, queries, heads, "
            "features], here float32[1, 3, 4]",
        ),
        (
            {"queries": "query.astype(jnp.bfloat16)"},
            "Method.queries ({file}:14) returned bfloat16[1, 3, 4, 8]; it must return [batch, queries, heads, "
            "features]",
        ),
        (
            {"at(self, distance)": "at(self)"},
            "Root.at ({file}:9) fails: TypeError: Root.at() takes 1 positional argument but 2 were given; it must",
        ),
        (
            {"positions, kept)": "positions)"},
            "Method.queries ({file}:14) fails: TypeError: Method.queries() takes 4 positional arguments but 5 were",
        ),
        (
            {"def queries": "keys: int = 3\n    def queries"},
            "Method.keys fails: TypeError: 'int' object is not callable; it must return",
        ),
    ],
)
def test_a_function_of_ones_own_that_fails_is_named_with_its_line(
    tmp_path, monkeypatch, changed: dict[str, str], message: str
) -> None:
    name = f"own_{abs(hash(message))}"
    file = tmp_path / f"{name}.py"
    whole = {"at": "-jnp.multiply.outer(self.scale, jnp.sqrt(distance))", "queries": "query"}
    text = OWN.format(**whole | {key: changed[key] for key in whole.keys() & changed.keys()})
    for old in changed.keys() - whole.keys():
        text = text.replace(old, changed[old])
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert_refused(re.escape(message.format(name=name, file=file)), make, f"{name}:Method")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sys.exit(0)", "the import of theirs fails ({file}:2): SystemExit: 0; mend the module"),
        ("1 / 0", "fails ({file}:2): ZeroDivisionError: division by zero; mend the module"),
        ("def f(:", "the import of theirs fails: SyntaxError: invalid syntax (theirs.py, line 2)"),
    ],
)
def test_a_module_that_fails_is_named(tmp_path, monkeypatch, line: str, message: str) -> None:
    """Also one that an installed package's entry point names; sys.exit(0) would be a success."""
    file = tmp_path / "theirs.py"
    file.write_text(f"import sys\n{line}\n")
    monkeypatch.setattr("alibi.config.classes.installed", lambda group: {"theirs": "theirs:Method"})
    monkeypatch.syspath_prepend(tmp_path)
    told = re.escape(message.format(file=file))
    for name in ("theirs", "theirs:Method"):
        assert_refused(f"^position={name}: .*{told}", make, name)


def test_a_name_of_the_library_stays_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a warning says how the installed package's method of that name is reached."""
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[alibi.positions]\nrotary = theirs.own:Rotary\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"rotary is this library's.*=theirs\.own:Rotary for"):
            assert method_class("rotary") is Rotary
    finally:
        installed.cache_clear()
