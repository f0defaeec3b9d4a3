"""Our numbers in a table of the paper, from the rows and work directories of its runs, and the
files of the table.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from alibi.paper.definitions import REFERENCES, Quantity, published
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
from alibi.runs import evaluation_hash
from alibi.storage.files import write_whole
from alibi.sweeps.state import run_directory

SPEEDS = {
    tables.TRAINING_SPEED,
    tables.EVALUATION_SPEED,
    tables.WORDS_PER_SECOND,
    tables.DEVICE_HOURS,
}


@dataclasses.dataclass(frozen=True)
class Training:
    """Figures of the training of a finished run, and the CPU cores of its hosts, None if they are
    not recorded.
    """

    figures: dict[Kind, float]
    cores: int | None = None


def compare_with_paper(reproduction: Reproduction) -> Comparison:
    """Returns the paper's table with our present numbers beside its own."""
    one, paper, first = reproduction, reproduction.paper, reproduction.definition.labels
    rows, trainings = _rows(one), _trainings(one)

    def our_part(quantity: Quantity) -> Number | Missing:
        if quantity.kind in VALUES:
            row = rows.get(quantity)
            return make_cell([row], quantity.kind) if row else Missing(Absence.NOT_RUN_YET)
        value = trainings[one.runs[quantity.model].name].figures.get(quantity.kind)
        return Missing(Absence.NOT_RUN_YET) if value is None else Number((value,), quantity.kind)

    theirs: list[list[Part]] = [[None] * len(cells[first:]) for cells in paper.rows]
    ours: list[list[Part]] = [[None] * len(cells[first:]) for cells in paper.rows]
    for row, cells in enumerate(paper.rows):
        for column, printed in enumerate(cells[first:]):
            quantity = one.quantities.get((row, column))
            if quantity:
                theirs[row][column], ours[row][column] = (
                    published(printed, quantity.kind),
                    our_part(quantity),
                )
            # a system outside this project; its kind of number stands elsewhere in the column
            elif printed:
                kind = next(other.kind for at, other in one.quantities.items() if at[1] == column)
                theirs[row][column], ours[row][column] = (
                    published(printed, kind),
                    Missing(Absence.NOT_RUN_HERE),
                )
    ratios = one.setting.divisor > 1
    strides = {one.stride(quantity) for quantity in one.quantities.values() if quantity.eval_length}
    references = {place: _reference(one, *place) for place in one.quantities}
    return Comparison(
        caption=_caption(
            one, [row for row in rows.values() if row.is_measured], trainings.values()
        ),
        label_header=paper.columns[:first],
        labels=tuple(tuple(map(one.setting.label, cells[:first])) for cells in paper.rows),
        header=tuple(map(one.setting.label, paper.columns[first:])),
        cells=compare(theirs, ours, references, ratios=ratios),
        parts=("paper", "ours", "difference of ratios" if ratios else "difference"),
        ratios=ratios,
        scale=one.setting.scale,
        name=f"{one.setting.scale}-{one.number:02d}",
        number=one.number,
        stride=strides.pop() if len(strides) == 1 else None,
    )


def _rows(reproduction: Reproduction) -> dict[Quantity, Row]:
    """Returns the row of each evaluated quantity, in the order of the table."""
    trained = {
        run.name: (run.config.train.steps, evaluation_hash(run.config))
        for run in reproduction.sweep.runs
    }
    # Rows of other steps or configs go first: `latest` keeps one row a cell, whatever its step.
    found = latest(
        row
        for row in find_rows(reproduction.directory)
        if (row.step, row.config_hash) == trained.get(row.run)
        and not (row.override or row.context_use or row.passkey)
    )
    by_windows = {(row.run, row.eval_length, row.stride, row.split): row for row in found}
    rows = {}
    for quantity in reproduction.quantities.values():
        if quantity.eval_length:
            run, length = (
                reproduction.runs[quantity.model],
                reproduction.setting.length(quantity.eval_length),
            )
            row = by_windows.get(
                (run.name, length, reproduction.stride(quantity) or length, quantity.split)
            )
            if row is not None:
                rows[quantity] = row
    return rows


def _reference(reproduction: Reproduction, row: int, column: int) -> tuple[int, int]:
    """Returns the reference of a cell's ratio, see `TableDefinition.reference`."""
    known, definition, paper = reproduction.quantities, reproduction.definition, reproduction.paper
    if definition.reference == "row":
        return min(cell for cell in known if cell[0] == row)
    in_column = [cell for cell in known if cell[1] == column]
    if definition.reference == "trained":
        in_column = [
            cell
            for cell in in_column
            if known[cell].eval_length in (None, known[cell].model.train_length)
        ]
    if definition.reference == "group":
        last = definition.labels - 1
        in_column = [
            cell for cell in in_column if paper.rows[cell[0]][last] == paper.rows[row][last]
        ]
    return min(in_column)


