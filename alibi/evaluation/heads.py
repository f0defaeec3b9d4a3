"""Attention heads: where each one looks, how much the model needs it, and the bias it has.

A model may extrapolate because its heads read near tokens alone. Michel et al. 2019 (arXiv
1905.10650) measure a head through the loss without it. In BLOOM many heads do next to nothing (arXiv
2603.09616).
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from alibi.evaluation.base import NoResultError, Subject, Text, option
from alibi.evaluation.perplexity import OfText
from alibi.evaluation.windows import Windows, spread_windows
from alibi.objectives import make_objective
from alibi.reporting.intervals import six_digits
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import Kind, fact, result

LOCAL_SHARE = 0.01  # what a local head gives at most to tokens beyond distance 8


def _kind(title: str, write: str, name: str, axis: str = "", missing: str = "") -> Kind:
    return Kind(title, write.format, value=result(name), missing=missing, axis=axis)


@dataclasses.dataclass(frozen=True)
class Heads(OfText):
    """Each head's attention, as means over queries: its distance in tokens, its entropy over that of
    equal weights, and the mass on the first token and on the newest ones.
    """

    head_tokens: int = option(
        16_384, "tokens for the measures of heads, in windows spread evenly", at_least=1
    )

    kinds: ClassVar[tuple[Kind, ...]] = (
        _kind("Mean distance", "{:,.1f}", "distance", " of attention, tokens"),
        _kind("Entropy over log n", "{:.2f}", "entropy"),
        _kind("Mass on the first token", "{:.3f}", "first"),
        _kind("Mass on the newest 8 tokens", "{:.2f}", "near"),
        _kind("Mass on the newest 64 tokens", "{:.2f}", "newest 64"),
        _kind("Mass on the newest L tokens", "{:.2f}", "newest L"),
        _kind("Most mass beyond distance 8", "{:.3f}", "far", " of any query"),
        _kind("Mass on no token", "{:.2f}", "none", missing="needs a sink in each layer"),
        _kind("Slope", "{:.3g}", "slope", missing="needs a bias of slopes in each layer"),
    )
    labels: ClassVar[tuple[str, ...]] = ("head",)
    across: ClassVar = "layer"
    is_map: ClassVar = True

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.head_sums import attention_sums

        windows = self.windows_of(subject, text, row)
        sums = self.results(subject, text, row, windows, attention_sums)
        whole, choices = len(windows) * windows.length, sums.pop("choices").sum(axis=0)
        means = {name: x.sum(axis=0) / whole for name, x in sums.items()}
        means["entropy"] = sums["entropy"].sum(axis=0) / np.maximum(choices, 1)
        means["far"] = sums["far"].max(axis=0)
        if "slope" in sums:
            means["slope"] = sums["slope"][0]
        return self.of_heads(means) | {"local": float((means["far"] <= LOCAL_SHARE).mean())}

    # ---- parts that the other evaluators of heads share

    def windows_of(self, subject: Subject, text: Text, row: Row) -> Windows:
        """Returns whole windows, spread over the text."""
        length = row.cell["length"]
        most = max(1, min(self.head_tokens, len(text.tokens)) // length) * length
        return spread_windows(
            len(text.tokens), length, most, causal=make_objective(subject.run.config).causal
        )

    def results(
        self,
        subject: Subject,
        text: Text,
        row: Row,
        windows: Windows,
        of: Any,
    ) -> dict[str, Float[np.ndarray, "windows layers heads *values"]]:
        """Returns the arrays of `of` for all windows, in float64."""
        from alibi.parallel.hosts import is_primary
        from alibi.progress import Progress

        title = f"{subject.run.title} {self.title(row.cell)}"
        scorer, params = subject.scorer(of), subject.run.params
        scorer.compile(params, windows)
        batches, start = [], time.perf_counter()
        with Progress(title, windows.num_tokens, "token", show=is_primary()) as bar:
            for size, of_batch in scorer.batches(params, text.tokens, windows):
                count = size // windows.length
                batches.append(
                    {name: np.asarray(x, np.float64)[:count] for name, x in of_batch.items()}
                )
                bar.update(size)
        subject.seconds += time.perf_counter() - start
        return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}

    def of_heads(self, means: Mapping[str, Float[np.ndarray, "layers heads"]]) -> dict[str, Any]:
        """Returns the results of rows: the number of heads in a layer, and each number for each head, the
        heads of the first layer first.

        Raises:
          NoResultError: a number is not finite.
        """
        for name, values in means.items():
            if not np.isfinite(values).all():
                raise NoResultError(f"{name} is not finite; the model overflows at this length")
        (_, heads), *_ = (values.shape for values in means.values())
        return {"heads": heads} | {name: six_digits(x.ravel()) for name, x in means.items()}

    # ---- how reports show it

    def alike(self, row: Row) -> Any:
        return row.cell["length"]

    def entries(self, row: Row) -> list[Entry]:
        if not row.results:
            return [Entry(row, (1,), 1, {})]
        results = dict(row.results)
        heads = results.pop("heads")
        lists = {name: x for name, x in results.items() if isinstance(x, Sequence)}
        return [
            Entry(row, (i % heads + 1,), i // heads + 1, {name: x[i] for name, x in lists.items()})
            for i in range(len(next(iter(lists.values()))))
        ]

    def alt(self, panel: Panel) -> str:
        return f"heads by {self.across}, in windows of {panel.rows[0].cell['length']:,}"

    def suffix(self, row: Row) -> str:
        return f"-length{row.cell['length']}" + super().suffix(row)

    def facts(self, panel: Panel) -> list[str]:
        title, *others = super().facts(panel)
        lengths = (f"{row.cell['length']:,}" for row in panel.rows)
        return [title, fact("windows of {} tokens", lengths), *others]

    def explanation(self, panel: Panel) -> str:
        shares = [
            f"{row.run} {row.results['local']:.0%}" for row in panel.rows if "local" in row.results
        ]
        return fact(
            "Heads of which no query gives more than 1% to tokens beyond distance 8: {}.", shares
        )


@dataclasses.dataclass(frozen=True)
class HeadLoss(Heads):
    """Measures the loss without each head: its output is zero, or its mean over the same tokens.

    It takes two passes over the tokens for each head.
    """

    kinds: ClassVar = (
        _kind("Loss with the head at zero", "{:+.4f}", "zero", ", nats per token"),
        _kind("Loss with the head at its mean", "{:+.4f}", "mean", ", nats per token"),
    )

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.head_sums import ablated_nll, output_sums
        from alibi.parallel.hosts import is_primary
        from alibi.progress import Progress

        windows = self.windows_of(subject, text, row)
        sums = self.results(subject, text, row, windows, output_sums)["output"].sum(axis=0)
        means = (sums / (len(windows) * windows.length)).astype(np.float32)
        scorer, title = subject.scorer(ablated_nll), f"{subject.run.title} {self.title(row.cell)}"

        def nll(chosen: np.ndarray, outputs: np.ndarray) -> Any:
            arguments = subject.run.params, chosen, outputs
            score = scorer.score_windows(arguments, text.tokens, windows)
            subject.seconds += score.seconds
            return score.values.mean(dtype=np.float64)

        none = np.zeros(means.shape[:2], bool)
        whole = nll(none, means)
        losses: dict[str, np.ndarray] = {}
        with Progress(title, 2 * none.size, "head", show=is_primary()) as bar:
            for name, outputs in (("zero", np.zeros_like(means)), ("mean", means)):
                losses[name] = np.empty(none.shape)
                for head in np.ndindex(none.shape):
                    chosen = none.copy()
                    chosen[head] = True
                    losses[name][head] = nll(chosen, outputs) - whole
                    bar.update(1)
        return self.of_heads(losses) | {"nats": float(whole)}

    def explanation(self, panel: Panel) -> str:
        return "Every token of the windows is scored, without the head and with it."


@dataclasses.dataclass(frozen=True)
class HeadBias(Heads):
    """Measures the bias in the logits of the last query, for each head and distance, as a mean over windows."""

    kinds: ClassVar = (_kind("Bias", "{:+.2f}", "bias", " of the logits"),)
    labels: ClassVar = ("layer", "head")
    across: ClassVar = "tokens from the key to the query"

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.head_sums import bias_by_distance

        windows = self.windows_of(subject, text, row)
        results = self.results(subject, text, row, windows, bias_by_distance)
        if not results:
            raise NoResultError(
                "a layer has no bias of its logits, such as with rotary; head_bias is for methods that add one"
            )
        # NaN at hidden distances
        mean = np.ma.masked_invalid(results["bias"]).mean(axis=0).filled(np.nan)
        bias = tuple(  # None where the key is hidden
            tuple(float(f"{x:.6g}") if np.isfinite(x) else None for x in head)
            for head in mean.reshape(-1, mean.shape[-1])
        )
        return {"heads": mean.shape[1], "bias": bias}

    def entries(self, row: Row) -> list[Entry]:
        heads, bias = row.results.get("heads", 1), row.results.get("bias", ((None,),))
        return [
            Entry(
                row, (i // heads + 1, i % heads + 1), 2**power, {"bias": x} if row.results else {}
            )
            for i, curve in enumerate(bias)
            for power, x in enumerate(curve)
            if x is not None or not row.results
        ]
