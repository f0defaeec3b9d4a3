"""Where in its window a token stands, and what that costs: the early token curse (paper, appendix B).

In windows that don't overlap, a token near the start of its window has little context.
Longer windows have fewer such tokens, and are better for that alone, even where the model
makes nothing of the longer context. Computed from NLL dumps; no model is needed.
"""

import dataclasses
import os
import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from alibi.evaluation.dumps import Dump, read_dump

_NAME = re.compile(r"(?P<run>.+)-length=(?P<length>\d+)-stride=(?P<stride>\d+)(-step=.*)?")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One text scored by one run at one length and stride."""

    run: str
    dump: Dump

    @property
    def length(self) -> int:
        return self.dump.length

    @property
    def stride(self) -> int:
        return self.dump.stride

    @property
    def nll(self) -> Float[np.ndarray, " tokens"]:
        return self.dump.nll_nats.astype(np.float64)

    @property
    def mode(self) -> str:
        return "nonoverlapping" if self.stride == self.length else "sliding"

    @property
    def of(self) -> tuple[str, int, str, str]:
        """Run and text: what is compared has these in common."""
        return self.run, self.dump.step, self.dump.tokens_sha256, self.dump.config_hash

    @property
    def context(self) -> Int[np.ndarray, " tokens"]:
        """Inputs that the model saw for each token, its predecessor included: 1 to `length`."""
        token = np.arange(self.dump.nll_nats.size)
        window = token // self.stride * self.stride
        return token - np.maximum(window - (self.length - self.stride), 0) + 1


def read_measured(path: str | os.PathLike[str]) -> Measured:
    """The dump in `path`, which `eval_extrapolation.py --dump_nll` named.

    Raises:
      ValueError: any other file, or a dump whose name says another length or stride than it has.
    """
    path = pathlib.Path(path)
    name = _NAME.fullmatch(path.stem)
    if not name:
        raise ValueError(
            f"{path} is not named RUN-length=l-stride=s.npz, as eval_extrapolation.py --dump_nll names dumps"
        )
    dump, said = read_dump(path), (int(name["length"]), int(name["stride"]))
    if said != (dump.length, dump.stride):
        raise ValueError(
            f"{path} holds a dump of length={dump.length} and stride={dump.stride}; give it the name that it had"
        )
    return Measured(name["run"], dump)


def analyse(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Rows of three kinds, told by `analysis`: two for each dump, and the curse for each two lengths of a run and text.

    by_context: NLL by ranges of context; by_position: by single position in the window;
    early_token_curse: see there.

    Raises:
      ValueError: two dumps of the same run, text, length and stride.
    """
    _check_each_once(measured)
    rows = [row for one in measured for row in by_context(one) + by_position(one)]
    blocks = sorted((one for one in measured if one.stride == one.length), key=lambda one: one.length)
    for short in blocks:
        for long in blocks:
            if short.of == long.of and short.length < long.length:
                rows.append(early_token_curse(short, long, [one for one in measured if one.of == short.of]))
    return rows


def _check_each_once(measured: Sequence[Measured]) -> None:
    found = Counter((one.of, one.length, one.stride) for one in measured)
    for ((run, step, tokens_sha256, _), length, stride), times in found.items():
        if times > 1:
            raise ValueError(
                f"{times} dumps are of {run} after {step:,} updates at length={length} and stride={stride}, of the "
                f"text {tokens_sha256[:8]}; give one of them"
            )


def by_context(measured: Measured) -> list[dict[str, Any]]:
    """NLL of the tokens with 1, 2, 3-4, 5-8, ... inputs of context, in a window of `length`."""
    context, nll, rows = measured.context, measured.nll, []
    for low, high in ranges(measured.length):
        inside = (context >= low) & (context <= high)
        if inside.any():
            rows.append(
                _about_windows(measured, "by_context")
                | {"context_from": low, "context_to": high}
                | {"tokens": int(inside.sum()), "nll_nats": float(nll[inside].sum())}
            )
    return rows