def _trainings(reproduction: Reproduction) -> dict[str, Training]:
    """Returns the training of each run: speed, memory, parameters, updates and device-hours once it
    has finished.
    """
    trainings = {}
    for run in reproduction.sweep.runs:
        directory, figures = run_directory(reproduction.directory, run), {}
        try:
            status, made = directory.status(), directory.provenance()
        except ValueError:  # not started
            trainings[run.name] = Training({})
            continue
        if status["state"] == "finished" and not directory.differing(run.config):
            figures = {tables.PARAMETERS: made["parameters"], tables.UPDATES: status["step"]}
            if rate := status["tokens_per_second"]:
                devices, tokens = (
                    made["device_count"],
                    status["step"] * run.config.train.batch_tokens,
                )
                figures |= {
                    tables.TRAINING_SPEED: rate / devices,
                    tables.DEVICE_HOURS: tokens / rate * devices / 3600,
                }
            if "peak_memory_bytes" in status:
                figures[tables.MEMORY] = status["peak_memory_bytes"]
        trainings[run.name] = Training(figures, made.get("cores"))
    return trainings


def _caption(reproduction: Reproduction, rows: Sequence[Row], trainings: Iterable[Training]) -> str:
    """Returns the caption of the table whose measured cells are `rows`; without rows only the plan."""
    setting, definition, quantities = (
        reproduction.setting,
        reproduction.definition,
        reproduction.quantities.values(),
    )
    kinds = {quantity.kind for quantity in quantities}
    lengths = {quantity.eval_length for quantity in quantities if quantity.eval_length}
    ours = {setting.length(length) for length in lengths}
    shown = heading_text(setting.label(definition.title))
    title = f"Table {reproduction.number} of the paper, {shown}: paper / ours / difference"
    if setting.divisor > 1:
        title = (
            f"{setting.scale.upper()} SCALE, NOT THE PAPER'S. {title} of the ratios to "
            f"{REFERENCES[definition.reference]}, in brackets: other corpus, other model, so only the "
            f"shape can be compared; lengths are divided by {setting.divisor} (in brackets)"
            f"{'; our words are bytes' * (setting.vocab_size == 256)}"
        )
    rounding = f"the paper's {len(lengths)} lengths round to {len(ours)} here"
    rounding += ", so that neighbours may show one result twice"
    # whole sequences make the tokens of an update differ by length
    of_update: dict[int, set[int]] = {}
    for run in reproduction.sweep.runs:
        of_update.setdefault(run.config.train.batch_tokens, set()).add(run.config.train_length)
    updates = (
        f"{tokens:,} tokens"
        + (f" at L = {', '.join(map(str, sorted(at)))}" if len(of_update) > 1 else "")
        for tokens, at in sorted(of_update.items())
    )
    windows = (
        "non-overlapping windows"
        if row.mode == "nonoverlapping"
        else f"{row.mode} windows of stride {row.stride:,}"
        for row in rows
    )
    cores = (training.cores for training in trainings if training.cores is not None)
    facts = [
        title,
        rounding if len(ours) < len(lengths) else "",
        fact("corpus {}", (row.corpus for row in rows)),
        fact("split {}", (row.split for row in rows), " and "),
        fact("{}", windows, " and "),
        fact("{} tokens scored in each cell", (f"{row.tokens:,}" for row in rows), " or "),
        fact("{} parameters", sorted({f"{row.parameters:,}" for row in rows}), " or "),
        fact("seed {}", (row.seed for row in rows)),
        fact("step {}", (f"{row.step:,}" for row in rows)),
        f"updates of {' and '.join(updates)}",
        fact("commit {}", (row.short_commit for row in rows if row.commit)),
        fact("on {}", (row.device.text for row in rows if row.device)),
        fact("trained with {} CPU cores", cores, " or ") if kinds & SPEEDS else "",
        definition.note,
    ]
    marked = " The best perplexity of each column is marked." if tables.PERPLEXITY in kinds else ""
    return "; ".join(filter(None, facts)) + "." + marked


def write_table(reproduction: Reproduction, failures: dict[str, str]) -> str:
    """Writes the table as Markdown, CSV, LaTeX and figure, with the failures by run; returns it as
    text.
    """
    merge_rows(reproduction.directory)
    compared = compare_with_paper(reproduction)
    outputs, name = reproduction.outputs, f"table{reproduction.number:02d}"
    contents: dict[str, str | bytes] = {".csv": to_csv(compared), ".tex": to_latex(compared)}
    markdown, lines = to_markdown(compared), reproduction.definition.lines
    if lines and compared.has_ours:
        contents[".png"] = png(comparison_figure(compared, lines))
        markdown += f"\n![table {reproduction.number}: paper and ours]({name}.png)\n"
    if failures:
        markdown += "\n" + failed_runs(failures)
    for suffix, content in ({".md": markdown} | contents).items():
        write_whole(outputs / (name + suffix), content)
    return "\n".join(
        [to_text(compared), *(f"{outputs}/{name}{suffix}" for suffix in (".md", *contents))]
    )
