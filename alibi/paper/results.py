"""Our numbers in a table of the paper, from its runs' rows and work directories, and the table's
files.
"""

from collections.abc import Mapping, Sequence

from alibi.evaluation.perplexity import Perplexity
from alibi.paper.definitions import POSITIONS, REFERENCES, Quantity, published
from alibi.paper.reproduction import Reproduction
from alibi.reporting import tables
from alibi.reporting.charts import COLOURS, Spec, apart, named_lines, png
from alibi.reporting.measure import measure_of
from alibi.reporting.panels import Panel, Series, make_cell, origin
from alibi.reporting.recorded import find_rows, merge_rows
from alibi.reporting.report import failed_runs
from alibi.reporting.rows import Row, latest
from alibi.reporting.tables import (
    Content,
    Kind,
    Missing,
    Number,
    Table,
    compare,
    fact,
)
from alibi.reporting.writers import to_csv, to_latex, to_markdown, to_text
from alibi.runs import evaluation_hash
from alibi.storage.files import write_whole
from alibi.sweeps.definition import Run
from alibi.sweeps.state import run_directory

SPEEDS = {
    tables.TRAINING_SPEED,
    tables.EVALUATION_SPEED,
    tables.WORDS_PER_SECOND,
    tables.DEVICE_HOURS,
}
CORES = Kind("CPU cores of the hosts that trained", "{:.0f}".format)
MARKED = (
    "The paper's best perplexity of each column is marked, and ours if the 95% interval of its "
    "difference from each other excludes zero."
)
NOT_RUN_YET = Missing("not run yet")
NOT_RUN_HERE = Missing("not run here")  # a system outside this project


def compare_with_paper(one: Reproduction) -> Table:
    """Returns the paper's table with our present numbers beside its own, and their differences."""
    paper, first, quantities = one.paper, one.definition.labels, one.quantities
    rows = _rows(one)
    trainings = {run.name: _training(one, run) for run in one.sweep.runs}

    def sides(row: int, column: int) -> tuple[Content, Content]:
        """Returns the paper's part of a cell, and ours."""
        printed, quantity = paper.rows[row][first + column], quantities.get((row, column))
        if not printed:
            return None, None
        if quantity is None:  # its kind of number stands elsewhere in the column
            kind = next(other.kind for at, other in quantities.items() if at[1] == column)
            return published(printed, kind), NOT_RUN_HERE
        ours: Content = NOT_RUN_YET
        if quantity in rows:
            ours = make_cell(measure_of(rows[quantity]).entries(rows[quantity]), quantity.kind)
        elif quantity.kind.value is None:
            value = trainings[one.runs[quantity.model].name].get(quantity.kind)
            ours = NOT_RUN_YET if value is None else Number((value,), quantity.kind)
        return published(printed, quantity.kind), ours

    columns = range(len(paper.columns) - first)
    grid = [[sides(row, column) for column in columns] for row in range(len(paper.rows))]
    ratios = one.setting.divisor > 1
    references = {cell_index: _reference(one, *cell_index) for cell_index in quantities}
    cells = compare(grid, references, ratios=ratios)
    ours = [cell[1] for line in cells for cell in line if isinstance(cell[1], Number)]
    marks = tables.spread_marks(ours)
    has_losses = tables.PERPLEXITY in {quantity.kind for quantity in quantities.values()}
    caption = _caption(one, [row for row in rows.values() if row.is_measured], trainings)
    return Table(
        caption=" ".join(filter(None, [caption, MARKED * has_losses, tables.spread_note(marks)])),
        label_header=paper.columns[:first],
        labels=tuple(tuple(map(one.setting.label, cells[:first])) for cells in paper.rows),
        header=tuple(map(one.setting.label, paper.columns[first:])),
        cells=cells,
        parts=("paper", "ours", "difference of ratios" if ratios else "difference"),
        ratios=ratios,
        marks=marks,
        scale=one.setting.scale,
        name=f"{one.setting.scale}-{one.number:02d}",
    )


