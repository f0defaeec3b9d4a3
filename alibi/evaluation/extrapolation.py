"""Trained runs at many lengths: work directories -> rows of results.jsonl, NLL dumps, table and figure."""

import dataclasses
import functools
import itertools
import math
import os
import traceback
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from alibi.config.override import Override
from alibi.data.cache import content_key
from alibi.data.corpora import make_corpus
from alibi.data.corpus import Corpus
from alibi.data.textfiles import TextFiles
from alibi.data.tokens import TokenFile, prepare, prepare_text
from alibi.errors import UserError, print_error
from alibi.evaluation.context_use import gain_of
from alibi.evaluation.dumps import Dump
from alibi.evaluation.output import Output, OutputError, row_of, say
from alibi.evaluation.perplexity import Score, Scorer, run_scorer
from alibi.evaluation.windows import SAME_TOKENS, Part, Windows, plan, plan_contexts
from alibi.parallel.hosts import broadcast, is_primary
from alibi.progress import Progress
from alibi.reporting.rows import ContextUse, Row
from alibi.runs.trained import TrainedRun
from alibi.storage.files import resolve

__all__ = ["Options", "OutputError", "evaluate_runs"]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What every evaluation is told of the runs; ValueError for what can't be."""

    output_dir: str | os.PathLike[str]  # or an address: where rows/, results.jsonl, nll/, report.md and figures go
    lengths: tuple[int, ...] = ()  # in tokens; empty: `multiples` of each run's train_length
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    checkpoint: str = "latest"  # latest, best or a step
    batch_tokens: int | None = None  # inputs a device holds at one time; None: the run's eval.batch_tokens
    override: Override | None = None  # what is put in the place of what each run was trained with
    report: bool = True  # write tables and figures at the end

    def __post_init__(self) -> None:
        if self.checkpoint not in ("latest", "best") and not self.checkpoint.isdecimal():
            raise ValueError(f"checkpoint={self.checkpoint} must be latest, best or a step, such as 600")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(f"batch_tokens={self.batch_tokens} must be at least 1")

    def trained(self, workdir: str) -> TrainedRun:
        """The checkpoint of the run in `workdir` that is evaluated, as what it is tested as."""
        return TrainedRun(workdir, self.checkpoint, batch_tokens=self.batch_tokens, override=self.override)

    def lengths_of(self, train_length: int) -> list[int]:
        """The lengths for a run, ascending, each once."""
        return sorted({*(self.lengths or (train_length * multiple for multiple in self.multiples))})


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """What to evaluate of each run."""

    stride: int | None = None  # tokens that a window scores; None: the length (windows don't overlap)
    split: str = "valid"  # train, valid or test, of the run's own corpus
    text_file: str = ""  # files to score in place of the split, tokenized as the run's text was
    context_windows: int = 0  # also score the same tokens, the last of so many windows, at each length; 0: don't
    dump_nll: bool = False  # also write each token's NLL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context_windows < 0 or self.context_windows == 1:
            raise ValueError(f"context_windows={self.context_windows} must be 0, for none, or at least 2")
        for length in self.lengths:  # those of multiples are known only with the run
            plan(1, length, self.stride)


def evaluate_runs(workdirs: Sequence[str | os.PathLike[str]], options: Options) -> list[str]:
    """Evaluates each work directory, writes rows as they are found, then the report; returns what failed.

    A length that a position method isn't defined for, that the text doesn't have or that
    memory doesn't suffice for, becomes a row with `error` and is no failure. A text that is too
    short for all the lengths that a method is defined for is one; see also `evaluate_each`.
    """

    def evaluate(workdir: str, output: Output) -> None:
        RunEvaluation(workdir, options, output).run()

    return evaluate_each(workdirs, options, evaluate)


