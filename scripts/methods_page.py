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

from alibi.cli import command_line
from alibi.config.override import Override
from alibi.positions import METHODS, PositionMethod, make_position
from alibi.reporting.rows import Row, latest, read_rows
from configs.sweeps import all_methods, passkey

PAGE = ROOT / "docs" / "methods.md"
ROWS = ROOT / "results" / "methods" / "results.jsonl"
SPEED = ROOT / "results" / "methods" / "speed.json"
KEYS = ROOT / "results" / "passkey" / "results.jsonl"
SIZES = {"num_heads": 4, "head_dim": 32, "width": 128, "train_length": 128}  # the quickstart's model, of 4 layers
LAYERS = 4
# Whose cost stands for that of methods that only have other numbers in the same places.
COSTS = dict.fromkeys(("alibi_interpolated", "alibi_ntk"), "alibi")
COSTS |= dict.fromkeys(("rotary_interpolated", "rotary_ntk"), "rotary")

# Options that any method takes: their formula and source, and what has them in the results: a method, and the name of
# the series.
OPTIONS = (
    (
        "model.logit_scale=log_n",
        "queries times max(1, ln n / ln L), n the number of keys that they see",
        "Chiang and Cholak 2022, [arXiv 2202.12172](https://arxiv.org/abs/2202.12172)",
        (("rotary", "rotary-log-n"), ("none", "none-log-n")),
    ),
    (
        "model.logit_scale=ssmax",
        "queries times s_h ln n, s_h learned by each head of each layer",
        "Nakanishi 2025, [arXiv 2501.19399](https://arxiv.org/abs/2501.19399)",
        (("alibi", "alibi-ssmax"),),
    ),
    (
        "model.max_position=2048",
        "in training tokens stand at sorted random positions below 2048, otherwise evenly spread over them",
        "Ruoss et al. 2023, [arXiv 2305.16843](https://arxiv.org/abs/2305.16843)",
        (("rotary", "randomised-rotary"),),
    ),
    (
        "model.window=128",
        "a query sees the keys less than 128 behind it, itself among them",
        "Beltagy, Peters and Cohan 2020, [arXiv 2004.05150](https://arxiv.org/abs/2004.05150)",
        tuple((name, f"{name} with window 128") for name in ("alibi", "rotary", "sinusoidal")),
    ),
)
# Of runs on passkeys that had more updates than most.
MARKS = {steps: "*" * number for number, steps in enumerate(sorted({*passkey.LATE.values()}), start=1)}

HEAD = """\
# Position methods

Every method of the registry, by the name that `--config=...:position=NAME` takes. Query i, key j <= i, head h of H; L
tokens in training, L' in the sequences at hand. "Enters" says which functions of
[the contract](../alibi/positions/base.py) it overrides. "Adds" counts parameters in the quickstart's model ({layers}
layers, {num_heads} heads of {head_dim}). What is added to logits is added after their division by sqrt(head_dim),
unless the formula says otherwise. Every method takes one of `model.logit_scale` (log n, SSMax), `model.max_position`
(randomised positions) and `model.window` (a sliding window).

This page is made by `python scripts/methods_page.py`.
"""

