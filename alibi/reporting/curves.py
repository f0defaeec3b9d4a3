"""Runs beside their results: the config and command of each, and its training curve from the metrics it left."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from alibi.storage.store import Store

MOST_POINTS = 400  # of a training curve; more don't show


@dataclasses.dataclass(frozen=True)
class RunSource:
    """What a report tells of a run besides its rows.

    Attributes:
      config: the leaves of its config by dotted key.
      command: what makes it, for a shell.
      store: its work directory; None where that isn't known, or isn't there.
    """

    name: str
    config: Mapping[str, Any]
    command: str
    store: Store | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    """The loss of a run after `step` updates, in nats a token."""

    step: int
    nats: float
    split: str  # "train" or "valid"


def training_curve(store: Store | None) -> list[Point]:
    """The points of a run's metrics, none without metrics; of long runs means of neighbouring rows, by their tokens."""
    rows = store.read_log("metrics") if store is not None else []
    trained = [row for row in rows if _is_number(row.get("train_nll"))]
    size = math.ceil(len(trained) / MOST_POINTS) or 1
    chunks = [trained[first : first + size] for first in range(0, len(trained), size)]
    points = [Point(chunk[-1]["step"], _mean_nats(chunk), "train") for chunk in chunks]
    points += [Point(row["step"], row["valid_nll"], "valid") for row in rows if _is_number(row.get("valid_nll"))]
    return points


def differing(runs: Sequence[RunSource]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The keys whose value all runs share, and of each run the others."""
    first = runs[0].config if runs else {}
    shared = {
        key: value
        for key, value in first.items()
        if all(key in run.config and run.config[key] == value for run in runs)
    }
    return shared, [{key: value for key, value in run.config.items() if key not in shared} for run in runs]


def _mean_nats(rows: Sequence[Mapping[str, Any]]) -> float:
    tokens = [row.get("train_tokens") or 1.0 for row in rows]
    return sum(row["train_nll"] * weight for row, weight in zip(rows, tokens, strict=True)) / sum(tokens)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
