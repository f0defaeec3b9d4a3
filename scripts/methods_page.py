"""Writes docs/methods.md: what each position method is, where it enters, what it adds, and what was measured of it.

    python scripts/methods_page.py

Measured are what results/ holds: methods/results.jsonl of configs/sweeps/all_methods.py, methods/speed.json of
scripts/benchmark.py positions, and passkey/results.jsonl of configs/sweeps/passkey.py.
"""

import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax

# A clone works without being installed: python scripts/methods_page.py has only scripts/ on its path.
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from alibi.positions import METHODS, PositionMethod, make_position
from alibi.reporting.rows import Override, Row, latest, read_rows
from configs.sweeps import all_methods

PAGE = ROOT / "docs" / "methods.md"
ROWS = ROOT / "results" / "methods" / "results.jsonl"
SPEED = ROOT / "results" / "methods" / "speed.json"
KEYS = ROOT / "results" / "passkey" / "results.jsonl"
SIZES = {"num_heads": 4, "head_dim": 32, "width": 128, "train_length": 128}  # the quickstart's model, of 4 layers
LAYERS = 4
RUNS = {"randomised": "randomised-rotary"}  # what the sweep calls the runs of a method, if not by its name
# Whose cost stands for that of methods that only have other numbers in the same places.
COSTS = dict.fromkeys(("alibi_interpolated", "alibi_ntk"), "alibi")
COSTS |= dict.fromkeys(("rotary_interpolated", "rotary_ntk"), "rotary")

# Options that any method takes: their formula and source, and what has them in the results: a method, and the name of
# the series.
OPTIONS = (
    (
        "position_options.logit_scale=log_n",
        "queries times max(1, ln n / ln L), n the number of keys that they see",
        "Chiang and Cholak 2022, [arXiv 2202.12172](https://arxiv.org/abs/2202.12172)",
        (("rotary", "rotary-log-n"), ("none", "none-log-n")),
    ),
    (
        "position_options.logit_scale=ssmax",
        "queries times s_h ln n, s_h learned by each head of each layer",
        "Nakanishi 2025, [arXiv 2501.19399](https://arxiv.org/abs/2501.19399)",
        (("alibi", "alibi-ssmax"),),
    ),
    (
        "model.window=128",
        "a query sees the keys less than 128 behind it, itself among them",
        "Beltagy, Peters and Cohan 2020, [arXiv 2004.05150](https://arxiv.org/abs/2004.05150)",
        tuple((name, f"{name} with window 128") for name in ("alibi", "rotary", "sinusoidal")),
    ),
)

HEAD = """\
# Position methods

Every method of the registry, by the name that `--config=...:position=NAME` takes. Query i, key j <= i, head h of H; L
tokens in training, L' in the sequences at hand. "Enters" says which functions of
[the contract](../alibi/positions/base.py) it overrides. "Adds" counts parameters in the quickstart's model ({layers}
layers, {num_heads} heads of {head_dim}). What is added to logits is added
after their division by sqrt(head_dim), unless the formula says otherwise. All but `randomised` take
`position_options.logit_scale` (log n, SSMax) or a sliding window (`model.window`).

This page is made by `python scripts/methods_page.py`.
"""


def page() -> str:
    """The page, as Markdown."""
    rows, keys = latest(read_rows(ROWS)), latest(read_rows(KEYS))
    speeds = json.loads(SPEED.read_text()) if SPEED.exists() else []
    parts = [HEAD.format(layers=LAYERS, **SIZES), _overview()]
    parts += [_section(name, rows, keys, speeds) for name in METHODS]
    parts.append(_options(rows, keys))
    return "\n".join(parts)


def _overview() -> str:
    lines = ["| method | formula | enters | adds |", "|:--|:--|:--|--:|"]
    for name in METHODS:
        method = make_position(name, **SIZES)
        lines.append(f"| [`{name}`](#{name}) | {_about(method).formula} | {_enters(method)} | {_added(method):,} |")
    return "\n".join(lines) + "\n"


def _about(method: PositionMethod) -> Any:
    assert method.about is not None, f"{type(method).__name__} lacks `about`"
    return method.about


def _enters(method: PositionMethod) -> str:
    """Where position enters, by the functions that the class overrides."""
    if _overrides(type(method), "place"):
        return "positions"  # all else is the other method's, computed in another way
    places = {"embed": "embeddings", "queries": "queries", "keys": "keys", "bias": "logits"}
    places |= {"keep": "", "content_bias": "logits by content"}
    overridden = [word for name, word in places.items() if word and _overrides(type(method), name)]
    return ", ".join(overridden) or "nowhere"


def _overrides(kind: type[PositionMethod], function: str) -> bool:
    owner = next(one for one in kind.__mro__ if function in vars(one))
    return owner is not PositionMethod and owner.__module__ != "alibi.positions.around"


def _added(method: PositionMethod) -> int:
    key = jax.random.key(0)
    shared, of_layer = (jax.eval_shape(init, key) for init in (method.init, method.init_layer))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shared, of_layer)]
    return sizes[0] + LAYERS * sizes[1]


