"""Writes docs/methods.md: each position method's formula, place in the model, parameters and
measurements.

    python -m tools.methods_page

The measurements are in results/: methods/results.jsonl from configs/sweeps/all_methods.py,
methods/speed.json from `python -m benchmarks positions`, and passkey/results.jsonl from
configs/sweeps/passkey.py.
"""

import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax

from alibi.cli import command_line
from alibi.config.override import Override
from alibi.evaluation.context_use import CONTEXT_GAIN
from alibi.positions import METHODS, PositionMethod, make_position, method_class
from alibi.reporting.measure import measure_of
from alibi.reporting.rows import Row, latest, read_rows
from alibi.reporting.tables import BITS_PER_BYTE
from benchmarks.positions import LEFT_OUT
from configs.sweeps import all_methods, passkey, passkey_late
from tools import ROOT

PAGE = ROOT / "docs" / "methods.md"
ROWS = ROOT / "results" / "methods" / "results.jsonl"
SPEED = ROOT / "results" / "methods" / "speed.json"
KEYS = ROOT / "results" / "passkey" / "results.jsonl"
VARIANTS = ROOT / "results" / "variants" / "results.jsonl"
COMPARED = ("pope", "selective-rope", "alibi", "rotary")
# the quickstart's model, of 4 layers
SIZES = {"num_heads": 4, "head_dim": 32, "width": 128, "train_length": 128}
LAYERS = 4
# Methods whose speed was not measured cost as much as these, of the same form.
COSTS = {name: name.partition("_")[0] for name in LEFT_OUT}

