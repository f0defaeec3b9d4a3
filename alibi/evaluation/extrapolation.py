"""Perplexity of trained runs at many lengths: work directories -> rows, NLL dumps, table and
figure.
"""

import dataclasses
import functools
import math
import os
import traceback
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int32, PyTree

from alibi.config.override import Override
from alibi.data.corpus import Corpus
from alibi.data.textfiles import TextFiles
from alibi.data.tokens import TokenFile, make_corpus, prepare, prepare_text
from alibi.errors import UserError, print_error
from alibi.evaluation.context_use import gain_of
from alibi.evaluation.dumps import Dump
from alibi.evaluation.output import Output, OutputError, print_once, row_of
from alibi.evaluation.perplexity import Score, run_objective, run_scorer
from alibi.evaluation.separately import documents_of, lines_of, padded
from alibi.evaluation.windows import (
    SAME_TOKENS,
    Tokens,
    Windows,
    mean_context,
    same_token_windows,
    windows_of,
)
from alibi.extras import MissingPackageError, needs
from alibi.parallel.hosts import broadcast, check_alike, is_primary
from alibi.progress import Progress
from alibi.reporting.intervals import part_sums, six_digits
from alibi.reporting.rows import MASKED, SEPARATELY, ContextUse, Row
from alibi.runs import RunDirectory, process_facts
from alibi.runs.trained import TrainedRun
from alibi.storage.files import resolve

__all__ = ["Options", "OutputError", "evaluate_runs"]


@dataclasses.dataclass(frozen=True)
class LengthOptions:
    """The options of every evaluation, of n-grams too."""

    # or an address: for rows/, results.jsonl, nll/, report.md and figures
    output_dir: str | os.PathLike[str]
    lengths: tuple[int, ...] = ()  # in tokens; empty: `multiples` of each run's train_length
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    report: bool = True  # write tables and figures at the end

    def lengths_of(self, train_length: int) -> list[int]:
        """Returns the lengths for a run, ascending, each once."""
        return sorted({*(self.lengths or (train_length * multiple for multiple in self.multiples))})

    def look(self, workdir: str) -> object:
        """Raises ValueError if there is no run in `workdir`; cheap."""
        return RunDirectory(workdir).config()


@dataclasses.dataclass(frozen=True)
class RunOptions(LengthOptions):
    """The options of every evaluation of a model; raises ValueError for impossible values."""

    checkpoint: str = "latest"  # latest, best or a step
    # inputs per device and batch; None: the run's eval.batch_tokens
    batch_tokens: int | None = None
    # replaces the position method, its options or the window of each run
    override: Override | None = None

    def __post_init__(self) -> None:
        if self.checkpoint not in ("latest", "best") and not self.checkpoint.isdecimal():
            raise ValueError(
                f"checkpoint={self.checkpoint} must be latest, best or a step, such as 600"
            )
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(f"batch_tokens={self.batch_tokens} must be at least 1")

    def trained(self, workdir: str) -> TrainedRun:
        """Returns the run in `workdir` at `checkpoint`, with `override`."""
        return TrainedRun(
            workdir, self.checkpoint, batch_tokens=self.batch_tokens, override=self.override
        )

    look = trained  # at the checkpoint and the override too


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """The options of an evaluation of perplexity."""

    # tokens that a window scores; None: the length (windows don't overlap)
    stride: int | None = None
    split: str = "valid"  # train, valid or test, of the run's own corpus
    text_file: str = ""  # files to score in place of the split, with the run's tokenizer
    # of text_file, as in the config section `data`; empty: as the run's text
    document_end: str = ""
    column: str = ""
    separately: bool = False  # score each document on its own, as if there were no other
    # also score the same tokens, the last of this many windows, at each length; 0: don't
    context_windows: int = 0
    dump_nll: bool = False  # also write the NLL of each token

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context_windows < 0 or self.context_windows == 1:
            raise ValueError(
                f"context_windows={self.context_windows} must be 0, for none, or at least 2"
            )
        for length in self.lengths:  # multiples become lengths with the run
            windows_of(1, length, self.stride)
        if self.separately and (self.stride or self.context_windows or self.dump_nll):
            raise ValueError(
                "--separately scores each document on its own, and writes the NLL of its tokens; --stride, "
                "--context_use and --dump_nll are for a whole text, so leave them out"
            )


