"""A run under evaluation: its texts and its scorers, each made once, and its rows."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jaxtyping import Int32

from alibi.config import flatten
from alibi.data.corpus import Corpus
from alibi.data.textfiles import TextFiles
from alibi.data.tokenfile import Manifest, TokenFile, Tokens
from alibi.data.tokens import make_corpus, prepare, prepare_text
from alibi.evaluation.base import Cell, Evaluator, NoResultError
from alibi.evaluation.output import Output, made_here, print_once
from alibi.evaluation.scorer import Score, Scorer, TokenFunction, model_nll, run_scorer
from alibi.evaluation.separately import documents_of
from alibi.evaluation.windows import Windows, windows_of
from alibi.model.decoder import DecoderLM
from alibi.objectives import make_objective
from alibi.parallel.hosts import check_alike, gather, is_primary
from alibi.progress import Progress
from alibi.reporting.rows import Device, Row
from alibi.runs import evaluation_hash
from alibi.runs.trained import TrainedRun

ALIKE_SECONDS = 60  # if one process runs out of memory, all must do so within this time


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens to score, and how rows name them."""

    tokens: Tokens
    corpus: str  # the name in rows
    split: str
    tokens_sha256: str
    text_hash: str | None = None
    file: TokenFile | None = None  # defaults to none: tokens made for a cell
    source: Corpus | None = None  # where the file's text comes from

    @property
    def manifest(self) -> Manifest | None:
        return None if self.file is None else self.file.manifest

    @functools.cached_property
    def documents(self) -> list[Int32[np.ndarray, " tokens"]]:
        """Each document's tokens, see `documents_of`."""
        assert self.file is not None
        assert self.source is not None
        return documents_of(self.file, self.source)

    def too_short(self, length: int) -> str:
        """Returns why no window of `length` fits into the text, or "".

        In longer windows than the text no token would have a longer context than in windows as long
        as the text.
        """
        count, longer = len(self.tokens), "--text_file"
        if length <= count:
            return ""
        if self.manifest is not None and self.manifest.max_bytes >= 0:
            limit = "data.max_train_bytes" if self.split == "train" else "data.max_valid_bytes"
            longer += f", or for a new run a larger {limit}"
        return (
            f"the text has {count:,} tokens, fewer than the length {length:,}; "
            f"use lengths up to {count:,}, or a longer text ({longer})"
        )


class Subject:
    """A run under evaluation.

    Attributes:
      seconds: time of scoring, without compilation, since it was last set to 0.
    """

    def __init__(self, run: TrainedRun, output: Output):
        self.run, self.output, self.seconds = run, output, 0.0
        self._texts: dict[tuple, Text] = {}
        self._scorers: dict[Callable[[DecoderLM], TokenFunction], Scorer] = {}

    def text(
        self, split: str = "valid", *, file: str = "", document_end: str = "", column: str = ""
    ) -> Text:
        """Returns a split of the run's corpus, or a user's own text, in the run's tokens.

        Args:
          file: files to score in place of the split.
          document_end, column: how `file` is read, as in the config section `data`, default to the run's
            own.

        Raises:
          ValueError: the text is missing or can't be read.
        """
        key = split, file, document_end, column
        if key not in self._texts:
            self._texts[key] = self._prepare(*key)
        return self._texts[key]

    def _prepare(self, split: str, file: str, document_end: str, column: str) -> Text:
        data, tokenizer = self.run.config.data, self.run.tokenizer
        reading = {
            "document_end": document_end or data.document_end,
            "column": column or data.column,
        }
        corpus: Corpus = TextFiles({"file": file, **reading}) if file else make_corpus(data)
        if file:
            token_file = prepare_text(corpus, tokenizer, data.cache_dir, progress=is_primary())
        else:
            token_file = prepare(data, split, tokenizer, progress=is_primary())
        manifest = token_file.manifest
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
        count = len(token_file.tokens)
        length = min(count, self.run.config.train_length)
        self.scorer().check(
            token_file.tokens,
            windows_of(count, length, causal=make_objective(self.run.config).causal),
        )
        name = self.output.name_text(
            corpus.title(manifest.split), manifest.split, manifest.text_hash
        )
        return Text(
            token_file.tokens,
            name,
            manifest.split,
            manifest.sha256,
            manifest.text_hash,
            token_file,
            corpus,
        )

    def scorer(self, of: Callable[[DecoderLM], TokenFunction] = model_nll) -> Scorer:
        """Returns the scorer for a function of the model, see `score`."""
        if of not in self._scorers:
            self._scorers[of] = run_scorer(self.run, of)
        return self._scorers[of]

    def score(
        self,
        tokens: Tokens,
        windows: Windows,
        title: str,
        of: Callable[[DecoderLM], TokenFunction] = model_nll,
    ) -> Score:
        """Returns a number for each token that `windows` score, and shows the progress.

        Args:
          of: makes a function of parameters, inputs and targets for the model, which is compiled once for
            each shape, defaults to the NLL in nats.
        """
        scorer = self.scorer(of)
        title = f"{self.run.title} {title}"
        with Progress(title, windows.num_tokens, "token", show=is_primary()) as bar:
            score = scorer.score_windows(self.run.params, tokens, windows, progress=bar.update)
        self.seconds += score.seconds
        return score

    def row(self, evaluator: Evaluator, text: Text, cell: Cell) -> Row:
        """Returns the row of a cell, without results."""
        run, config, manifest = self.run, self.run.config, text.manifest
        return Row(
            run=run.name,
            position=config.position,
            train_length=config.train_length,
            seed=config.seed,
            step=run.step,
            parameters=run.num_parameters,
            corpus=text.corpus,
            split=text.split,
            evaluator=evaluator.name(),
            cell=cell,
            options=evaluator.options,
            device=Device(jax.devices()[0].device_kind, jax.device_count()),
            jax=jax.__version__,
            **made_here(),
            dtype=config.eval.dtype,
            config_hash=evaluation_hash(config, run.override),
            seedless_hash=evaluation_hash(dataclasses.replace(config, seed=0), run.override),
            tokens_sha256=text.tokens_sha256,
            text_hash=text.text_hash,
            trained_on=run.trained_on,
            override=run.override,
            unknown_tokens=(manifest and manifest.unknown_words) or None,
            documents=None if evaluator.isolates else config.data.isolate_documents or None,
            objective=make_objective(config).recorded,
            over_updates={key: flatten(config)[key] for key in config.over_updates},
            evaluator_code=evaluator.code(),
        )


@contextlib.contextmanager
def memory_limits(where: str) -> Iterator[None]:
    """Raises NoResultError if all processes run out of memory.

    Args:
      where: stands after "out of memory".
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        try:
            gather(None, seconds=ALIKE_SECONDS)
        # this process fails alone: the others wait for it in the computation
        except jax.errors.JaxRuntimeError:
            raise error from None
        raise NoResultError(
            f"out of memory {where}; try fewer batch_tokens or more devices"
        ) from error