def _rows(one: Reproduction) -> dict[Quantity, Row]:
    """Returns each evaluated quantity's row, in the table's order."""
    trained = {
        run.name: (run.config.train.steps, evaluation_hash(run.config)) for run in one.sweep.runs
    }
    # Rows of other steps or configs go first: `latest` keeps one row a cell, whatever its step.
    rows_found = latest(
        row
        for row in find_rows(one.directory)
        if (row.step, row.config_hash) == trained.get(row.run)
        and row.evaluator == Perplexity.name()
        and not row.override
    )
    by_windows = {
        (row.run, row.length, row.options.get("stride", row.length), row.split): row
        for row in rows_found
    }
    rows = {}
    for quantity in one.quantities.values():
        if quantity.kind.value is not None and quantity.eval_length:
            length = one.setting.length(quantity.eval_length)
            stride, run = one.stride(quantity) or length, one.runs[quantity.model]
            if row := by_windows.get((run.name, length, stride, quantity.split)):
                rows[quantity] = row
    return rows


def _reference(one: Reproduction, row: int, column: int) -> tuple[int, int]:
    """Returns the reference of a cell's ratio, see `TableDefinition.reference`."""
    rule, last, rows = one.definition.reference, one.definition.labels - 1, one.paper.rows
    candidates = []
    for at, quantity in one.quantities.items():
        is_trained = quantity.eval_length in (None, quantity.model.train_length)
        is_found = {
            "row": at[0] == row,
            "column": at[1] == column,
            "trained": at[1] == column and is_trained,
            "group": at[1] == column and rows[at[0]][last] == rows[row][last],
        }
        candidates += [at] * is_found[rule]
    return min(candidates)


def _training(one: Reproduction, run: Run) -> dict[Kind, float]:
    """Returns speed, memory, parameters, updates, device-hours and cores from a finished training, as far
    as they are known.
    """
    directory = run_directory(one.directory, run)
    try:
        status, made = directory.status(), directory.provenance()
    except ValueError:  # not started
        return {}
    if status["state"] != "finished" or directory.differing(run.config):
        return {}
    devices, updates, rate = made["device_count"], status["step"], status["tokens_per_second"]
    figures = {
        tables.PARAMETERS: made["parameters"],
        tables.UPDATES: updates,
        tables.MEMORY: status.get("peak_memory_bytes"),
        CORES: made.get("cores"),
    }
    if rate:
        figures[tables.TRAINING_SPEED] = rate / devices
        hours = updates * run.config.train.batch_tokens / rate * devices / 3600
        figures[tables.DEVICE_HOURS] = hours
    return {kind: value for kind, value in figures.items() if value is not None}


def _caption(
    one: Reproduction, rows: Sequence[Row], trainings: Mapping[str, Mapping[Kind, float]]
) -> str:
    """Returns the caption for measured cells `rows`. Without rows it has only the plan."""
    setting, definition, quantities = one.setting, one.definition, one.quantities.values()
    kinds = {quantity.kind for quantity in quantities}
    lengths = {quantity.eval_length for quantity in quantities if quantity.eval_length}
    ours = {setting.length(length) for length in lengths}
    title = f"Table {one.number} of the paper, {setting.label(definition.title)}: paper / ours / difference"
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
    for run in one.sweep.runs:
        of_update.setdefault(run.config.train.batch_tokens, set()).add(run.config.train_length)
    updates = (
        f"{tokens:,} tokens"
        + (f" at L = {', '.join(map(str, sorted(at)))}" if len(of_update) > 1 else "")
        for tokens, at in sorted(of_update.items())
    )
    windows = (
        f"sliding windows of stride {row.options['stride']:,}"
        if "stride" in row.options
        else "non-overlapping windows"
        for row in rows
    )
    cores = (training[CORES] for training in trainings.values() if CORES in training)
    facts = [
        title,
        rounding if len(ours) < len(lengths) else "",
        fact("corpus {}", (row.corpus for row in rows)),
        fact("split {}", (row.split for row in rows), " and "),
        fact("{}", windows, " and "),
        fact(
            "{} tokens scored in each cell", (f"{row.results['tokens']:,}" for row in rows), " or "
        ),
        fact("{} parameters", sorted({f"{row.parameters:,}" for row in rows}), " or "),
        fact("seed {}", (row.seed for row in rows)),
        fact("step {}", (f"{row.step:,}" for row in rows)),
        f"updates of {' and '.join(updates)}",
        *origin(rows),
        fact("trained with {} CPU cores", cores, " or ") if kinds & SPEEDS else "",
        definition.note,
    ]
    return "; ".join(filter(None, facts)) + "."