def evaluate_runs(workdirs: Sequence[str | os.PathLike[str]], options: Options) -> list[str]:
    """Evaluates each work directory, writes each row when it is known, then the report; returns the
    failures.

    A length becomes a row with `error`, and is no failure, if the position method does not support
    it, the text is shorter, or memory does not suffice. A text too short for all supported lengths
    is a failure. See also `evaluate_each`.
    """
    return evaluate_each(
        workdirs, options, lambda workdir, output: RunEvaluation(workdir, options, output).run()
    )


def evaluate_each(
    workdirs: Sequence[str | os.PathLike[str]],
    options: LengthOptions,
    evaluate: Callable[[str, Output], None],
) -> list[str]:
    """Calls `evaluate` with each work directory and the common output, then writes the report;
    returns the failures.

    All work directories are looked at before the first is evaluated. If one can't be evaluated, the
    others are evaluated all the same. There is no report if the only work directory failed without
    a row.

    Raises:
      ValueError: two work directories of the same name, by which rows are told apart; processes
        that differ.
      OutputError: the output directory can't be written.
      MissingPackageError: the report needs a package.
    """
    paths = list(dict.fromkeys(str(resolve(workdir)) for workdir in workdirs))
    given = {"workdirs": list(map(str, workdirs)), "output_dir": str(options.output_dir)}
    check_alike(process_facts(options) | given)
    named: dict[str, str] = {}
    for path in paths:
        if (other := named.setdefault(os.path.basename(path), path)) != path:
            raise ValueError(
                f"{other} and {path} have the same name, and rows are known by it; "
                "rename one, or evaluate them into two output directories"
            )
    if options.report:
        needs("the report, which --noreport leaves out,", "vl_convert")
    output = Output(options.output_dir)
    failures: dict[str, str] = {}
    rows_before = len(output.rows)
    for work in (options.look, lambda path: evaluate(path, output)):
        for path in [path for path in paths if path not in failures]:
            try:
                work(path)
            except OutputError:
                raise
            except Exception as error:
                if jax.distributed.is_initialized():
                    raise  # the other processes may not have met the error, and would wait for this one
                if not isinstance(error, ValueError | OSError | UserError | MissingPackageError):
                    print_once(traceback.format_exc().rstrip())
                reason = str(error) or type(error).__name__
                failures[path] = reason if path in reason else f"{path}: {reason}"
                if is_primary():
                    print_error(failures[path])
    nothing = len(paths) == len(failures) == 1 and len(output.rows) == rows_before
    broadcast(lambda: output.finish(report=options.report and not nothing, workdirs=paths))
    return list(failures.values())


