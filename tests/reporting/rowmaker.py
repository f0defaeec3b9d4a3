"""Result rows for tests, made from a perplexity, and files of them."""

import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

from alibi.reporting.panels import Panel, panel_groups
from alibi.reporting.rows import Row
from alibi.reporting.tables import PERPLEXITY, Kind

FIELDS = Row.__dataclass_fields__


def make_row(
    position: str = "alibi", length: int = 128, perplexity: float | None = 8.0, **changed: Any
) -> Row:
    """Returns a row of a run at L = 128 over 1,000 tokens of a byte each, with the values
    `changed`: fields of the row, or of its results.
    """
    row = {
        "run": f"{position}-L128-seed{changed.get('seed', 0)}",
        "position": position,
        "train_length": 128,
        "seed": 0,
        "step": 600,
        "parameters": 826112,
        "corpus": "books",
        "split": "valid",
        "evaluator": "perplexity",
        "cell": {"length": length},
        "results": {},
        "device": {"kind": "cpu", "count": 1},
        "commit": "0123456789abcdef",
        "config_hash": "0123456789ab",
    }
    if perplexity is not None:
        row["seconds"] = 0.2
        row["results"] = {
            "nll_nats": 1000 * math.log(perplexity),
            "tokens": 1000,
            "words": 180,
            "bytes": 1000,
            "perplexity": perplexity,
            "bits_per_byte": math.log2(perplexity),
            "tokens_per_second": 5000.0,
        }
    for name, value in changed.items():
        (row if name in FIELDS else row["results"])[name] = value
    return Row.from_json(row)


def make_key(position: str, length: int, distance: int, share: float, **changed: Any) -> Row:
    """Returns a row of passkeys, with the share of 9 prompts that was found."""
    known = {"cell": {"length": length, "distance": distance}, "options": {"prompts": 9}}
    known["results"] = {"accuracy": share, "prompts": 9}
    return make_row(position, evaluator="passkey", **(known | changed))


def make_gains(position: str, gains: dict[int, float], width: float = 0.1, **changed: Any) -> Row:
    """Returns a row of context use, by length the gain over the first length; intervals are
    `width` on either side.
    """
    longer = list(gains)[1:]
    results = {
        "lengths": [*gains],
        "windows": 100,
        "tokens": 1200,
        "nll_nats": [1200 * (2 - gain) for gain in gains.values()],
        "gain_nats": [*gains.values()],
        "interval": [None, *([gains[at] - width, gains[at] + width] for at in longer)],
        "parts": [None] * len(gains),
    }
    known = {"cell": {"lengths": [*gains]}, "results": results, "options": {"context_windows": 100}}
    return make_row(position, evaluator="context_use", **(known | changed))


def append_rows(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Appends lines to a results.jsonl without a directory `rows` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows)


def panels(rows: Iterable[Row], kind: Kind = PERPLEXITY) -> list[Panel]:
    """Returns the panels of a kind, see `panel_groups`."""
    return [one for group in panel_groups(rows) for one in group if one.kind is kind]
