"""Panels of comparable results, grouped from rows, and their tables."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from alibi.reporting import tables
from alibi.reporting.cells import make_cell
from alibi.reporting.names import grouped, series_names
from alibi.reporting.rows import MASKED, SEPARATELY, ContextUse, Row, latest
from alibi.reporting.tables import PERPLEXITY, Kind, Number, Part, Table, related


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs that differ in their seed only, over the lengths; cells by evaluation length in tokens."""

    label: str
    position: str
    train_length: int
    cells: Mapping[int, Part]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Results that may be compared: on the same corpus and split, in the same windows."""

    corpus: str
    split: str
    stride: int | None  # of sliding windows; None: windows don't overlap
    kind: Kind
    series: tuple[Series, ...]
    rows: tuple[Row, ...]  # of all series, each by length
    use: ContextUse | None = None  # the scored tokens of gains of context, without gains

    @property
    def reading(self) -> str:
        """How the text is read unless each token sees the tokens before it: documents that don't
        see each other, masks.
        """
        kinds = {row.documents.positions for row in self.rows if row.documents}
        alone = "each document scored on its own" if SEPARATELY in kinds else ""
        masks = (
            "mask_rate {:g}, mask_random {:g}, mask_kept {:g}".format(*row.masks)
            for row in self.rows
            if row.masks
        )
        isolated = fact(
            "documents that don't see each other, positions {}", sorted(kinds - {SEPARATELY})
        )
        return "; ".join(filter(None, [alone, isolated, fact("{}", masks)]))

    @property
    def lengths(self) -> list[int]:
        return sorted({length for series in self.series for length in series.cells})

    @property
    def numbers(self) -> Iterator[Number]:
        cells = (cell for series in self.series for cell in series.cells.values())
        return (cell for cell in cells if isinstance(cell, Number))


BEST = (
    "The best of a column is marked only if the 95% interval of its difference from each other excludes zero: "
    "over common seeds, and over the parts of the text where these are known."
)


def panels(rows: Iterable[Row], kind: Kind = PERPLEXITY) -> list[Panel]:
    """Groups `rows` into panels, in order of first appearance; a later row of a cell replaces
    earlier rows.

    Each number has its ratio to the number of its series at the train length; the best of a column
    is marked (`alibi.reporting.tables.is_best`), unless numbers per token are of several tokenizers.
    """
    found = []
    rows = latest(rows)
    names = series_names(rows)  # of all rows, so that a run has one name in all panels
    rows = [
        row
        for row in rows
        if row.passkey is None and (row.context_use is not None) == (kind is tables.CONTEXT_GAIN)
    ]
    for (corpus, split, stride, use, masked, *_), group in grouped(rows, _panel_key).items():
        of_group = tables.PSEUDO_PERPLEXITY if masked and kind is PERPLEXITY else kind
        by_series = grouped(group, lambda row: (names[row.tested], row.position, row.train_length))
        in_order = (
            row
            for runs in by_series.values()
            for row in sorted(runs, key=lambda row: row.eval_length)
        )
        series = _make_series(by_series, of_group, mark=_are_comparable(group, of_group))
        found.append(Panel(corpus, split, stride, of_group, series, tuple(in_order), use))
    return found


def panel_groups(rows: Sequence[Row]) -> list[tuple[Panel, ...]]:
    """Returns the perplexities of each corpus, split and windows, with bits per byte if the text's
    bytes are known; then the gains of context.
    """
    groups: list[tuple[Panel, ...]] = [
        pair if any(row.bits_per_byte is not None for row in pair[0].rows) else pair[:1]
        for pair in zip(panels(rows), panels(rows, tables.BITS_PER_BYTE), strict=True)
    ]
    return groups + [(panel,) for panel in panels(rows, tables.CONTEXT_GAIN)]


def _are_comparable(rows: Sequence[Row], kind: Kind) -> bool:
    """Returns whether the lowest number is the best: per byte, or per token of one tokenizer."""
    return (
        kind is tables.BITS_PER_BYTE
        or len({row.tokens_sha256 or row.tokens for row in rows if row.is_measured}) < 2
    )


def _make_series(
    by_series: Mapping[tuple[str, str, int], Sequence[Row]], kind: Kind, *, mark: bool
) -> tuple[Series, ...]:
    """Returns the series of a panel, with the relations of their numbers, and with `mark` the best
    of each length.
    """
    by_length = [grouped(rows, lambda row: row.eval_length) for rows in by_series.values()]
    lengths = sorted(set().union(*by_length))
    grid = [
        [make_cell(seeds[length], kind) if length in seeds else None for length in lengths]
        for seeds in by_length
    ]
    own = {
        i: lengths.index(length) for i, (_, _, length) in enumerate(by_series) if length in lengths
    }
    references = {(i, j): (i, own[i]) for i in own for j in range(len(lengths))}
    named = zip(by_series, related(grid, references, mark=mark), strict=True)
    return tuple(Series(*name, dict(zip(lengths, cells, strict=True))) for name, cells in named)


def _panel_key(
    row: Row,
) -> tuple[str, str, int | None, ContextUse | None, bool, tuple | None, str]:
    use = row.context_use and row.context_use.tokens
    stride = None if row.mode in ("nonoverlapping", MASKED, SEPARATELY) else row.stride
    documents = row.documents.positions if row.documents else ""
    return row.corpus, row.split, stride, use, row.mode == MASKED, row.masks, documents


def build_table(panel: Panel) -> Table:
    """Returns a table with a line per series and a column per length."""
    return Table(
        caption=caption(panel),
        label_header=("run", "trained at L"),
        labels=tuple((series.label, series.train_length or "") for series in panel.series),
        header=tuple(panel.lengths),
        cells=tuple(
            tuple((series.cells.get(length),) for length in panel.lengths)
            for series in panel.series
        ),
        ratios=panel.use is None,
    )


def passkey_table(rows: Iterable[Row]) -> Table | None:
    """Returns a table with a line per series and length of windows, a column per distance of the
    key.

    None if no row is about passkeys.
    """
    rows = latest(rows)
    names = series_names(rows)
    found = [(row, row.passkey) for row in rows if row.passkey is not None]
    if not found:
        return None
    order = list(dict.fromkeys(names[row.tested] for row, _ in found))
    lines = sorted({(order.index(names[row.tested]), row.eval_length) for row, _ in found})
    columns = sorted({passkey.distance for _, passkey in found})
    cells = grouped(
        (row for row, _ in found),
        lambda row: (names[row.tested], row.eval_length, row.passkey and row.passkey.distance),
    )
    facts = [
        f"{tables.ACCURACY.title}, by tokens from the key to its answer",
        fact("{} prompts in each cell", (passkey.prompts for _, passkey in found), " or "),
        fact("trained at {}", (row.train_length for row, _ in found)),
        fact("seed {}", (row.seed for row, _ in found)),
        fact("step {}", (f"{row.step:,}" for row, _ in found)),
        *origin([row for row, _ in found if row.is_measured]),
    ]
    labels = [(order[number], length) for number, length in lines]
    grid = [
        [
            make_cell(cells[*label, column], tables.ACCURACY) if (*label, column) in cells else None
            for column in columns
        ]
        for label in labels
    ]
    return Table(
        caption="; ".join(filter(None, facts)) + ".",
        label_header=("run", "window"),
        labels=tuple(labels),
        header=tuple(columns),
        cells=tuple(tuple((part,) for part in parts) for parts in grid),
        ratios=False,
    )


def caption(panel: Panel) -> str:
    """Returns the facts about the numbers: kind, corpus, split, windows, tokens, seeds, steps and
    `origin`.
    """
    windows = "non-overlapping windows (stride = length)"
    if panel.stride is not None:
        windows = f"sliding windows, stride {panel.stride:,}"
    if panel.use is not None:
        windows = (
            f"the last {panel.stride:,} tokens of {panel.use.windows:,} windows, the same at each length, against what "
            f"they cost at {panel.use.from_length:,}"
        )
        if panel.use.longest:
            windows += f", at ends of windows of {panel.use.longest:,}"
    rows = [row for row in panel.rows if row.is_measured]
    trained = [row for row in rows if row.is_trained]
    contexts = (
        row.documents.mean_context or 0
        for row in trained
        if row.documents and row.documents.positions != SEPARATELY
    )
    unknown = (f"{row.unknown_tokens:,}" for row in rows if row.unknown_tokens)
    facts = [
        f"{panel.kind.title} by evaluation length: {panel.corpus}, split {panel.split}, {windows}",
        fact("{} tokens scored in each cell", (f"{row.tokens:,}" for row in rows), " or "),
        panel.reading,
        fact("{} tokens of the text unknown to the tokenizer", unknown, " or "),
        fact("mean context {}", (f"{mean:,.1f}" for mean in contexts), " or "),
        fact("seed {}", (row.seed for row in trained)),
        fact("step {}", (f"{row.step:,}" for row in trained)),
        *origin(rows),
    ]
    return "; ".join(filter(None, facts)) + "."


def origin(rows: Sequence[Row]) -> list[str]:
    """Returns the facts where and when rows were made, as far as they are known: commit, devices
    with the host's processor, version of JAX, days.
    """
    devices = (
        row.device.text + (f" ({row.processor})" if row.processor else "")
        for row in rows
        if row.device
    )
    days = sorted({row.date.partition("T")[0] for row in rows if row.date})
    return [
        fact("commit {}", (row.short_commit for row in rows if row.commit)),
        fact("on {}", devices),
        fact("jax {}", (row.jax for row in rows if row.jax)),
        fact("{}", [days[0], days[-1]] if days else [], " to "),
    ]


def fact(template: str, values: Iterable, separator: str = ", ") -> str:
    """Returns `template` with the distinct `values`; "" if there are none."""
    distinct = list(dict.fromkeys(values))
    return template.format(separator.join(map(str, distinct))) if distinct else ""


def explanation(panel: Panel) -> str:
    """Returns how to read the cells of a panel's table."""
    if panel.use is not None:
        text = (
            "Nats per token that longer windows save on the same tokens: above zero if the model uses the longer "
            "context, zero if it only survives it."
        )
    else:
        text = "In brackets: the value divided by the run's own at its train length. " + (
            BEST
            if _are_comparable(panel.rows, panel.kind)
            else "No best is marked: the runs have several tokenizers, and the numbers are per token. "
            "Compare bits per byte."
        )
    return f"{text} {tables.spread_note(panel.numbers)}".rstrip()