def write_table(one: Reproduction, failures: Mapping[str, str]) -> str:
    """Writes the table as Markdown, CSV, LaTeX and figure, with each run's failure. Returns it as text."""
    merge_rows(one.directory)
    compared, name = compare_with_paper(one), f"table{one.number:02d}"
    contents: dict[str, str | bytes] = {".csv": to_csv(compared), ".tex": to_latex(compared)}
    markdown = to_markdown(compared)
    has_ours = any(isinstance(ours, Number) for cells in compared.cells for _, ours, _ in cells)
    if one.definition.lines and has_ours:
        contents[".png"] = png(comparison_figure(one, compared))
        markdown += f"\n![table {one.number}: paper and ours]({name}.png)\n"
    if failures:
        markdown += "\n" + failed_runs(failures)
    for suffix, content in ({".md": markdown} | contents).items():
        write_whole(one.outputs / (name + suffix), content)
    files = (f"{one.outputs}/{name}{suffix}" for suffix in (".md", *contents))
    return "\n".join([to_text(compared), *files])


def comparison_figure(one: Reproduction, compared: Table) -> Spec:
    """Returns the paper's numbers on the left and ours on the right. It needs at least one of ours."""
    draw = _bars if one.definition.lines == "bars" else _lines
    titles = ("paper", f"this project, {one.setting.scale} scale")  # in the order of a cell's parts
    parts = [draw(one, compared, side) | {"title": title} for side, title in enumerate(titles)]
    return {"hconcat": parts, "spacing": 40, "resolve": apart("color", "shape", "strokeDash")}


def _lines(one: Reproduction, compared: Table, side: int) -> Spec:
    """Returns a side's perplexities: a line for each row or column, over the lengths at its scale."""
    by_column = one.definition.lines == "columns"
    by_name: dict[str, dict[int, Content]] = {}
    for row, column in sorted(one.quantities, key=lambda at: at[by_column]):
        quantity, content = one.quantities[row, column], compared.cells[row][column][side]
        if (
            isinstance(content, Number)
            and content.kind is tables.PERPLEXITY
            and quantity.eval_length
        ):
            length = one.setting.length(quantity.eval_length) if side else quantity.eval_length
            name = compared.header[column] if by_column else compared.labels[row][0]
            by_name.setdefault(str(name).removesuffix(" PPL"), {})[length] = content
    series = [
        Series(name, POSITIONS.get(name, name), min(cells), cells)
        for name, cells in by_name.items()
    ]
    strides = {one.stride(quantity) for quantity in one.quantities.values() if quantity.eval_length}
    stride = strides.pop() if len(strides) == 1 else None
    measure, kind = Perplexity(stride=stride), tables.PERPLEXITY
    panel = Panel(measure, f"table {one.number}", "valid", kind, tuple(series), rows=())
    return named_lines(panel)


def _bars(one: Reproduction, compared: Table, side: int) -> Spec:
    """Returns a group of bars for each row, and in it a bar for each column: its value in percent of its
    reference.
    """
    columns, groups = compared.header, [" ".join(map(str, labels)) for labels in compared.labels]
    values = [
        {"group": group, "column": column, "percent": 100 * content.ratio}
        for group, cells in zip(groups, compared.cells, strict=True)
        for column, cell in zip(columns, cells, strict=True)
        if isinstance(content := cell[side], Number) and content.ratio is not None
    ]
    x = {
        "field": "group",
        "type": "nominal",
        "sort": groups,
        "scale": {"domain": groups},
        "title": None,
    }
    y = {
        "field": "percent",
        "type": "quantitative",
        "title": "percent of sinusoidal at the same length",
    }
    colour = {
        "field": "column",
        "type": "nominal",
        "sort": columns,
        "scale": {"range": list(COLOURS[: len(columns)])},
    }
    bars = {
        "mark": "bar",
        "encoding": {
            "x": x | {"axis": {"labelAngle": -60, "labelLimit": 0}}, "y": y,
            "xOffset": {"field": "column", "sort": columns}, "color": colour | {"legend": {"orient": "top"}},
        },
    }  # fmt: skip
    even = {"data": {"values": [{"percent": 100}]}, "mark": {"type": "rule", "strokeDash": [2, 3]}}
    return {
        "data": {"values": values}, "width": 660, "height": 420,
        "layer": [bars, even | {"encoding": {"y": y}}],
    }  # fmt: skip
