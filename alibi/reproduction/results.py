"""Our numbers for a table's cells, from the rows and the work directories of its runs."""

from alibi.reporting.comparison import NOT_RUN_HERE, NOT_RUN_YET, Comparison, Entry
from alibi.reporting.measures import parse_printed
from alibi.reporting.report import ROWS_FILE
from alibi.reporting.rows import CONFIG_KEY, Row, is_measured, latest, read_rows
from alibi.reporting.tables import fact
from alibi.reproduction.quantities import Metric, Quantity
from alibi.reproduction.reproduction import Reproduction
from alibi.runs import RunDirectory, config_hash
from alibi.sweeps.definition import Run
from alibi.sweeps.plan import run_directory

# Of the numbers that the paper prints of a run, the keys of the row of an evaluation.
ROW_METRICS = {Metric.PERPLEXITY: "perplexity", Metric.EVALUATION_SPEED: "tokens_per_second"}


class Results:
    """What has been measured for `reproduction` until now."""

    def __init__(self, reproduction: Reproduction):
        self.reproduction = reproduction
        self._trainings: dict[str, dict[Metric, float]] = {}
        self._rows = latest(read_rows(reproduction.directory / ROWS_FILE))

    def compare(self) -> Comparison:
        """The paper's table with our numbers beside its own."""
        one, paper = self.reproduction, self.reproduction.paper
        labels = one.definition.labels
        entries = [
            tuple(self._entry(row, column, printed) for column, printed in enumerate(cells[labels:]))
            for row, cells in enumerate(paper.rows)
        ]
        return Comparison(
            number=one.number,
            scale=one.setting.scale,
            caption=self._caption(),
            label_header=paper.columns[:labels],
            labels=tuple(tuple(self._scaled(label) for label in cells[:labels]) for cells in paper.rows),
            header=tuple(self._scaled(name) for name in paper.columns[labels:]),
            entries=tuple(entries),
            ratios=one.setting.divisor > 1,
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
        return value, "" if value is not None else f"{quantity.metric.value} too large to write"

    def _row(self, quantity: Quantity) -> Row | None:
        one = self.reproduction
        run = one.runs[quantity.model]
        length = one.setting.length(quantity.eval_length or 1)
        cell = (run.name, length, one.stride(quantity) or length, quantity.split)
        trained = (run.config.train.steps, config_hash(run.config))
        for row in self._rows:
            same = (row["run"], row["eval_length"], row["stride"], row["split"]) == cell
            if same and (row["step"], row.get(CONFIG_KEY)) == trained:
                return row
        return None

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
        if definition.reference == "group":
            last = definition.labels - 1
            in_column = [cell for cell in in_column if paper.rows[cell[0]][last] == paper.rows[row][last]]
        return min(in_column)

    def _scaled(self, label: str) -> str:
        """A length of the paper's, with that of this scale; other labels as they are."""
        divisor, length = self.reproduction.setting.divisor, parse_printed(label) if label.isdecimal() else None
        return label if divisor == 1 or length is None else f"{label} ({self.reproduction.setting.length(int(length))})"

    def _caption(self) -> str:
        one, rows = self.reproduction, self.rows()
        what = f"Table {one.number} of the paper, {one.definition.title}: paper / ours / difference"
        if one.setting.divisor > 1:
            divided = f"lengths are divided by {one.setting.divisor} (in brackets)"
            what = (
                f"SMALL SCALE, NOT THE PAPER'S. {what} of the ratios to the {one.definition.reference}'s first, in "
                f"brackets: other corpus, other model, so only the shape can be compared; {divided}"
            )
        facts = [
            fact("{}", (f"corpus {row['corpus']}" for row in rows)),
            fact("{} tokens scored in each cell", (f"{row['tokens']:,}" for row in rows), " or "),
            fact("{} parameters", sorted({f"{row['parameters']:,}" for row in rows}), " or "),
            fact("seed {}", (row["seed"] for row in rows)),
            fact("step {}", (f"{row['step']:,}" for row in rows)),
            fact("commit {}", (str(row["commit"])[:12] for row in rows if row["commit"])),
            fact("on {}", (row["device"] for row in rows if row["device"])),
        ]
        facts.append(one.definition.note)
        return "; ".join([what, *filter(None, facts)]) + ". The best perplexity of each column is marked."


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
