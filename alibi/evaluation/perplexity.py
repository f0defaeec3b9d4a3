"""Perplexity: the negative log-likelihood of every token, in windows of each length (paper, section
2.1 and appendix B).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from alibi.config import Config
from alibi.data.corpus import SPLITS
from alibi.evaluation.base import (
    Cell,
    Evaluator,
    NoResultError,
    Subject,
    Text,
    option,
    refuse_other_objectives,
)
from alibi.evaluation.dumps import Dump, file_beside, write_dump
from alibi.evaluation.separately import lines_of, padded
from alibi.evaluation.windows import Windows, mean_context, windows_of
from alibi.objectives import make_objective
from alibi.reporting.intervals import part_sums, six_digits
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Row
from alibi.reporting.tables import BITS_PER_BYTE, PERPLEXITY, PSEUDO_PERPLEXITY, Kind, fact
from alibi.storage.files import write_whole


@dataclasses.dataclass(frozen=True)
class OfText(Evaluator):
    """Options that choose the text to score."""

    split: str = option("valid", "the split of each run's own corpus", of_row=False, names=SPLITS)
    text_file: str = option(
        "",
        "score this text in place of a split: paths or globs of texts, or of .jsonl, .csv and .parquet files, whose "
        "rows are documents; .gz, .xz, .zst, .bz2",
        of_row=False,
    )
    document_end: str = option(
        "",
        "end of the documents in --text_file; defaults to the run's data.document_end",
        of_row=False,
        names=("", "file", "blank_line", "line"),
    )
    column: str = option(
        "", "column of the rows in --text_file; defaults to the run's data.column", of_row=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_file and self.split != "valid":
            raise ValueError(
                f"--split={self.split} names a split of each run's own corpus, --text_file={self.text_file} another "
                "text; give one of them"
            )
        for name in ("document_end", "column"):
            if (value := getattr(self, name)) and not self.text_file:
                raise ValueError(
                    f"--{name}={value} is for --text_file; name the files of a split there to read it otherwise"
                )

    @property
    def row_split(self) -> str:
        return "file" if self.text_file else self.split

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        if not (self.text_file or config.data[self.split]):
            raise ValueError(
                f"the config names no {self.split} text: data.{self.split} is empty; give --text_file=FILE or another "
                "--split"
            )

    def text(self, subject: Subject, cell: Cell) -> Text:
        return subject.text(
            self.split,
            file=self.text_file,
            document_end=self.document_end,
            column=self.column,
        )


@dataclasses.dataclass(frozen=True)
class OfWindows(OfText):
    """The option of windows that begin with a token of their own."""

    bos: bool = option(
        False,
        "each window begins with the tokenizer's BOS token, which is not scored: for imported models that were trained "
        "with one",
    )

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        if self.bos:
            refuse_other_objectives("--bos", config, whole=True)

    def text(self, subject: Subject, cell: Cell) -> Text:
        if self.bos and subject.run.tokenizer.bos_id is None:
            raise ValueError(
                f"--bos needs a tokenizer that puts a BOS token before a text, and that of {subject.run.name} "
                f"({subject.run.config.data.tokenizer}) puts none; leave it out"
            )
        return super().text(subject, cell)

    def begun(self, windows: Windows, subject: Subject) -> Windows:
        """Returns `windows`, which with `bos` begin with this token."""
        begin = subject.run.tokenizer.bos_id if self.bos else None
        return dataclasses.replace(windows, begin=begin)

    def title(self, cell: Cell) -> str:
        return super().title(cell) + ", after BOS" * self.bos

    def suffix(self, row: Row) -> str:
        return super().suffix(row) + "-bos" * self.bos

    def facts(self, panel: Panel) -> list[str]:
        title, *others = super().facts(panel)
        return [title + ", a BOS token before each window" * self.bos, *others]


@dataclasses.dataclass(frozen=True)
class Perplexity(OfWindows):
    """Perplexity and bits per byte, at each window length. Each token is scored exactly once."""

    stride: int | None = option(
        None,
        "tokens that each window scores; defaults to the length, without overlap",
        at_least=1,
    )
    separately: bool = option(
        False, "score each document on its own, and write the NLL of its tokens"
    )
    dump_nll: bool = option(
        False, "write each token's NLL to nll/RUN-length=l-stride=s-step=t-HASH.npz", of_row=False
    )

    kinds: ClassVar = (PERPLEXITY, BITS_PER_BYTE)
    figure: ClassVar = "extrapolation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bos and self.dump_nll:
            raise ValueError(
                "--dump_nll is of windows that begin with the text's own tokens, --bos of others; give one of them"
            )
        if self.separately and (self.stride or self.dump_nll):
            raise ValueError(
                "--separately scores each document on its own, and writes the NLL of its tokens; --stride and "
                "--dump_nll are for a whole text, so leave them out"
            )

    @property
    def isolates(self) -> bool:
        return self.separately

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        for flag in ("dump_nll", "separately"):
            if getattr(self, flag):
                refuse_other_objectives(f"--{flag}", config, whole=flag == "dump_nll")
        for length in lengths:
            windows_of(1, length, self.stride, causal=make_objective(config).causal)

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        return "" if self.separately else text.too_short(cell["length"])

    def title(self, cell: Cell) -> str:
        stride = f", stride {self.stride:,}" if self.stride else ""
        return super().title(cell) + stride + ", each document on its own" * self.separately

    def is_done(self, subject: Subject, row: Row) -> bool:
        folder = subject.output.folder
        return (not self.dump_nll or file_beside(row, folder / "nll", ".npz").exists()) and (
            not self.separately or file_beside(row, folder / "documents", ".jsonl").exists()
        )

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        """Writes the dump before the row is written: a row without its dump would count as done."""
        from alibi.evaluation.output import print_once
        from alibi.evaluation.scorer import run_objective

        assert text.file is not None
        manifest, objective, output = text.file.manifest, run_objective(subject.run), subject.output
        length, causal = row.cell["length"], objective.causal
        tokens = padded(text.documents, length) if self.separately else text.tokens
        windows = windows_of(len(tokens), length, self.stride, causal=causal)
        windows = self.begun(windows, subject)
        score = subject.score(tokens, windows, self.title(row.cell))
        # padding is no token, of the speed neither
        nll = score.values[tokens[:] >= 0] if self.separately else score.values
        results = text_results(
            nll,
            score.seconds,
            # with a selection of tokens the counts would be of the whole text
            words=None if objective.selects else manifest.words,
            bytes=None if objective.selects else manifest.bytes,
            read=manifest.tokens,
        )
        if row.documents:
            results["mean_context"] = mean_context(objective, tokens, windows)
        if self.dump_nll:
            dump = Dump(row, nll, np.asarray(tokens, np.int32))
            path = file_beside(row, output.folder / "nll", ".npz")
            output.guard(lambda: write_dump(path, dump))
        if self.separately:
            path = file_beside(row, output.folder / "documents", ".jsonl")
            output.guard(lambda: write_whole(path, lines_of(text.documents, nll)))
            print_once(f"the NLL of each document: {path}")
        return results

    # ---- how reports show it

    def kinds_of(self, row: Row) -> tuple[Kind, ...]:
        masked = row.objective and row.objective["name"] == "masked"
        return (PSEUDO_PERPLEXITY,) if masked else self.kinds

    def windows(self, panel: Panel) -> str:
        if self.stride:
            return f"sliding windows, stride {self.stride:,}"
        return "non-overlapping windows (stride = length)"

    def axis(self) -> str:
        return f"stride {self.stride:,}" if self.stride else ""

    def suffix(self, row: Row) -> str:
        stride = f"-stride{self.stride}" if self.stride else ""
        alone = "-documents-separately" * self.separately
        objective = f"-{row.objective['name']}" if row.objective else ""
        return stride + objective + super().suffix(row) + alone

    def facts(self, panel: Panel) -> list[str]:
        contexts = (
            row.results["mean_context"] for row in panel.rows if "mean_context" in row.results
        )
        alone = "each document scored on its own" * self.separately
        title, tokens, reading, unknown = super().facts(panel)
        reading = "; ".join(filter(None, [alone, reading]))
        mean = fact("mean context {}", (f"{value:,.1f}" for value in contexts), " or ")
        return [title, tokens, reading, unknown, mean]


def text_results(
    nll: Float[np.ndarray, " symbols"],
    seconds: float,
    *,
    tokens: int | None = None,
    words: int | None = None,
    bytes: int | None = None,
    read: int | None = None,
) -> dict[str, Any]:
    """Returns the results for a scored text. A perplexity beyond float64 is left out.

    The NLL is summed over the text, so that rows can be pooled without loss, and over its parts, see
    `alibi.reporting.intervals.part_sums`.

    Args:
      nll: NLL at each scored token, in nats.
      seconds: time for scoring.
      tokens: the text's tokens, if the NLL is of other symbols. Then the results have no parts.
      words, bytes: the text's size, None if only some tokens are scored.
      read: tokens that count in the speed, defaults to the scored tokens.

    Raises:
      NoResultError: the NLL is not finite.
    """
    total, count = float(nll.sum(dtype=np.float64)), tokens or nll.size
    if not math.isfinite(total):
        raise NoResultError(
            f"the NLL is {total}; the parameters or the method overflow at this length"
        )
    results = {
        "nll_nats": total,
        "parts": None if tokens else six_digits(part_sums(nll)),
        "tokens": count,
        "words": words,
        "bytes": bytes,
        "perplexity": _exp(total / count),
        "word_perplexity": _exp(total / words) if words else None,
        "bits_per_byte": total / math.log(2) / bytes if bytes else None,
        "tokens_per_second": (read or count) / seconds,
    }
    return {key: value for key, value in results.items() if value is not None}


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < 709 else None