# Options of any method: formula, source, and the results with the option: a method, and the name of
# its series.
OPTIONS = (
    (
        "model.logit_scale=log_n",
        "logits with their bias times ln n / ln L, n the number of keys that the query sees",
        "Chiang and Cholak 2022, [arXiv 2202.12172](https://arxiv.org/abs/2202.12172)",
        (("rotary", "rotary-log-n-trained"), ("none", "none-log-n-trained")),
    ),
    (
        "model.logit_scale=log_n_beyond",
        "queries times max(1, ln n / ln L), so nothing changes within the training length",
        "Qwen 2023, [arXiv 2309.16609](https://arxiv.org/abs/2309.16609), LogN-Scaling",
        (("rotary", "rotary with logit scale log_n_beyond"), ("none", "none-log-n")),
    ),
    (
        "model.logit_scale=ssmax",
        "logits with their bias times s_h ln n, s_h learned by each head of each layer, from 1 / mean of ln n on",
        "Nakanishi 2025, [arXiv 2501.19399](https://arxiv.org/abs/2501.19399)",
        (("alibi", "alibi-ssmax-logits"),),
    ),
    (
        "model.logit_scale=ssmax_queries",
        "queries times s_h ln n, s_h from 1 / mean of ln n on; the bias stays as it is",
        "Nakanishi 2025, [arXiv 2501.19399](https://arxiv.org/abs/2501.19399), for the products alone",
        (("alibi", "alibi-ssmax"),),
    ),
    (
        "model.logit_scale=llama4",
        "queries times 1 + 0.1 ln(floor(n / L) + 1), n the number of keys that they see. Llama 4 has it, with 8,192 "
        "for L, in its layers without positions",
        "Meta AI 2025, [The Llama 4 herd](https://ai.meta.com/blog/llama-4-multimodal-intelligence/)",
        (),
    ),
    (
        "model.normalizer=sink",
        "exp(b_h) more in the denominator of the softmax, b_h learned by each head of each layer, from 0 on (gpt-oss "
        "draws it); softmax1: b_h = 0",
        "OpenAI 2025, [arXiv 2508.10925](https://arxiv.org/abs/2508.10925)",
        (),
    ),
    (
        "model.qk_norm=True",
        "queries and keys of each head at unit root mean square, times learned numbers, before position enters",
        "Qwen3, [arXiv 2505.09388](https://arxiv.org/abs/2505.09388)",
        (),
    ),
    (
        "model.attention_gate=True",
        "the result of each head times sigmoid(x W_h), x the layer's input",
        "Qiu et al. 2025, [arXiv 2505.06708](https://arxiv.org/abs/2505.06708)",
        (),
    ),
    (
        "model.logit_cap=50",
        "50 tanh(z / 50) for a scaled logit z, before its bias",
        "Gemma 2, [arXiv 2408.00118](https://arxiv.org/abs/2408.00118)",
        (),
    ),
    (
        "model.max_position=2048",
        "in training tokens stand at sorted random positions below 2048, otherwise evenly spread over them. Each "
        "sequence has one sample, which all layers share. Its authors draw one for each batch and layer, in tests, "
        "too: `model.batch_draws=True`, `model.layer_draws=True` and `model.test_draws=1`, a seed. Their tests draw "
        "anew for each batch; here all sequences share a sample, so that no result depends on the batch. The rows "
        "are without these options",
        "Ruoss et al. 2023, [arXiv 2305.16843](https://arxiv.org/abs/2305.16843)",
        (("rotary", "randomised-rotary"),),
    ),
    (
        "model.max_position=8192",
        "the same below 8192, four times the longest test, as in the source",
        "Ruoss et al. 2023, [arXiv 2305.16843](https://arxiv.org/abs/2305.16843)",
        (("rotary", "randomised-rotary-8192"),),
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
layers, {num_heads} heads of {head_dim}). What is added to logits is added after their division by sqrt(head_dim),
unless the formula says otherwise. Values and gradients are tested against float64 formulas, `transformers` and
`x-transformers`.

Every method takes one of `model.logit_scale` (log n, SSMax), `model.max_position` (randomised positions) and
`model.window` (a sliding window), and any of the other options below. Those that read whole rows of logits (`cope`,
`stick_breaking`, `dape` and both of entmax) take the scales of queries alone: `log_n_beyond`, `ssmax_queries` and
`llama4`.
[Layers may differ](training.md#layers-that-differ) in position method, options, window and `model.logit_scale`;
methods that enter the embeddings are the same in all layers.

For images: `alibi_grid` ([grids](attention.md#grids-and-free-tokens)).

Not here: LongRoPE, Self-Extend, PoSE, and windows that keep the first tokens too (StreamingLLM).

`python scripts/plot_bias.py --methods=all --heads=8 --length=64` draws the biases. A new method is
[one file](new-method.md), in this repository or outside. This page is made by `python -m tools.methods_page`.
"""

MEASURED = """\
## What was measured

The quickstart's model, trained at L = {length}:

- bits per byte of held-out books at L and at 16 L, after {steps:,} updates, means over {seeds} seeds
  ([intervals and figures](../results/methods/README.md)).
- gain: nats a token that the same tokens save by a context of 16 L in place of L; below zero, the longer one hurts.
- passkeys: the share that is found of those told 64 or 512 tokens before, in windows of L and of 8 L. The models were
  trained on books with passkeys for {of_keys:,} updates. Each share is of one seed, in the order of seeds 0, 1,
  2: a single one says little ([all of them](../results/passkey/README.md)). "Late": none in windows of L either
  ([after longer training](../results/passkey/README.md#trained-for-longer)).
- speed: that of training at 128, 512, 2,048 and 8,192 tokens, as a multiple of that of `none`. Differences below 0.05
  can be noise ([more](speed.md#position-methods)). Options are the defaults, but `max_distance` is 128 of `t5` and 16
  of `shaw`, `threshold=512` of `fire`, `scale_base=512` of `xpos`. The interpolated and NTK forms cost what `alibi` and
  `rotary` do.

`pope` and `selective_rope` have one run each, of {of_variants:,} updates ([variants](../results/variants/README.md)):
perplexity at 16 L is {ratios} of that at L.
The table has only dashes for them, since its other runs are longer. Any other method with dashes alone was not
measured.

| method | bits/byte, L | 16 L | gain | passkeys, 64 in L | 64 in 8 L | 512 in 8 L | speed, 128 | 512 | 2,048 | 8,192 |
|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
LENGTHS = (128, 512, 2_048, 8_192)  # at which speed was measured
ASKED = ((1, 64), (8, 64), (8, 512))  # windows, as multiples of L, and distances of passkeys


def page(rows: list[Row], keys: list[Row], speeds: list[dict[str, Any]]) -> str:
    """Returns the page as Markdown, with numbers from these rows: results, passkeys and speed."""
    parts = [
        HEAD.format(layers=LAYERS, **SIZES),
        _overview(),
        _measured(latest(rows), latest(keys), speeds),
    ]
    for name in METHODS:
        kind = method_class(name)
        about = kind.about
        assert about is not None, f"{name} lacks `about`"
        summary = " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())
        options = ", ".join(f"`{option}={default!r}`" for option, default in kind.options().items())
        file = f"../alibi/positions/{kind.__module__.rpartition('.')[2]}.py"
        parts.append(
            f"## {name}\n\n{summary}\n\n- Formula: {about.formula}.\n"
            f"- Options: {options or 'none'} ([source code]({file})).\n"
            f"- Source: {about.source}.\n- Caveats: {about.caveats}.\n"
        )
    parts.append("## Options of any method\n")
    parts += [f"- `{option}`: {formula}. {source}." for option, formula, source, _ in OPTIONS]
    return "\n".join(parts) + "\n"


def _overview() -> str:
    """Returns a line for each method: its formula, its places in the model and its parameters."""
    lines = ["| method | formula | enters | adds |", "|:--|:--|:--|--:|"]
    places = {
        "embed": "embeddings",
        "queries": "queries",
        "keys": "keys",
        "bias": "logits",
        "content_bias": "logits by content",
    }
    for name in METHODS:
        kind = method_class(name)
        owners = {
            function: next(owner for owner in kind.__mro__ if function in vars(owner))
            for function in places
        }
        enters = [
            places[function] for function, owner in owners.items() if owner is not PositionMethod
        ]
        method, key = make_position(name, **SIZES), jax.random.key(0)
        shared, of_layer = (
            jax.tree.leaves(jax.eval_shape(init, key)) for init in (method.init, method.init_layer)
        )
        added = sum(leaf.size for leaf in shared) + LAYERS * sum(leaf.size for leaf in of_layer)
        cells = [kind.about.formula, ", ".join(enters) or "nowhere", f"{added:,}"]
        lines.append(f"| [`{name}`](#{name}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _measured(rows: list[Row], keys: list[Row], speeds: list[dict[str, Any]]) -> str:
    """Returns a line for each method, and for each method measured with an option that all methods have."""
    lines = []
    for name in METHODS:
        for index, (options, is_of) in enumerate(_variants(name)):
            of_method, asked = (list(filter(is_of, measured)) for measured in (rows, keys))
            if index and not (of_method or asked):
                continue
            cells = [*_extrapolation(of_method), *_passkeys(asked), *_speed(name, speeds)]
            named = "".join(f", `{option}={value!r}`" for option, value in options.items())
            lines.append(f"| [`{name}`](#{name}){named} | {' | '.join(cells)} |")
    for option, _, _, measurements in OPTIONS:
        for plain, series in measurements:
            of_run, asked = (
                [row for row in measured if row.series == series] for measured in (rows, keys)
            )
            if not (of_run or asked):
                continue
            cells = [*_extrapolation(of_run), *_passkeys(asked), *_speed(series, speeds)]
            lines.append(
                f"| [`{plain}`](#{plain}), `{option.partition('.')[2]}` | {' | '.join(cells)} |"
            )
    variants = read_rows(VARIANTS)
    head = MEASURED.format(
        length=SIZES["train_length"],
        steps=max((row.step for row in rows), default=0),
        seeds=len({row.seed for row in rows}),
        of_keys=passkey.STEPS,
        of_variants=variants[0].step,
        ratios=", ".join(f"x{_ratio(variants, series):.2f} ({series})" for series in COMPARED),
    )
    return head + "\n".join(lines) + "\n"


def _ratio(rows: list[Row], series: str) -> float:
    """Returns a run's perplexity at 16 L over that at L."""
    at = {row.length: row.results["perplexity"] for row in rows if row.series == series}
    return at[16 * SIZES["train_length"]] / at[SIZES["train_length"]]


def _variants(name: str) -> list[tuple[dict[str, Any], Callable[[Row], bool]]]:
    """Returns the options under which a method was measured, in training or in tests of another
    method's runs, each with the condition for their rows.
    """
    variants: list[tuple[dict[str, Any], Callable[[Row], bool]]] = []
    for series in (name.replace("_", "-"), f"{name.replace('_', '-')}-relative"):
        if (keys := all_methods.METHODS.get(series)) is not None:
            options = {
                key.partition(".")[2]: value
                for key, value in keys.items()
                if key.startswith("position_options")
            }
            variants.append((options, functools.partial(_is_of, series, None)))
    for tested in (each for several in all_methods.TESTED_AS.values() for each in several):
        if tested.get("position") == name:
            options = tested.get("options", {})
            override = Override(name, tuple(sorted(options.items())))
            defaults = method_class(name).options()
            options = {key: value for key, value in options.items() if value != defaults[key]}
            variants.append((options, functools.partial(_is_of, "", override)))
    return variants or [({}, functools.partial(_is_of, name.replace("_", "-"), None))]


def _is_of(series: str, override: Override | None, row: Row) -> bool:
    return row.override == override and (override is not None or row.series == series)


def _extrapolation(rows: list[Row]) -> list[str]:
    """Returns bits per byte at L and 16 L, and the gain of the same tokens at 16 L: means over
    seeds.
    """
    cells = []
    entries = [entry for row in rows if row.is_measured for entry in measure_of(row).entries(row)]
    for times in (1, 16):
        at = [entry for entry in entries if entry.column == times * entry.row.train_length]
        # of the whole text, not of the tokens that all lengths have in common
        bits = [value for entry in at if (value := BITS_PER_BYTE.value(entry))]
        cells.append(f"{statistics.fmean(bits):.3f}" if bits else "-")
    gains = [value for entry in at if (value := CONTEXT_GAIN.value(entry)) is not None]
    return [*cells, f"{statistics.fmean(gains):+.4f}" if gains else "-"]


def _passkeys(rows: list[Row]) -> list[str]:
    """Returns the shares of found passkeys, one for each seed, or "late" if there may be more later."""
    cells = []
    for times, distance in ASKED:
        shares = [
            f"{row.results['accuracy']:.0%}"
            for row in sorted(rows, key=lambda row: row.seed)
            if row.evaluator == "passkey"
            and row.cell == {"length": times * row.train_length, "distance": distance}
            and row.is_measured
        ]
        cells.append(", ".join(shares) or "-")
    if rows and rows[0].series in passkey_late.STEPS:
        return ["late" if cell in ("0%", "0%, 0%, 0%") else cell for cell in cells]
    return cells


def _speed(name: str, speeds: list[dict[str, Any]]) -> list[str]:
    """Returns the training speed at each length, as a multiple of the speed without positions."""
    multiples = {
        row["length"]: row["run"]["of_none"]
        for row in speeds
        if row["contender"] == COSTS.get(name, name)
    }
    multiples |= dict.fromkeys(LENGTHS, 1.0) if name == "none" else {}
    return [f"{multiples[length]:.2f}" if multiples.get(length) else "-" for length in LENGTHS]


def main() -> None:
    PAGE.write_text(page(read_rows(ROWS), read_rows(KEYS), json.loads(SPEED.read_text())))
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    command_line.run(main)