def evaluate_each(
    workdirs: Sequence[str | os.PathLike[str]],
    options: RunOptions,
    evaluate: Callable[[str, Output], None],
) -> list[str]:
    """Calls `evaluate` with each work directory and the common output, then writes the report; returns what failed.

    A work directory that can't be evaluated has failed, whatever the reason; the others go on. There is no report where
    the only one failed without a row.

    Raises:
      ValueError: two work directories of one name, whose rows could not be told apart.
      OutputError: the output directory can't be written.
    """
    paths = list(dict.fromkeys(str(resolve(workdir)) for workdir in workdirs))
    check_names(paths)
    output = Output(options.output_dir)
    failures, found_before = [], len(output.rows)
    for path in paths:
        try:
            evaluate(path, output)
        except OutputError:
            raise
        except Exception as error:
            if jax.distributed.is_initialized():
                raise  # the other processes may not have met the error, and would wait for this one
            if not isinstance(error, ValueError | OSError | UserError):
                say(traceback.format_exc().rstrip())
            known = str(error) or type(error).__name__
            failures.append(known if path in known else f"{path}: {known}")
            if is_primary():
                print_error(failures[-1])
    # Of one that failed before any result the reason is all that there is to say.
    nothing = len(paths) == len(failures) == 1 and len(output.rows) == found_before
    broadcast(lambda: output.finish(report=options.report and not nothing, workdirs=paths))
    return failures