def by_position(measured: Measured) -> list[dict[str, Any]]:
    """NLL of the tokens at each position in their window, 1 to `length`: the window's inputs up to the token's own."""
    tokens, nats = (np.bincount(measured.context, weights) for weights in (None, measured.nll))
    about = _about_windows(measured, "by_position")
    return [
        about | {"position": int(position), "tokens": int(tokens[position]), "nll_nats": float(nats[position])}
        for position in np.flatnonzero(tokens)
    ]


def ranges(length: int) -> list[tuple[int, int]]:
    """Ranges of context up to `length`, each as long as all before it together."""
    ends = [1 << power for power in range(length.bit_length()) if 1 << power < length] + [length]
    return [(low + 1, high) for low, high in zip([0, *ends], ends, strict=False)]


def early_token_curse(short: Measured, long: Measured, others: Sequence[Measured]) -> dict[str, Any]:
    """What of the gain from blocks of one length to blocks of a greater one is due to fewer tokens of short context.

    Two answers, as shares of the gain in nats a token; None where it can't be said.

    composition_share: the gain that there would be if at each context a token cost what it
      costs in the short blocks, and beyond them what it costs with their full context.
    sliding_share: what of the gain is gone when a window slides by the least stride that
      was dumped at both lengths, so that (nearly) all tokens have the full context: the
      paper's own argument (appendix B, tables 13 to 15).

    gain_by_context says on which tokens the gain falls: of each range of context in the
    short blocks, its part of the gain.
    """
    gain = short.nll.mean() - long.nll.mean()
    sliding = {one.stride: one for one in others if one.length == short.length and one.mode == "sliding"}
    sliding_long = {one.stride: one for one in others if one.length == long.length and one.mode == "sliding"}
    strides = sorted(sliding.keys() & sliding_long.keys())
    slid = sliding[strides[0]].nll.mean() - sliding_long[strides[0]].nll.mean() if strides else None
    full = sliding[min(sliding)] if sliding else None
    composition = short.nll.mean() - _with_costs_of(short, long, full)
    saved, context = short.nll - long.nll, short.context
    return _about(short, "early_token_curse") | {
        "eval_length": short.length,
        "longer_length": long.length,
        "tokens": short.nll.size,
        "gain_nats": float(gain),
        "composition_share": float(composition / gain) if gain > 0 else None,
        "sliding_share": float(1 - slid / gain) if gain > 0 and slid is not None else None,
        "sliding_stride": strides[0] if strides else None,
        "gain_by_context": [
            {
                "context_from": low,
                "context_to": high,
                "share": float(saved[(context >= low) & (context <= high)].sum() / saved.sum()) if gain > 0 else None,
            }
            for low, high in ranges(short.length)
        ],
    }


def _with_costs_of(short: Measured, long: Measured, sliding: Measured | None) -> float:
    """The mean NLL of the long blocks if a token's context cost what it does in the short ones.

    A context that the short blocks don't have costs what their full one does: by the sliding
    window of their length if it was dumped, else what their second half costs.
    """
    tokens, nats = (np.bincount(short.context, weights, short.length + 1) for weights in (None, short.nll))
    costs = nats / np.maximum(tokens, 1)
    if sliding is not None:
        full = sliding.nll[sliding.context > short.length - sliding.stride].mean()
    else:
        full = short.nll[short.context > short.length // 2].mean()
    return float(np.where(long.context <= short.length, costs[np.minimum(long.context, short.length)], full).mean())


def _about_windows(measured: Measured, analysis: str) -> dict[str, Any]:
    windows = {"eval_length": measured.length, "mode": measured.mode, "stride": measured.stride}
    return _about(measured, analysis) | windows


def _about(measured: Measured, analysis: str) -> dict[str, Any]:
    dump = measured.dump
    return {
        "analysis": analysis,
        "run": measured.run,
        "step": dump.step,
        "tokens_sha256": dump.tokens_sha256,
        "config_hash": dump.config_hash,
    }
