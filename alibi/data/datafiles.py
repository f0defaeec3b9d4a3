"""Table rows as documents: .jsonl, .csv and .parquet."""

import csv
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from alibi.data.corpus import Piece, split_long
from alibi.extras import needs
from alibi.progress import print_line

DATA_FILES = (".jsonl", ".csv", ".parquet")
LAST_ROW = "\x04end of the rows"

_print_once = functools.cache(print_line)


def row_documents(values: Iterable[Any], column: str, source: str) -> Iterator[Piece]:
    """Yields each row as a document in pieces. A null is an empty document, and a printed line counts
    them.

    Args:
      values: the column's values, in UTF-8 or decoded.
      column, source: names for messages.

    Raises:
      ValueError: a value that is no text.
    """
    nulls = row = 0
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str | bytes | None):
            raise ValueError(
                f"{source}, row {row - 1}: column {column!r} holds {type(value).__name__}, not text; "
                "set data.column or --column to a column of strings"
            )
        try:
            text = (value.decode("utf-8") if isinstance(value, bytes) else value or "").encode()
        except UnicodeError as error:
            raise ValueError(f"{source}, row {row - 1} is not UTF-8: {error}") from error
        nulls += value is None
        yield from split_long(text)
    if nulls:
        _print_once(
            f"{source}: {nulls:,} of {row:,} rows have no text in column {column!r} (null); they are empty documents"
        )


def check_column(column: str, columns: Collection[str], source: str) -> None:
    """Raises ValueError if `columns` lacks `column`."""
    if column not in columns:
        raise ValueError(
            f"{source} has no column {column!r}; set data.column or --column to one of "
            f"{', '.join(map(str, columns))}"
        )


def read_column(
    path: pathlib.Path, kind: str, texts: Iterable[bytes], column: str
) -> Iterator[Any]:
    """Yields a column's values in a data file, and None for a row that lacks it.

    Args:
      kind: one of `DATA_FILES`.
      texts: the content in UTF-8, unpacked. Unused for .parquet, which is packed inside.

    Raises:
      ValueError: no such column, or a damaged file.
    """
    needs(f"{path}", "pyarrow")
    from pyarrow import ArrowException, parquet  # takes a tenth of a second to import

    try:
        if kind == ".parquet":
            table = parquet.ParquetFile(path)
            check_column(column, table.schema_arrow.names, str(path))
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                yield from batch.column(0).to_pylist()
            return
        rows: Iterator[dict[str, Any]] = map(json.loads, filter(str.strip, _lines(texts)))
        if kind == ".csv":
            csv.field_size_limit(sys.maxsize)  # a document may be long
            rows = _csv_rows(_lines(texts))
        first = list(itertools.islice(rows, 1))
        for row in first:
            check_column(column, row.keys(), str(path))
        yield from (row.get(column) for row in itertools.chain(first, rows))
    except AttributeError as error:  # a row has no keys
        raise ValueError(
            f'{path} holds a line that is no object; a row must be one, such as {{"{column}": "a text"}}'
        ) from error
    except (json.JSONDecodeError, RecursionError, csv.Error, ArrowException) as error:
        raise ValueError(f"{path} is not a whole {kind} file ({error}); make it again") from error


def _csv_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a .csv file; raises csv.Error if a quotation never ends: it takes in the row
    that is added here. csv's own strict mode also refuses stray quotes within a field.
    """
    rows = csv.DictReader(itertools.chain(lines, [LAST_ROW]))
    for row in rows:
        if LAST_ROW in row.values():
            return
        yield row
    if LAST_ROW not in (rows.fieldnames or ()):  # of an empty file it is the names
        raise csv.Error("a quotation never ends")


def _lines(texts: Iterable[bytes]) -> Iterator[str]:
    """Yields the lines in successive texts, with their ends."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text.decode()).split("\n")
        yield from (f"{line}\n" for line in lines)
    if rest:
        yield rest