MEASURED = """\
## What was measured

The quickstart's model, trained at L = {length}:

- bits per byte of held-out books at L and at 16 L, after {steps:,} updates, means over {seeds} seeds
  ([deviations and figures](../results/methods/README.md));
- gain: nats a token that the same tokens save by a context of 16 L in place of L; below zero, the longer one hurts;
- passkeys: the share that is found of those told 64 or 512 tokens before, in windows of L and of 8 L, by models that
  were trained on books with passkeys, {key_seeds}, {of_keys:,} updates ({late})
  ([all distances](../results/passkey/README.md));
- speed: that of training at 128, 512, 2,048 and 8,192 tokens, with the default options (`shaw`: `max_distance=16`),
  as a multiple of that of `none`, in which differences below 0.05 can be noise ([more](speed.md#position-methods));
  the interpolated and NTK forms cost what `alibi` and `rotary` do.

| method | bits/byte, L | 16 L | gain | passkeys, 64 in L | 64 in 8 L | 512 in 8 L | speed, 128 | 512 | 2,048 | 8,192 |
|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
LENGTHS = (128, 512, 2_048, 8_192)  # at which speed was measured
ASKED = ((1, 64), (8, 64), (8, 512))  # windows, as multiples of L, and distances of passkeys


def page() -> str:
    """The page, as Markdown."""
    rows, keys = latest(read_rows(ROWS)), latest(read_rows(KEYS))
    speeds = json.loads(SPEED.read_text()) if SPEED.exists() else []
    parts = [HEAD.format(layers=LAYERS, **SIZES), _overview(), _measured(rows, keys, speeds)]
    parts += [_section(name) for name in METHODS]
    parts.append(_options())
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
    places = {"embed": "embeddings", "queries": "queries", "keys": "keys", "bias": "logits"}
    places |= {"keep": "", "content_bias": "logits by content"}
    overridden = [word for name, word in places.items() if word and _overrides(type(method), name)]
    return ", ".join(overridden) or "nowhere"


def _overrides(kind: type[PositionMethod], function: str) -> bool:
    owner = next(one for one in kind.__mro__ if function in vars(one))
    return owner is not PositionMethod


def _added(method: PositionMethod) -> int:
    key = jax.random.key(0)
    shared, of_layer = (jax.eval_shape(init, key) for init in (method.init, method.init_layer))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shared, of_layer)]
    return sizes[0] + LAYERS * sizes[1]


def _measured(rows: list[Row], keys: list[Row], speeds: list[dict[str, Any]]) -> str:
    """A line for each method, and for each method that was measured with an option of any."""
    lines = []
    for name in METHODS:
        with_options = "".join(f", `{option}`" for option in _trained_with(name))
        cells = [*_extrapolation(_of_method(name, rows)), *_passkeys(_of_method(name, keys)), *_speed(name, speeds)]
        lines.append(f"| [`{name}`](#{name}){with_options} | {' | '.join(cells)} |")
    for option, _, _, measurements in OPTIONS:
        for plain, series in measurements:
            of_run, asked = ([row for row in some if row.series == series] for some in (rows, keys))
            cells = [*_extrapolation(of_run), *_passkeys(asked), *_speed(series, speeds)]
            short = option.partition(".")[2]
            lines.append(f"| [`{plain}`](#{plain}), `{short}` | {' | '.join(cells)} |")
    key_seeds = len({row.seed for row in keys})
    head = MEASURED.format(
        length=SIZES["train_length"],
        steps=max(row.step for row in rows),
        seeds=len({row.seed for row in rows}),
        key_seeds="one seed" if key_seeds == 1 else f"{key_seeds} seeds",
        of_keys=passkey.STEPS,
        late=", ".join(f"{mark}: {steps:,}" for steps, mark in MARKS.items()),
    )
    return head + "\n".join(lines) + "\n"


def _trained_with(name: str) -> list[str]:
    """The options that the method was trained with, where these are not the defaults."""
    trained = all_methods.METHODS.get(name.replace("_", "-"), {})
    return [f"{key.split('.')[1]}={value!r}" for key, value in trained.items() if key.startswith("position_options")]


def _section(name: str) -> str:
    method = METHODS[name]
    about = _about(make_position(name, **SIZES))
    summary = " ".join((method.__doc__ or "").strip().split("\n\n")[0].split())
    options = ", ".join(f"`{option}={default!r}`" for option, default in method.options().items())
    file = f"../alibi/positions/{method.__module__.rpartition('.')[2]}.py"
    return "\n".join(
        [
            f"## {name}\n",
            f"{summary}\n",
            f"- Formula: {about.formula}",
            f"- Options: {options or 'none'} ([source code]({file}))",
            f"- Source: {about.source}",
            f"- Caveats: {about.caveats}",
            "",
        ]
    )


def _options() -> str:
    lines = ["## Options of any method", ""]
    lines += [f"- `{option}`: {formula}. {source}" for option, formula, source, _ in OPTIONS]
    return "\n".join(lines) + "\n"


def _extrapolation(found: list[Row]) -> list[str]:
    """Bits per byte at L and 16 L, and what the same tokens gain by 16 L: means over seeds."""

    def mean(times: int, value: Callable[[Row], float | None]) -> float | None:
        values = [
            one for row in found if row.eval_length == times * row.train_length and (one := value(row)) is not None
        ]
        return statistics.fmean(values) if values else None

    def of_the_text(row: Row) -> float | None:  # of the whole text, not of the tokens that all lengths have in common
        return row.bits_per_byte if row.context_use is None and row.passkey is None else None

    bits = [mean(times, of_the_text) for times in (1, 16)]
    gain = mean(16, lambda row: row.context_use.gain_nats if row.context_use else None)
    return [*("-" if one is None else f"{one:.3f}" for one in bits), "-" if gain is None else f"{gain:+.4f}"]


def _passkeys(rows: list[Row]) -> list[str]:
    """Shares of passkeys that are found, means over seeds; marked where the runs had more updates than most."""

    def share(times: int, distance: int) -> str:
        found = [row for row in rows if row.passkey is not None and row.eval_length == times * row.train_length]
        values = [row.passkey.accuracy for row in found if row.passkey.distance == distance and not row.error]
        mark = MARKS.get(max((row.step for row in found), default=0), "")
        return f"{statistics.fmean(values):.0%}{mark}" if values else "-"

    return [share(*asked) for asked in ASKED]


def _of_method(name: str, rows: list[Row]) -> list[Row]:
    """Of runs that were trained with the method, or else of those that were tested as it."""
    series = name.replace("_", "-")
    found = [row for row in rows if row.override is None and row.series == series]
    return found or [row for row in rows if row.override == Override(name)]


def _speed(name: str, speeds: list[dict[str, Any]]) -> list[str]:
    """How many times as fast as without positions a model is trained, at each length."""
    found = {row["length"]: row["run"]["of_none"] for row in speeds if row["contender"] == COSTS.get(name, name)}
    found |= dict.fromkeys(LENGTHS, 1.0) if name == "none" else {}
    return [f"{found[length]:.2f}" if found.get(length) else "-" for length in LENGTHS]


def main() -> None:
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    command_line.run(main)
