"""Our numbers for a table's cells, from the rows and work directories of its runs, and the files that show them."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

from alibi.paper.definitions import REFERENCES, Quantity
from alibi.paper.published import published
from alibi.paper.reproduction import Reproduction
from alibi.reporting import tables
from alibi.reporting.charts import png
from alibi.reporting.figures import comparison_figure
from alibi.reporting.panels import VALUES, fact, make_cell
from alibi.reporting.recorded import find_rows, merge_rows
from alibi.reporting.report import failed_runs
from alibi.reporting.rows import Row, latest
from alibi.reporting.tables import Absence, Comparison, Kind, Missing, Number, Part, compare
from alibi.reporting.writers import heading_text, to_csv, to_latex, to_markdown, to_text
from alibi.runs import RunDirectory, evaluation_hash
from alibi.storage.files import write_whole
from alibi.sweeps.definition import Run
from alibi.sweeps.state import run_directory

SPEEDS = {tables.TRAINING_SPEED, tables.EVALUATION_SPEED, tables.WORDS_PER_SECOND, tables.DEVICE_HOURS}


class Results:
    """What has been measured for `reproduction` until now."""

    def __init__(self, reproduction: Reproduction):
        self.reproduction = reproduction
        # Rows of other steps or configs go first: `latest` keeps one row a cell, whatever its step.
        trained = {run.name: (run.config.train.steps, evaluation_hash(run.config)) for run in reproduction.sweep.runs}
        rows = find_rows(reproduction.directory)
        self._rows = latest(
            row
            for row in rows
            if (row.step, row.config_hash) == trained.get(row.run)
            and not (row.override or row.context_use or row.passkey)
        )

    def compare(self) -> Comparison:
        """The paper's table with our numbers beside its own."""
        one, paper = self.reproduction, self.reproduction.paper
        labels, ratios = one.definition.labels, one.setting.divisor > 1
        columns = range(len(paper.columns) - labels)
        sides = [[self._sides(row, column) for column in columns] for row in range(len(paper.rows))]
        theirs, ours = ([[cell[side] for cell in row] for row in sides] for side in (0, 1))
        references = {place: self._reference(*place) for place in one.quantities}
        strides = {one.stride(quantity) for quantity in one.quantities.values() if quantity.eval_length}
        return Comparison(
            caption=make_caption(one, self.rows()),
            label_header=paper.columns[:labels],
            labels=tuple(tuple(map(one.setting.label, cells[:labels])) for cells in paper.rows),
            header=tuple(map(one.setting.label, paper.columns[labels:])),
            cells=compare(theirs, ours, references, ratios=ratios),
            parts=("paper", "ours", "difference of ratios" if ratios else "difference"),
            ratios=ratios,
            scale=one.setting.scale,
            name=f"{one.setting.scale}-{one.number:02d}",
            number=one.number,
            stride=strides.pop() if len(strides) == 1 else None,
        )

    def rows(self) -> list[Row]:
        """The measured rows that the table shows."""
        found = [self._row(quantity) for quantity in self.reproduction.quantities.values() if quantity.eval_length]
        return [row for row in found if row and row.is_measured]

    def _sides(self, row: int, column: int) -> tuple[Part, Part]:
        """The published number and ours, or why there is none; None where the table has an empty cell."""
        one = self.reproduction
        printed, quantity = one.paper.rows[row][one.definition.labels + column], one.quantities.get((row, column))
        if not printed:
            return None, None
        if quantity is None:  # what the number of a system that isn't here is, the others of its column say
            kind = next(other.kind for at, other in one.quantities.items() if at[1] == column)
            return published(printed, kind), Missing(Absence.NOT_RUN_HERE)
        return published(printed, quantity.kind), self._ours(quantity)

    def _ours(self, quantity: Quantity) -> Number | Missing:
        if quantity.kind not in VALUES:
            value = self._trainings[self.reproduction.runs[quantity.model].name].get(quantity.kind)
            return Missing(Absence.NOT_RUN_YET) if value is None else Number((value,), quantity.kind)
        found = self._row(quantity)
        return make_cell([found], quantity.kind) if found else Missing(Absence.NOT_RUN_YET)

    def _row(self, quantity: Quantity) -> Row | None:
        one = self.reproduction
        run = one.runs[quantity.model]
        length = one.setting.length(quantity.eval_length or 1)
        cell = (run.name, length, one.stride(quantity) or length, quantity.split)
        return next((row for row in self._rows if (row.run, row.eval_length, row.stride, row.split) == cell), None)

    @functools.cached_property
    def _trainings(self) -> dict[str, dict[Kind, float]]:
        """What the trainings took, by run."""
        one = self.reproduction
        return {run.name: training_figures(run_directory(one.directory, run), run) for run in one.sweep.runs}

    def _reference(self, row: int, column: int) -> tuple[int, int]:
        """The cell that this one's ratio is taken to, see `TableDefinition.reference`."""
        known, definition, paper = self.reproduction.quantities, self.reproduction.definition, self.reproduction.paper
        if definition.reference == "row":
            return min(cell for cell in known if cell[0] == row)
        in_column = [cell for cell in known if cell[1] == column]
        if definition.reference == "trained":
            in_column = [
                cell for cell in in_column if known[cell].eval_length in (None, known[cell].model.train_length)
            ]
        if definition.reference == "group":
            last = definition.labels - 1
            in_column = [cell for cell in in_column if paper.rows[cell[0]][last] == paper.rows[row][last]]
        return min(in_column)


