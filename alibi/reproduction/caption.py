"""What stands above a table: how its numbers were made, and what they must not be taken for."""

from collections.abc import Iterator, Sequence

from alibi.reporting.rows import Row, short_commit
from alibi.reporting.tables import fact
from alibi.reproduction.definitions import REFERENCES
from alibi.reproduction.quantities import Metric
from alibi.reproduction.reproduction import Reproduction
from alibi.sweeps.plan import run_directory

SPEEDS = {Metric.TRAINING_SPEED, Metric.EVALUATION_SPEED, Metric.DEVICE_HOURS}


def make_caption(reproduction: Reproduction, rows: Sequence[Row]) -> str:
    """Of the table whose measured cells are `rows`; without rows only what is planned."""
    metrics = {quantity.metric for quantity in reproduction.quantities.values()}
    facts = [
        _what(reproduction),
        _rounding(reproduction),
        fact("corpus {}", (row["corpus"] for row in rows)),
        fact("split {}", (row["split"] for row in rows), " and "),
        fact("{}", map(_windows, rows), " and "),
        fact("{} tokens scored in each cell", (f"{row['tokens']:,}" for row in rows), " or "),
        fact("{} parameters", sorted({f"{row['parameters']:,}" for row in rows}), " or "),
        fact("seed {}", (row["seed"] for row in rows)),
        fact("step {}", (f"{row['step']:,}" for row in rows)),
        _updates(reproduction),
        fact("commit {}", (short_commit(row) for row in rows if row["commit"])),
        fact("on {}", (row["device"] for row in rows if row["device"])),
        fact("trained with {} CPU cores", _cores(reproduction), " or ") if metrics & SPEEDS else "",
        reproduction.definition.note,
    ]
    marked = " The best perplexity of each column is marked." if Metric.PERPLEXITY in metrics else ""
    return "; ".join(filter(None, facts)) + "." + marked


def _what(reproduction: Reproduction) -> str:
    setting, definition = reproduction.setting, reproduction.definition
    title = f"Table {reproduction.number} of the paper, {setting.scaled(definition.title)}: paper / ours / difference"
    if setting.divisor == 1:
        return title
    return (
        f"SMALL SCALE, NOT THE PAPER'S. {title} of the ratios to {REFERENCES[definition.reference]}, in brackets: "
        f"other corpus, other model, so only the shape can be compared; lengths are divided by {setting.divisor} "
        "(in brackets)"
    )


def _rounding(reproduction: Reproduction) -> str:
    """Whether several of the paper's lengths are one here."""
    lengths = {quantity.eval_length for quantity in reproduction.quantities.values() if quantity.eval_length}
    ours = {reproduction.setting.length(length) for length in lengths}
    if len(ours) == len(lengths):
        return ""
    return f"the paper's {len(lengths)} lengths round to {len(ours)} here, so that neighbours may show one result twice"


def _windows(row: Row) -> str:
    if row["mode"] == "nonoverlapping":
        return "non-overlapping windows"
    return f"{row['mode']} windows of stride {row['stride']:,}"


def _updates(reproduction: Reproduction) -> str:
    """How many tokens an update has; whole sequences make it differ by length."""
    lengths: dict[int, set[int]] = {}
    for run in reproduction.sweep.runs:
        lengths.setdefault(run.config.train.batch_tokens, set()).add(run.config.train_length)
    if len(lengths) == 1:
        return f"updates of {next(iter(lengths)):,} tokens"
    parts = (f"{tokens:,} tokens at L = {', '.join(map(str, sorted(lengths[tokens])))}" for tokens in sorted(lengths))
    return f"updates of {' and '.join(parts)}"


def _cores(reproduction: Reproduction) -> Iterator[int]:
    """Of the hosts of the runs that have been started."""
    for run in reproduction.sweep.runs:
        try:
            cores = run_directory(reproduction.directory, run).provenance().get("cores")
        except ValueError:  # not started
            continue
        if cores:
            yield cores