class RunEvaluation:
    """One run at all its lengths; the parameters are loaded only if there is something to compute."""

    def __init__(self, workdir: str, options: Options, output: Output):
        self.options, self.output = options, output
        self.trained = options.trained(workdir)
        self.text, self.title = self._prepare_text()
        lengths = options.lengths_of(self.trained.config.train_length)
        self.windows = [plan(len(self.text.tokens), length, options.stride) for length in lengths]

    @functools.cached_property
    def scorer(self) -> Scorer:
        return run_scorer(self.trained)

    def run(self) -> None:
        """Evaluates what is missing, shortest first; ValueError where the text is too short for any of it."""
        for windows in self.windows:
            self._evaluate(windows)
        if self.options.context_windows:
            self._evaluate_contexts()
        defined = [windows for windows in self.windows if not self.trained.undefined(windows.length)]
        if defined and all(map(self._too_short, defined)):
            raise ValueError(f"no length can be measured: {self._too_short(defined[0])}")

    def _evaluate(self, windows: Windows) -> None:
        row = self._unmeasured(windows)
        limit = self.trained.undefined(windows.length) or self._too_short(windows)
        if limit:
            self.output.add_error(dataclasses.replace(row, limit=True), self._name(row), limit)
            return
        if broadcast(lambda: self._is_done(row)):
            say(f"{self._title(windows)}: done before")
            return
        params = self.trained.params  # outside: its errors are no limit of this length
        if self.trained.step != row.step:  # training has gone on since, and this is its newer checkpoint
            return self._evaluate(windows)
        score = self.output.unless_memory_ends(row, self._name(row), lambda: self._score(params, windows))
        if score is not None:
            self._record(row, score)

    def _evaluate_contexts(self) -> None:
        """Scores the same tokens in windows of each length, and records what the longer ones gain."""
        fitting = [windows.length for windows in self.windows if not self._too_short(windows)]
        lengths = [length for length in fitting if not self.trained.undefined(length)]
        if len(lengths) < 2:
            say(f"{self.trained.name}: what more context gains needs two lengths that can be measured, not {lengths}")
            return
        parts = plan_contexts(len(self.text.tokens), lengths, self.options.context_windows)
        use = ContextUse(len(parts[0]), lengths[0], longest=lengths[-1])
        rows = [dataclasses.replace(self._unmeasured(part), context_use=use) for part in parts]
        if broadcast(lambda: all(map(self._is_done, rows))):
            say(f"{self.trained.title}, the same tokens at each length: done before")
            return
        params = self.trained.params
        if self.trained.step != rows[0].step:
            return self._evaluate_contexts()
        shortest = None
        for part, row in zip(parts, rows, strict=True):
            scored = functools.partial(self._score, params, part)
            score = self.output.unless_memory_ends(row, self._name(row), scored)
            if score is None:
                break
            shortest = shortest or score
            finite = math.isfinite(score.total_nats) and math.isfinite(shortest.total_nats)
            gain = dataclasses.replace(gain_of(shortest, score), longest=use.longest) if finite else use
            found = dataclasses.replace(row, context_use=gain)
            self._record(found, score)

    def _too_short(self, windows: Windows) -> str:
        """Why the text has no result at this length, if it has none."""
        if windows.length <= windows.num_tokens:
            return ""
        # No token would have a longer context than in the whole text.
        manifest, longer = self.text.manifest, "--text_file"
        if manifest.max_bytes >= 0:
            limit = "data.max_train_bytes" if manifest.split == "train" else "data.max_valid_bytes"
            longer += f", or for a new run a larger {limit}"
        return (
            f"the text has {windows.num_tokens:,} tokens, fewer than the length {windows.length:,}; "
            f"use lengths up to {windows.num_tokens:,}, or a longer text ({longer})"
        )

    def _prepare_text(self) -> tuple[TokenFile, str]:
        """The text that is scored, and what rows may call it."""
        data, tokenizer, own = self.trained.config.data, self.trained.tokenizer, self.options.text_file
        corpus: Corpus = TextFiles({"file": own}) if own else make_corpus(data)
        if own:
            text = prepare_text(own, tokenizer, data.cache_dir, progress=is_primary())
        else:
            text = prepare(data, self.options.split, tokenizer, progress=is_primary())
        manifest = text.manifest
        if unknown := manifest.unknown_words:
            literal = manifest.unk_in_text
            why = f"{unknown - literal:,} words that the run's dictionary lacks, {literal:,} <unk> in the text itself"
            say(f"{manifest.source}: {unknown:,} of {manifest.tokens:,} tokens are <unk>: {why}")
        return text, corpus.title(manifest.split)

    def _is_done(self, row: Row) -> bool:
        measured = any(found.is_measured for found in self.output.find(row))
        dumps = self.options.dump_nll and row.context_use is None
        return measured and (not dumps or self.output.has_dump(row.scoring))

    def _score(self, params: PyTree, windows: Windows | Part) -> Score:
        tokens, scorer, title = self.text.tokens, self.scorer, self._title(windows)
        with Progress(title, windows.num_tokens, "token", show=is_primary()) as bar:
            if isinstance(windows, Part):
                return scorer.score_windows(params, tokens, windows, progress=bar.update)
            return scorer.score(params, tokens, windows.length, windows.stride, progress=bar.update)

    def _record(self, row: Row, score: Score) -> None:
        """Writes the dump, then the row: a row without its dump would be taken for done."""
        total, manifest = score.total_nats, self.text.manifest
        if not math.isfinite(total):
            error = f"the NLL is {total}; the parameters or the method overflow at this length"
            self.output.add_error(row, self._name(row), error)
            return
        # Where windows score their last tokens, the text's counts are also of the tokens between those.
        whole = row.context_use is None
        if self.options.dump_nll and whole:
            self.output.dump(Dump(row.scoring, score.nll_nats, np.asarray(self.text.tokens, np.int32)))
        words, size = (manifest.words, manifest.bytes) if whole else (None, None)
        measured = row.scored(total, tokens=score.tokens, words=words, bytes=size, seconds=score.seconds)
        shown = "too large to write" if measured.perplexity is None else f"{measured.perplexity:.3f}"
        say(f"{self._title(score.windows)}: perplexity {shown} ({score.seconds:.1f} s)")
        self.output.add(measured)

    def _unmeasured(self, windows: Windows | Part) -> Row:
        """The row without its results."""
        manifest = self.text.manifest
        text = content_key({"text": manifest.description, "max_bytes": manifest.max_bytes})[:12]
        corpus = self.output.name_text(self.title, manifest.split, text)
        row = row_of(self.trained, windows=windows, corpus=corpus, split=manifest.split, tokens_sha256=manifest.sha256)
        return dataclasses.replace(row, text_hash=text)

    def _name(self, row: Row) -> str:
        return f"{self.trained.title} at {row.eval_length:,}"

    def _title(self, windows: Windows | Part) -> str:
        how = {"sliding": f", stride {windows.stride:,}", SAME_TOKENS: ", the same tokens"}.get(windows.mode, "")
        return f"{self.trained.title} at {windows.length:,}{how}"


def check_names(paths: Sequence[str]) -> None:
    """Raises ValueError where two work directories have one name, by which rows are told apart."""
    for path, other in itertools.combinations(paths, 2):
        if os.path.basename(other) == os.path.basename(path):
            raise ValueError(
                f"{path} and {other} have the same name, and rows are known by it; "
                "rename one, or evaluate them into two output directories"
            )