def training_figures(directory: RunDirectory, run: Run) -> dict[Kind, float]:
    """Speed, memory, parameters, updates and device-hours of a finished run of this config; none before."""
    try:
        status, made = directory.status(), directory.provenance()
    except ValueError:
        return {}
    if status["state"] != "finished" or directory.differing(run.config):
        return {}
    figures = {tables.PARAMETERS: made["parameters"], tables.UPDATES: status["step"]}
    if rate := status["tokens_per_second"]:
        devices = made["device_count"]
        tokens = status["step"] * run.config.train.batch_tokens
        figures |= {tables.TRAINING_SPEED: rate / devices, tables.DEVICE_HOURS: tokens / rate * devices / 3600}
    if "peak_memory_bytes" in status:
        figures[tables.MEMORY] = status["peak_memory_bytes"]
    return figures


def make_caption(reproduction: Reproduction, rows: Sequence[Row]) -> str:
    """The caption of the table whose measured cells are `rows`; without rows it says only what is planned."""
    kinds = {quantity.kind for quantity in reproduction.quantities.values()}
    facts = [
        _what(reproduction),
        _rounding(reproduction),
        fact("corpus {}", (row.corpus for row in rows)),
        fact("split {}", (row.split for row in rows), " and "),
        fact("{}", map(_windows, rows), " and "),
        fact("{} tokens scored in each cell", (f"{row.tokens:,}" for row in rows), " or "),
        fact("{} parameters", sorted({f"{row.parameters:,}" for row in rows}), " or "),
        fact("seed {}", (row.seed for row in rows)),
        fact("step {}", (f"{row.step:,}" for row in rows)),
        _updates(reproduction),
        fact("commit {}", (row.short_commit for row in rows if row.commit)),
        fact("on {}", (row.device.text for row in rows if row.device)),
        fact("trained with {} CPU cores", _cores(reproduction), " or ") if kinds & SPEEDS else "",
        reproduction.definition.note,
    ]
    marked = " The best perplexity of each column is marked." if tables.PERPLEXITY in kinds else ""
    return "; ".join(filter(None, facts)) + "." + marked


def _what(reproduction: Reproduction) -> str:
    setting, definition = reproduction.setting, reproduction.definition
    shown = heading_text(setting.label(definition.title))
    title = f"Table {reproduction.number} of the paper, {shown}: paper / ours / difference"
    if setting.divisor == 1:
        return title
    return (
        f"{setting.scale.upper()} SCALE, NOT THE PAPER'S. {title} of the ratios to "
        f"{REFERENCES[definition.reference]}, in brackets: other corpus, other model, so only the "
        f"shape can be compared; lengths are divided by {setting.divisor} (in brackets)"
        f"{'; our words are bytes' * (setting.vocab_size == 256)}"
    )


def _rounding(reproduction: Reproduction) -> str:
    """Whether several of the paper's lengths are one here."""
    lengths = {quantity.eval_length for quantity in reproduction.quantities.values() if quantity.eval_length}
    ours = {reproduction.setting.length(length) for length in lengths}
    if len(ours) == len(lengths):
        return ""
    return f"the paper's {len(lengths)} lengths round to {len(ours)} here, so that neighbours may show one result twice"


def _windows(row: Row) -> str:
    if row.mode == "nonoverlapping":
        return "non-overlapping windows"
    return f"{row.mode} windows of stride {row.stride:,}"


def _updates(reproduction: Reproduction) -> str:
    """How many tokens an update has; whole sequences make it differ by length."""
    lengths: dict[int, set[int]] = {}
    for run in reproduction.sweep.runs:
        lengths.setdefault(run.config.train.batch_tokens, set()).add(run.config.train_length)
    parts = (
        f"{tokens:,} tokens" + (f" at L = {', '.join(map(str, sorted(at)))}" if len(lengths) > 1 else "")
        for tokens, at in sorted(lengths.items())
    )
    return f"updates of {' and '.join(parts)}"


def _cores(reproduction: Reproduction) -> Iterator[int]:
    """The cores of the hosts of the runs that have been started."""
    for run in reproduction.sweep.runs:
        with contextlib.suppress(ValueError, KeyError):  # not started, or by a version that didn't record them
            yield run_directory(reproduction.directory, run).provenance()["cores"]


def write_table(reproduction: Reproduction, failures: dict[str, str]) -> str:
    """Writes what is known until now, and `failures` by run below it; returns it as text for a terminal."""
    merge_rows(reproduction.directory)
    compared = Results(reproduction).compare()
    outputs, name = reproduction.outputs, f"table{reproduction.number:02d}"
    contents = {".md": to_markdown(compared), ".csv": to_csv(compared), ".tex": to_latex(compared)}
    suffixes, drawn = [*contents], reproduction.definition.lines
    if drawn and compared.has_ours:
        write_whole(outputs / f"{name}.png", png(comparison_figure(compared, drawn)))
        contents[".md"] += f"\n![table {reproduction.number}: paper and ours]({name}.png)\n"
        suffixes.append(".png")
    if failures:
        contents[".md"] += "\n" + failed_runs(failures)
    for suffix, content in contents.items():
        write_whole(outputs / (name + suffix), content)
    return "\n".join([to_text(compared), *(f"{outputs}/{name}{suffix}" for suffix in suffixes)])