class RunEvaluation:
    """A run at all its lengths; the parameters are loaded only if a length is not measured yet."""

    def __init__(self, workdir: str, options: Options, output: Output):
        self.options, self.output = options, output
        self.trained = options.trained(workdir)
        objective = self.trained.config.objective
        for flag, given in (
            ("context_use", options.context_windows),
            ("dump_nll", options.dump_nll),
            ("separately", options.separately),
        ):
            if given and not objective.causal:
                raise ValueError(
                    f"{self.trained} was trained for objective={objective.name}, and --{flag} is for models that see "
                    "the tokens before each; leave it out"
                )
        if options.dump_nll and self.trained.config.data.isolate_documents:
            raise ValueError(
                f"{self.trained} isolates documents, and --dump_nll is for models that see whole windows; leave it out"
            )
        self.text, self.title, self.documents = self._prepare_text()
        self.scorer = run_scorer(self.trained)
        lengths = options.lengths_of(self.trained.config.train_length)
        all_windows = [
            windows_of(len(self.text.tokens), length, options.stride, causal=objective.causal)
            for length in lengths
        ]
        self.scorer.check(all_windows[0])
        self.windows = [
            dataclasses.replace(windows, mode=SEPARATELY) if options.separately else windows
            for windows in all_windows
        ]

    def run(self) -> None:
        """Measures the missing lengths, shortest first; raises ValueError if the text is too
        short for all.
        """
        run = self.trained
        for windows in self.windows:
            measured = self.output.measure(
                run,
                self._unmeasured(windows),
                self._title(windows),
                functools.partial(self._score, windows),
                limit=run.undefined(windows.length) or self._too_short(windows),
                is_done=self._is_done,
            )
            if measured:
                self._record(*measured)
        defined = [windows for windows in self.windows if not run.undefined(windows.length)]
        lengths = [windows.length for windows in defined if not self._too_short(windows)]
        if self.options.context_windows:
            self._evaluate_contexts(lengths)
        if defined and not lengths:
            raise ValueError(f"no length can be measured: {self._too_short(defined[0])}")

    def _evaluate_contexts(self, lengths: list[int]) -> None:
        """Scores the same tokens in windows of each length, and records the gains of the longer
        ones.
        """
        if len(lengths) < 2:
            name = self.trained.name
            print_once(
                f"{name}: the gain of more context needs two lengths that can be measured, not {lengths}"
            )
            return
        all_windows = same_token_windows(
            len(self.text.tokens), lengths, self.options.context_windows
        )
        use = ContextUse(len(all_windows[0]), lengths[0], longest=lengths[-1])
        rows = (
            dataclasses.replace(self._unmeasured(windows), context_use=use)
            for windows in all_windows
        )
        if broadcast(lambda: all(map(self._is_done, rows))):
            print_once(f"{self.trained.title}, the same tokens at each length: done before")
            return
        params = self.trained.params
        shortest = None
        for windows in all_windows:
            row = dataclasses.replace(self._unmeasured(windows), context_use=use)
            score = self.output.try_score(
                row, self._title(windows), functools.partial(self._score, windows, params)
            )
            if score is None:
                break
            shortest = shortest or score
            gain = use
            if math.isfinite(score.total_nats) and math.isfinite(shortest.total_nats):
                gain = dataclasses.replace(gain_of(shortest, score), longest=use.longest)
            self._record(dataclasses.replace(row, context_use=gain), score)

    def _too_short(self, windows: Windows) -> str:
        """Returns why the text has no result at this length, or an empty text.

        In longer windows than the text no token would have a longer context than in windows as long
        as the text.
        """
        if windows.length <= windows.num_tokens or self.options.separately:
            return ""
        manifest, longer = self.text.manifest, "--text_file"
        if manifest.max_bytes >= 0:
            limit = "data.max_train_bytes" if manifest.split == "train" else "data.max_valid_bytes"
            longer += f", or for a new run a larger {limit}"
        return (
            f"the text has {windows.num_tokens:,} tokens, fewer than the length {windows.length:,}; "
            f"use lengths up to {windows.num_tokens:,}, or a longer text ({longer})"
        )

    def _prepare_text(self) -> tuple[TokenFile, str, list[Int32[np.ndarray, " tokens"]] | None]:
        """Returns the text to score, its title in rows, and the tokens of its documents
        if they are scored separately.
        """
        data, tokenizer, own = (
            self.trained.config.data,
            self.trained.tokenizer,
            self.options.text_file,
        )
        reading = {
            "document_end": self.options.document_end or data.document_end,
            "column": self.options.column or data.column,
        }
        corpus: Corpus = TextFiles({"file": own, **reading}) if own else make_corpus(data)
        if own:
            text = prepare_text(corpus, tokenizer, data.cache_dir, progress=is_primary())
        else:
            text = prepare(data, self.options.split, tokenizer, progress=is_primary())
        manifest = text.manifest
        check_alike(manifest.identity)
        if unknown := manifest.unknown_words:
            of_what = "outside the vocabulary of the run's tokenizer"
            if manifest.tokenizer == "words":
                literal = manifest.unk_in_text
                outside = f"{unknown - literal:,} words outside the run's dictionary"
                of_what = f"<unk>: {outside}, {literal:,} <unk> in the text itself"
            print_once(
                f"{manifest.source}: {unknown:,} of {manifest.tokens:,} tokens are {of_what}"
            )
        if tokenizer.changes_text:
            print_once(
                f"{manifest.source}: the tokenizer's normalizer may change the text (case, ligatures, accents, white "
                "space), and bits per byte are of the bytes of the original"
            )
        documents = documents_of(text, corpus) if self.options.separately else None
        return text, corpus.title(manifest.split), documents

    def _is_done(self, row: Row) -> bool:
        dumps = self.options.dump_nll and row.context_use is None
        return (
            self.output.is_done(row)
            and (not dumps or self.output.has_dump(row.scoring))
            and (self.documents is None or self.output.documents_file(row).exists())
        )

    def _score(self, windows: Windows, params: PyTree) -> Score:
        tokens: Tokens = self.text.tokens
        read = windows
        if self.documents is not None:
            tokens = padded(self.documents, windows.length)
            read = dataclasses.replace(windows, stop=len(tokens))
        with Progress(self._title(read), read.num_tokens, "token", show=is_primary()) as bar:
            score = self.scorer.score_windows(params, tokens, read, progress=bar.update)
        if self.documents is not None:  # padding is no token, of the speed neither
            score = Score(windows, score.nll_nats[tokens[:] >= 0], score.seconds)
        return score

    def _record(self, row: Row, score: Score) -> None:
        """Writes the dump, then the row: a row without its dump would count as done."""
        total, manifest = score.total_nats, self.text.manifest
        if not math.isfinite(total):
            error = f"the NLL is {total}; the parameters or the method overflow at this length"
            self.output.add_error(row, self._title(score.windows), error)
            return
        words = size = None
        parts = None if row.context_use else six_digits(part_sums(score.nll_nats))
        # else only some tokens are scored, and the counts are of the whole text
        if row.context_use is None and row.mode != MASKED:
            words, size = manifest.words, manifest.bytes
            if self.options.dump_nll:
                self.output.write_dump(
                    Dump(row.scoring, score.nll_nats, np.asarray(self.text.tokens, np.int32))
                )
        measured = row.scored(
            total,
            tokens=score.tokens,
            words=words,
            bytes=size,
            seconds=score.seconds,
            read=score.windows.num_tokens,
            parts=parts,
        )
        shown = (
            "too large to write" if measured.perplexity is None else f"{measured.perplexity:.3f}"
        )
        print_once(f"{self._title(score.windows)}: perplexity {shown} ({score.seconds:.1f} s)")
        if self.documents is not None:
            self.output.write_documents(row, lines_of(self.documents, score.nll_nats))
        elif row.documents is not None:
            context = mean_context(run_objective(self.trained), self.text.tokens, score.windows)
            documents = dataclasses.replace(row.documents, mean_context=context)
            measured = dataclasses.replace(measured, documents=documents)
        self.output.add(measured)

    def _unmeasured(self, windows: Windows) -> Row:
        """Returns the row without its results."""
        manifest = self.text.manifest
        corpus = self.output.name_text(self.title, manifest.split, manifest.text_hash)
        return row_of(
            self.trained,
            windows,
            corpus=corpus,
            split=manifest.split,
            tokens_sha256=manifest.sha256,
            text_hash=manifest.text_hash,
            unknown_tokens=manifest.unknown_words or None,
        )

    def _title(self, windows: Windows) -> str:
        mode = {
            "sliding": f", stride {windows.stride:,}",
            SAME_TOKENS: ", the same tokens",
            SEPARATELY: ", each document on its own",
        }.get(windows.mode, "")
        return f"{self.trained.title} at {windows.length:,}{mode}"
