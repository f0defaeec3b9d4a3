"""The paper's 15 tables as published (arXiv 2108.12409 v2), cell by cell."""

import csv
import dataclasses
import pathlib
import re

from alibi.reporting.tables import Absence, Kind, Missing, Number

TABLE_NUMBERS = range(1, 16)

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "GB": 1e9}

# `alibi/paper/tables` holds data only, so it is found by path and needs no package of its own.
_FOLDER = pathlib.Path(__file__).with_name("tables")


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """One published table; cells are the printed text, "" where the paper leaves one empty."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def load_table(number: int) -> PaperTable:
    """Reads the paper's table `number`, 1 to 15; raises ValueError for any other number."""
    if number not in TABLE_NUMBERS:
        raise ValueError(f"the paper has no table {number!r}; its tables are 1 to {TABLE_NUMBERS[-1]}")
    with (_FOLDER / f"table{number:02d}.csv").open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    return PaperTable(tuple(columns), tuple(tuple(row) for row in rows))


def parse_printed(text: str) -> float | None:
    """The number of a printed cell such as 19.73, 28.5k, 247M or 15.3 GB; None for one without (OOM)."""
    found = re.fullmatch(r"([\d.]+) ?(k|M|GB|)", text)
    return float(found[1]) * UNITS[found[2]] if found else None


def published(text: str, kind: Kind) -> Number | Missing:
    """A printed cell as a number, or as the word that the paper has there."""
    value = parse_printed(text)
    return Missing(Absence.PUBLISHED, text) if value is None else Number((value,), kind, printed=text)
