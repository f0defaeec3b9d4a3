"""Our numbers for a table's cells, from the rows and the work directories of its runs."""

import re

from alibi.reporting.comparison import NOT_RUN_HERE, NOT_RUN_YET, Comparison, Entry
from alibi.reporting.report import ROWS_FILE
from alibi.reporting.rows import CONFIG_KEY, Row, is_measured, latest, read_rows
from alibi.reproduction.caption import make_caption
from alibi.reproduction.quantities import Metric, Quantity
from alibi.reproduction.reproduction import Reproduction
from alibi.runs import RunDirectory, evaluation_hash
from alibi.sweeps.definition import Run
from alibi.sweeps.plan import run_directory

# Of the numbers that the paper prints of a run, the keys of the row of an evaluation.
ROW_METRICS = {Metric.PERPLEXITY: "perplexity", Metric.EVALUATION_SPEED: "tokens_per_second"}


class Results:
    """What has been measured for `reproduction` until now."""

    def __init__(self, reproduction: Reproduction):
        self.reproduction = reproduction
        self._trainings: dict[str, dict[Metric, float]] = {}
        # Rows of other steps or configs go first: `latest` keeps one row a cell, whatever its step.
        trained = {run.name: (run.config.train.steps, evaluation_hash(run.config)) for run in reproduction.sweep.runs}
        rows = read_rows(reproduction.directory / ROWS_FILE)
        self._rows = latest(row for row in rows if (row["step"], row.get(CONFIG_KEY)) == trained.get(row["run"]))

    def compare(self) -> Comparison:
        """The paper's table with our numbers beside its own."""
        one, paper = self.reproduction, self.reproduction.paper
        labels = one.definition.labels
        entries = [
            tuple(self._entry(row, column, printed) for column, printed in enumerate(cells[labels:]))
            for row, cells in enumerate(paper.rows)
        ]
        strides = {one.stride(quantity) for quantity in one.quantities.values() if quantity.eval_length}
        return Comparison(
            number=one.number,
            scale=one.setting.scale,
            caption=make_caption(one, self.rows()),
            label_header=paper.columns[:labels],
            labels=tuple(tuple(map(one.setting.scaled, cells[:labels])) for cells in paper.rows),
            header=tuple(map(one.setting.scaled, paper.columns[labels:])),
            entries=tuple(entries),
            ratios=one.setting.divisor > 1,
            stride=strides.pop() if len(strides) == 1 else None,
        )

    def rows(self) -> list[Row]:
        """The measured rows that the table shows."""
        found = [self._row(quantity) for quantity in self.reproduction.quantities.values() if quantity.eval_length]
        return [row for row in found if row and is_measured(row)]

    def _entry(self, row: int, column: int, printed: str) -> Entry | None:
        quantity = self.reproduction.quantities.get((row, column))
        if not printed:
            return None
        if quantity is None:
            measure = next(q.measure for (_, c), q in self.reproduction.quantities.items() if c == column)
            return Entry(printed, measure, None, NOT_RUN_HERE)
        value, note = self._value(quantity)
        return Entry(printed, quantity.measure, value, note, self._reference(row, column))

    def _value(self, quantity: Quantity) -> tuple[float | None, str]:
        """Our number, or why there is none."""
        run = self.reproduction.runs[quantity.model]
        if quantity.metric not in ROW_METRICS:
            value = self._of_training(quantity.metric, run)
            return value, "" if value is not None else NOT_RUN_YET
        row = self._row(quantity)
        if row is None:
            return None, NOT_RUN_YET
        if not is_measured(row):
            return None, row.get("error") or "no result"
        value = row[ROW_METRICS[quantity.metric]]
        if quantity.metric is Metric.EVALUATION_SPEED and value is not None:
            value /= device_count(row)
        return value, "" if value is not None else f"{quantity.metric.value} too large to write"

    def _row(self, quantity: Quantity) -> Row | None:
        one = self.reproduction
        run = one.runs[quantity.model]
        length = one.setting.length(quantity.eval_length or 1)
        cell = (run.name, length, one.stride(quantity) or length, quantity.split)
        found = (row for row in self._rows if (row["run"], row["eval_length"], row["stride"], row["split"]) == cell)
        return next(found, None)

    def _of_training(self, metric: Metric, run: Run) -> float | None:
        if run.name not in self._trainings:
            directory = run_directory(self.reproduction.directory, run)
            self._trainings[run.name] = training_figures(directory, run)
        return self._trainings[run.name].get(metric)

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


def device_count(row: Row) -> int:
    """How many devices made a row; its `device` is such as "cpu x1"."""
    found = re.search(r" x(\d+)$", row["device"] or "")
    return int(found[1]) if found else 1


def training_figures(directory: RunDirectory, run: Run) -> dict[Metric, float]:
    """Speed, memory, parameters, updates and device-hours of a finished run of this config; none before."""
    try:
        status, made = directory.status(), directory.provenance()
    except ValueError:
        return {}
    if status["state"] != "finished" or directory.differing(run.config):
        return {}
    figures = {Metric.PARAMETERS: made["parameters"], Metric.UPDATES: status["step"]}
    if rate := status["tokens_per_second"]:
        devices = made["device_count"]
        tokens = status["step"] * run.config.train.batch_tokens
        figures |= {Metric.TRAINING_SPEED: rate / devices, Metric.DEVICE_HOURS: tokens / rate * devices / 3600}
    if "peak_memory_bytes" in status:
        figures[Metric.MEMORY] = status["peak_memory_bytes"]
    return figures
