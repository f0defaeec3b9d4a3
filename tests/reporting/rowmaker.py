"""Result rows for tests, made from a perplexity, and files of them."""

import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

from alibi.reporting.rows import Row


def make_row(
    position: str = "alibi", eval_length: int = 128, perplexity: float | None = 8.0, **changed: Any
) -> Row:
    """Returns a row of a run at L = 128 over 1,000 tokens of a byte each, with the values
    `changed`.
    """
    known = perplexity is not None
    row = {
        "run": f"{position}-L128-seed{changed.get('seed', 0)}",
        "position": position,
        "train_length": 128,
        "eval_length": eval_length,
        "mode": "nonoverlapping",
        "stride": eval_length,
        "corpus": "books",
        "split": "valid",
        "seed": 0,
        "step": 600,
        "parameters": 826112,
        "nll_nats": 1000 * math.log(perplexity) if known else None,
        "tokens": 1000 if known else None,
        "words": 180 if known else None,
        "bytes": 1000 if known else None,
        "perplexity": perplexity,
        "word_perplexity": None,
        "bits_per_byte": math.log2(perplexity) if known else None,
        "tokens_per_second": 5000.0 if known else None,
        "seconds": 0.2 if known else None,
        "device": {"kind": "cpu", "count": 1},
        "commit": "0123456789abcdef",
        "config_hash": "0123456789ab",
    }
    return Row.from_json(row | changed)


def append_rows(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Appends lines to a results.jsonl without a directory `rows` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows)
