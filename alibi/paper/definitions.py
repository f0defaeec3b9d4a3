"""The paper's 15 tables: the published cells, and the quantity in each. Runs and evaluations follow
from these.
"""

import csv
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping

from alibi.reporting import tables
from alibi.reporting.tables import Kind, Missing, Number

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "GB": 1e9}

# `alibi/paper/tables` holds data only, so it is found by path and needs no package of its own.
_FOLDER = pathlib.Path(__file__).with_name("tables")


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A published table (arXiv 2108.12409 v2). Cells are the printed text, "" for an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def load_table(number: int) -> PaperTable:
    """Returns the paper's table `number`, 1 to 15."""
    with (_FOLDER / f"table{number:02d}.csv").open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    return PaperTable(tuple(columns), tuple(tuple(row) for row in rows))


def parse_printed(text: str) -> float | None:
    """Returns the number in a printed cell such as 19.73, 28.5k, 247M or 15.3 GB, or None for a word such
    as OOM.
    """
    match = re.fullmatch(r"([\d.]+) ?(k|M|GB|)", text)
    return float(match[1]) * UNITS[match[2]] if match else None


def published(text: str, kind: Kind) -> Number | Missing:
    """Returns a printed cell as a number, or as the paper's word."""
    value = parse_printed(text)
    return Missing(text) if value is None else Number((value,), kind, printed=text)


# Position methods by their names in the paper.
POSITIONS = {"Sinusoidal": "sinusoidal", "Rotary": "rotary", "T5 Bias": "t5", "ALiBi": "alibi"}
# Keys of their runs, KEY=VALUE: T5's bias has the largest distance of its source at all lengths.
OPTIONS = {"t5": "position_options.max_distance=128"}


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model: the properties that vary in the tables. Lengths are in tokens, at the paper's
    scale.
    """

    position: str  # a name from alibi.positions.METHODS
    train_length: int  # the paper's L
    updates: float = 1.0  # as a share of the setting's updates


@dataclasses.dataclass(frozen=True)
class Quantity:
    """The number in a cell. Lengths are in tokens, at the paper's scale."""

    model: Model
    kind: Kind = tables.PERPLEXITY
    eval_length: int | None = None  # defaults to none: a number from training
    stride: int | None = None  # defaults to none: windows don't overlap
    split: str = "valid"


# Kinds of numbers by column.
COLUMNS = {
    "Param.": tables.PARAMETERS,
    "Train Speed": tables.TRAINING_SPEED,
    "Speed (Train)": tables.TRAINING_SPEED,
    "Inference Speed": tables.EVALUATION_SPEED,
    "Speed (Eval.)": tables.EVALUATION_SPEED,
    "Memory": tables.MEMORY,
    "Updates": tables.UPDATES,
    "Hours": tables.DEVICE_HOURS,
}
HARDWARE = "the paper's on one V100, ours on the devices named here"
REFERENCES = {
    "column": "the column's first",
    "group": "the first of the rows of equal length",
    "row": "the row's first",
    "trained": "the column's first that was trained at its length",
}
BOOKS = (
    "the paper prints its adaptive model's 247M parameters; with the tied 29,000 entries of appendix A.3 there are "
    "231,235,584; where data.tokenizer_file names no vocabulary, one is trained on the train text"
)
UPDATES = 50_000.0  # in tables 11 and 12 (section 4.2)

# (the row's cells by column, the column) -> the quantity, or None for a system outside this project.
CellRule = Callable[[Mapping[str, str], str], Quantity | None]


@dataclasses.dataclass(frozen=True)
class TableDefinition:
    """A table: its setting, its cells, and the layout of its figure."""

    title: str
    setting: str  # the corpus and model, a name from `alibi.paper.settings`
    cell: CellRule
    labels: int = 1  # number of first columns, which name the rows
    # The reference of ratios, in `REFERENCES`, by which other scales are compared; equal last
    # labels are a group.
    reference: str = "column"
    # The figure: "columns" or "rows" as lines over the length, "bars" of ratios to references, or
    # "" for none.
    lines: str = ""
    note: str = ""  # a caveat in the caption


def speed(row: Mapping[str, str], column: str) -> Quantity | None:
    """Returns a quantity of table 1: a method and a train length, evaluated at the same length."""
    length = int(row["Train Length"])
    return Quantity(
        Model(POSITIONS[row["Position Method"]], length), COLUMNS[column], eval_length=length
    )


def by_method(row: Mapping[str, str], column: str, *, train_length: int) -> Quantity | None:
    """Returns a quantity of tables 2 to 4: a row is an evaluation length, a column a method's
    perplexity or speed.
    """
    name, _, unit = column.rpartition(" ")
    kind = tables.PERPLEXITY if unit == "PPL" else tables.WORDS_PER_SECOND
    return Quantity(Model(POSITIONS[name], train_length), kind, eval_length=int(row["Inputs"]))