def _section(name: str, rows: list[Row], keys: list[Row], speeds: list[dict[str, Any]]) -> str:
    method = METHODS[name]
    about = _about(make_position(name, **SIZES))
    summary = " ".join((method.__doc__ or "").strip().split("\n\n")[0].split())
    options = ", ".join(f"`{option}={default!r}`" for option, default in method.options().items())
    trained = all_methods.METHODS.get(RUNS.get(name, name.replace("_", "-")), {})
    others = [
        f"`{key.split('.')[1]}={value!r}`" for key, value in trained.items() if key.startswith("position_options")
    ]
    cost = _cost(name, speeds) + (", with the default options" if others else "")
    measured_with = f" with {', '.join(others)}" if others else ""
    file = f"../alibi/positions/{method.__module__.rpartition('.')[2]}.py"
    return "\n".join(
        [
            f"## {name}\n",
            f"{summary}\n",
            f"- Formula: {about.formula}",
            f"- Options: {options or 'none'} ([source code]({file}))",
            f"- Source: {about.source}",
            f"- Caveats: {about.caveats}",
            f"- Measured{measured_with}: {_extrapolation(_of_method(name, rows))}; "
            f"{_keys_found(_of_method(name, keys))}; {cost}",
            "",
        ]
    )


def _options(rows: list[Row], keys: list[Row]) -> str:
    """The options of any method, with what was measured of some methods that had them."""

    def measured(series: str) -> str:
        of_run, asked = ([row for row in some if row.series == series] for some in (rows, keys))
        return f"{_extrapolation(of_run)}; {_keys_found(asked)}"

    lines = ["## Options of any method", ""]
    for option, formula, source, measurements in OPTIONS:
        lines += [f"- `{option}`: {formula}. {source}"]
        for plain, series in measurements:
            lines += [f"  - [`{plain}`](#{plain}) with it: {measured(series)}."]
    return "\n".join(lines) + "\n"


def _extrapolation(found: list[Row]) -> str:
    """Bits per byte at L and 16 L, and what the same tokens gain by 16 L: means over seeds."""
    if not found:
        return "extrapolation not yet"
    length, seeds = found[0].train_length, len({row.seed for row in found})

    def mean(times: int, value: Callable[[Row], float | None]) -> float | None:
        values = [one for row in found if row.eval_length == times * length and (one := value(row)) is not None]
        return statistics.fmean(values) if values else None

    def of_the_text(row: Row) -> float | None:  # of the whole text, not of the tokens that all lengths have in common
        return row.bits_per_byte if row.context_use is None and row.passkey is None else None

    bits = [mean(times, of_the_text) for times in (1, 16)]
    told = ["none" if one is None else f"{one:.3f}" for one in bits]
    gain = mean(16, lambda row: row.context_use.gain_nats if row.context_use else None)
    used = "" if gain is None else f", where the same tokens gain {gain:+.4f} nats"
    about = f"L = {length}, {seeds} seed{'s' * (seeds > 1)}, {found[0].step:,} updates"
    return f"bits per byte {told[0]} at L and {told[1]} at 16 L{used} ({about})"


def _keys_found(rows: list[Row]) -> str:
    """Shares of keys that runs on books with keys find, in windows of L and far beyond: means over seeds."""
    found = [row for row in rows if row.passkey is not None]
    if not found:
        return "keys not asked for"

    def share(times: int, distance: int) -> str | None:
        cells = [row for row in found if row.eval_length == times * row.train_length]
        values = [row.passkey.accuracy for row in cells if row.passkey.distance == distance and not row.error]
        return f"{statistics.fmean(values):.0%}" if values else None

    seeds = len({row.seed for row in found})
    about = f"books with keys, {seeds} seed{'s' * (seeds > 1)}, {found[0].step:,} updates"
    at_length, near, far = share(1, 64), share(8, 64), share(8, 512)
    if at_length == "0%":
        return f"it has not learned to find keys, not even within L ({about})"
    beyond = "and can't be asked at 8 L" if near is None else f"at 8 L {near} of those, and {far} of the keys 512 back"
    return f"it finds {at_length} of the keys 64 tokens back at L, {beyond} ({about})"


def _of_method(name: str, rows: list[Row]) -> list[Row]:
    """Of runs that were trained with the method, or else of those that were tested as it."""
    series = RUNS.get(name, name.replace("_", "-"))
    found = [row for row in rows if row.override is None and row.series == series]
    return found or [row for row in rows if row.override == Override(name)]


def _cost(name: str, speeds: list[dict[str, Any]]) -> str:
    """How many times as fast as without positions a model is trained, at each length."""
    measured = COSTS.get(name, name)
    found = [row for row in speeds if row["contender"] == measured and row["run"]["of_none"]]
    if name == "none":
        return "the others' speeds are multiples of its own"
    if not found:
        return "cost not yet"
    shares = ", ".join(f"{row['run']['of_none']:.2f}" for row in found)
    lengths = ", ".join(f"{row['length']:,}" for row in found)
    like = "" if measured == name else f", like `{measured}`,"
    return f"it trains{like} at {shares} times the speed of `none` at {lengths} tokens"


def main() -> None:
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