def by_length(
    row: Mapping[str, str], column: str, *, position: str, stride: int | None = None
) -> Quantity | None:
    """Returns a quantity of tables 5, 8 and 13 to 15: rows are train lengths, columns evaluation
    lengths.

    In a row Name* the column is both lengths.
    """
    label = next(iter(row.values()))
    name, star, _ = label.partition("*")
    model = Model(POSITIONS[name], int(column)) if star else Model(position, int(label))
    return Quantity(model, eval_length=int(column), stride=stride)


def by_model(row: Mapping[str, str], column: str, *, stride: int | None = None) -> Quantity | None:
    """Returns a quantity of tables 6, 7 and 9 to 12: a row such as "ALiBi, L = 512, L_valid = 3072"
    is a model.
    """
    label = next(iter(row.values()))
    match = re.fullmatch(r"([\w ]+), L(?:_train)? = (\d+)(?:, L_valid = (\d+))?", label)
    if not match:
        return None
    updates = parse_printed(row.get("Updates", "")) or UPDATES
    model = Model(POSITIONS[match[1]], int(match[2]), updates / UPDATES)
    length = int(match[3] or match[2])
    if column in ("Valid", "Test"):
        return Quantity(model, eval_length=length, stride=stride, split=column.lower())
    if column.startswith("L_valid = "):
        return Quantity(model, eval_length=int(column.removeprefix("L_valid = ")), stride=stride)
    kind = COLUMNS[column]
    return Quantity(model, kind, eval_length=length if kind is tables.EVALUATION_SPEED else None)


def _extrapolation(train_length: int) -> TableDefinition:
    return TableDefinition(
        f"extrapolation of models trained at L = {train_length:,}",
        "wikitext103",
        functools.partial(by_method, train_length=train_length),
        lines="columns",
        note=f"WPS: words per second and device, {HARDWARE}",
    )


def _sliding(position: str) -> TableDefinition:
    cell = functools.partial(by_length, position=position, stride=1)
    title = f"{position} with a sliding window of stride 1"
    return TableDefinition(title, "wikitext103", cell, reference="row", lines="rows")


_lengths = functools.partial(by_length, position="alibi")
_sliding_512 = functools.partial(by_model, stride=512)

TABLES: Mapping[int, TableDefinition] = {
    1: TableDefinition(
        "speed and memory",
        "wikitext103",
        speed,
        labels=2,
        reference="group",
        lines="bars",  # figure 2
        note=f"words per second and device, and the most memory that training held (CPUs: the process's); {HARDWARE}; "
        "section 2.2 has 28.5k words per second for sinusoidal at 1,024, the table 26.0k",
    ),
    2: _extrapolation(512),  # figure 1
    3: _extrapolation(1024),  # figure 1
    4: _extrapolation(3072),
    5: TableDefinition(  # figure 4
        "ALiBi at many lengths",
        "wikitext103",
        _lengths,
        reference="row",
        lines="rows",
        note="rows with * are trained and evaluated at each length; "
        "the paper's text says that ALiBi wins at every L, its table that sinusoidal does at 64 and 128",
    ),
    6: TableDefinition(
        "non-overlapping windows, valid and test",
        "wikitext103",
        by_model,
        note=f"speeds: words per second and device, {HARDWARE}",
    ),
    7: TableDefinition(
        "sliding windows of stride 512, valid and test", "wikitext103", _sliding_512
    ),
    8: TableDefinition(
        "ALiBi at many lengths, books",
        "bookcorpus",
        _lengths,
        reference="row",
        lines="rows",
        note=BOOKS,
    ),
    9: TableDefinition("non-overlapping windows, books", "bookcorpus", by_model, note=BOOKS),
    10: TableDefinition(
        "sliding windows of stride 512, books", "bookcorpus", _sliding_512, note=BOOKS
    ),
    11: TableDefinition(
        "1.3B parameters, equal training time",
        "cc100",
        by_model,
        note="hours are device-hours; the paper halts its sinusoidal runs early, when the ALiBi run beside each ends; "
        "here the learning rate's schedule ends with the run",
    ),
    12: TableDefinition(
        "1.3B parameters, equal updates",
        "cc100",
        by_model,
        reference="trained",  # the first row's are of a model that fails beyond its own length
        note="hours are device-hours",
    ),
    13: _sliding("sinusoidal"),
    14: _sliding("t5"),
    15: _sliding("alibi"),
}


def table_quantities(number: int) -> dict[tuple[int, int], Quantity]:
    """Returns the quantity of each measurable cell of a table, by row and column after the labels."""
    paper, definition = load_table(number), TABLES[number]
    columns, named = paper.columns[definition.labels :], {}
    for row, cells in enumerate(paper.rows):
        printed = dict(zip(paper.columns, cells, strict=True))
        for column, name in enumerate(columns):
            if printed[name] and (quantity := definition.cell(printed, name)):
                named[row, column] = quantity
    return named
