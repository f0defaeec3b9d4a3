"""N-grams as a baseline for trained runs: a work directory's texts -> a table of all orders, and rows
for the best.
"""

import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer

from alibi.config import Config
from alibi.data.textfiles import TextFiles
from alibi.data.tokenfile import Manifest, TokenFile
from alibi.data.tokenizers import ByteTokenizer
from alibi.data.tokens import make_corpus, prepare, prepare_text
from alibi.evaluation.base import Cell
from alibi.evaluation.context_use import ContextUse, same_token_results
from alibi.evaluation.dumps import Dump, file_beside, write_dump
from alibi.evaluation.evaluate import LengthOptions, evaluate_each
from alibi.evaluation.ngram import cache_probabilities, fitted_weights, ngram_scores
from alibi.evaluation.output import Output, made_here
from alibi.evaluation.perplexity import OfText, Perplexity, text_results
from alibi.evaluation.separately import documents_of
from alibi.evaluation.windows import predicted, same_token_windows, windows_of
from alibi.objectives import Objective, make_objective
from alibi.reporting.names import grouped
from alibi.reporting.rows import Row
from alibi.reporting.writers import aligned
from alibi.runs import RunDirectory
from alibi.storage.cache import content_key


@dataclasses.dataclass(frozen=True)
class NGramOptions(LengthOptions):
    """The options of n-grams."""

    split: str = "valid"  # the text to score: train, valid or test, of the run's own corpus
    stride: int | None = None  # the rows stand beside windows with this stride; changes no number
    unit: str = "bytes"  # or tokens, those of the run's tokenizer
    train_bytes: int | None = None  # the beginning of the train text to count, defaults to all
    order: int = 8  # the highest; order n sees n - 1 units before each
    cache: tuple[int, ...] = ()  # widths of caches of counts, in units
    tune: str = ""  # files from which the caches' weights are fitted
    context_windows: int = 512  # windows whose last tokens show the gain of a wider cache
    dump_nll: bool = False  # write each token's NLL, as a run's

    def __post_init__(self) -> None:
        if self.order < 1:
            raise ValueError(f"order={self.order} must be at least 1, which counts single units")
        if bool(self.cache) != bool(self.tune):
            raise ValueError(
                f"cache={self.cache} and tune={self.tune!r}: a cache has weights, fitted on another text than "
                "the scored one; give both, such as --cache=128,512 --tune=other.txt"
            )


@dataclasses.dataclass(frozen=True)
class NGram:
    """An n-gram, and the NLL that it gives to a text."""

    order: int
    smoothing: str
    grams: int  # distinct n-grams of this and the lower orders
    nll_nats: float
    seconds: float  # to count and score all orders and smoothings together
    # with a cache: the weights of the n-gram, the cache's unigrams and its bigrams, and the SHA-256 of
    # the text that they are fitted on
    weights: tuple[float, ...] = ()
    tuned_on: str = ""
    # each counted unit's NLL, for the best order of a smoothing
    nats: Float[np.ndarray, " units"] = dataclasses.field(
        default_factory=lambda: np.zeros(0), compare=False, repr=False
    )


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of a run, as its n-grams read them."""

    train: TokenFile  # in bytes or tokens, as the next
    scored: TokenFile
    run_tokens: TokenFile  # the scored text in the run's tokens, on which the perplexity is
    title: str  # the scored text's, in rows
    config: Config  # the run's
    objective: Objective  # the run's
    # without separate documents a text is one document
    train_documents: Sequence[Integer[np.ndarray, " symbols"]]
    scored_documents: Sequence[Integer[np.ndarray, " symbols"]]

    @property
    def train_key(self) -> str:
        """Tells what is counted from other texts."""
        text = self.train.manifest
        ends = text.description if self.config.data.isolate_documents else ""
        return content_key({"sha256": text.sha256, "of": text.tokenizer_fingerprint, "ends": ends})

    @property
    def in_own_tokens(self) -> bool:
        """Whether the n-grams are of the run's tokens."""
        return self.scored.manifest.sha256 == self.run_text.sha256

    @property
    def run_text(self) -> Manifest:
        """The manifest of `run_tokens`."""
        return self.run_tokens.manifest

    def mask(self, length: int) -> slice | Bool[np.ndarray, " tokens"]:
        """Returns the tokens that the run predicts in windows of `length`, as an index."""
        if not self.objective.selects:
            return slice(None)
        tokens = self.run_text.tokens
        windows = windows_of(tokens, min(length, tokens), causal=self.objective.causal)
        return np.concatenate([*predicted(self.objective, self.run_tokens.tokens, windows)])


def evaluate_ngrams(workdirs: Sequence[str | os.PathLike[str]], options: NGramOptions) -> list[str]:
    """Scores each run's text with n-grams of its train text. Prints a table with all orders, and writes rows
    for the best order with each smoothing. Returns the failures.

    The best order is chosen on the scored text, which favours the baseline. Masked tokens are scored
    with order 1, their frequency, since n-grams predict from the left. Runs need no checkpoint. Runs with
    the same texts are counted once. See also `alibi.evaluation.evaluate.evaluate_each`.
    """
    counted: dict[tuple, tuple[list[NGram], list[NGram], list[NGram]]] = {}
    shown: set[tuple] = set()
    perplexity = Perplexity(options.split, stride=options.stride, dump_nll=options.dump_nll)
    use = ContextUse(options.split, context_windows=options.context_windows)

    def evaluate(workdir: str, output: Output) -> None:
        run = RunDirectory(workdir)
        config = run.config()
        lengths = options.lengths_of(config.train_length)
        perplexity.check(config, lengths)
        texts = read_texts(run, options)
        # an answer is predicted where its window has the mark before it
        length = config.train_length if texts.objective.selects else 0
        scored = texts.scored.manifest.sha256
        key = texts.train_key, scored, repr(config.objective), length
        if key not in counted:
            ngrams, best = _score(texts, options.order)
            counted[key] = ngrams, best, _with_caches(run, texts, best[-1], options)
        ngrams, best, cached = counted[key]
        if (*key, texts.run_text.sha256) not in shown:
            shown.add((*key, texts.run_text.sha256))
            print(_table(run, texts, ngrams, best))
            for one in cached:
                weights = ", ".join(f"{weight:.3f}" for weight in one.weights)
                nats = one.nll_nats / texts.run_text.tokens
                print(f"{one.smoothing}: {nats:.4f} nats a token; weights {weights}")
        for one in [*best, *cached]:
            for cell in perplexity.cells(config, lengths):
                results = _perplexity(texts, one, cell["length"])
                row = _row(texts, one, perplexity, cell, results, options, output)
                if options.dump_nll:
                    _dump(texts, one, row, output)
                output.add(row)
        widths = sorted(width for width in options.cache if width <= texts.run_text.tokens)
        if texts.in_own_tokens and len(widths) > 1:
            windows = same_token_windows(texts.run_text.tokens, widths, use.context_windows)
            by_width = dict(zip(options.cache, cached, strict=True))
            nll = [by_width[one.length].nats[one.places] for one in windows]
            every = dataclasses.replace(cached[0], smoothing=f"{best[-1].smoothing}-cache")
            cell, results = {"lengths": tuple(widths)}, same_token_results(windows, nll)
            output.add(_row(texts, every, use, cell, results, options, output))

    return evaluate_each(workdirs, options, evaluate)


def read_texts(run: RunDirectory, options: NGramOptions) -> Texts:
    """Returns the texts of a run, bytes as a byte run reads them (a newline ends a document without
    one), or tokens.

    Raises:
      ValueError: a text is missing, empty, or another than the run recorded.
    """
    config, recorded = run.config(), run.provenance()["corpus"]
    data, split = config.data, options.split
    corpus, tokenizer = make_corpus(data), run.tokenizer()
    files = {name: prepare(data, name, tokenizer) for name in ("train", split)}
    for name, file in files.items():
        before, now = recorded.get(name), file.manifest
        if before and before["sha256"] != now.sha256:
            raise ValueError(
                f"the {name} text of {run} has changed since the run began: the SHA-256 of its tokens was "
                f"{before['sha256']} ({before['source']}) and is {now.sha256} ({now.source}); restore the text"
            )
    if options.dump_nll and options.unit == "bytes" and tokenizer.name != "bytes":
        raise ValueError(
            f"--dump_nll with --unit=bytes: a dump has the NLL of each token of {run}, made by {tokenizer.name}; "
            "use --unit=tokens"
        )
    objective = make_objective(
        config, vocab_size=tokenizer.vocab_size, boundary_id=tokenizer.boundary_id
    )
    # masks and answers are of the run's tokens
    in_bytes = options.unit == "bytes" and not objective.selects
    unit = ByteTokenizer() if in_bytes else tokenizer
    counted = data
    if (limit := options.train_bytes) is not None and not 0 <= data.max_train_bytes <= limit:
        counted = dataclasses.replace(data, max_train_bytes=limit)
    train, scored = prepare(counted, "train", unit), prepare(data, split, unit)
    documents = (
        documents_of(text, corpus) if data.isolate_documents else [np.asarray(text.tokens)]
        for text in (train, scored)
    )
    return Texts(train, scored, files[split], corpus.title(split), config, objective, *documents)


def _score(texts: Texts, order: int) -> tuple[list[NGram], list[NGram]]:
    """Returns all orders with each smoothing, ascending, and the best order of each smoothing, on the
    tokens that the run predicts at its training length. Masked tokens have order 1 alone.
    """
    started, ngrams = time.perf_counter(), []
    best: dict[str, NGram] = {}
    order, mask = order if texts.objective.causal else 1, texts.mask(texts.config.train_length)
    vocab_size = texts.train.manifest.vocab_size
    for scores in ngram_scores(texts.train_documents, texts.scored_documents, vocab_size, order):
        for smoothing, nats in scores.nats.items():
            one = NGram(scores.order, smoothing, scores.grams, float(nats[mask].sum()), 0.0)
            ngrams.append(one)
            if smoothing not in best or one.nll_nats < best[smoothing].nll_nats:
                best[smoothing] = dataclasses.replace(one, nats=nats)
    seconds = time.perf_counter() - started
    every, chosen = (
        [dataclasses.replace(each, seconds=seconds) for each in several]
        for several in (ngrams, best.values())
    )
    return every, chosen


def _with_caches(
    run: RunDirectory, texts: Texts, ngram: NGram, options: NGramOptions
) -> list[NGram]:
    """Returns the n-gram mixed with the unigrams and bigrams of the last tokens, for each width. The
    weights are fitted on `options.tune`.

    Raises:
      ValueError: the text to tune is the scored one, or only some tokens are predicted.
    """
    if not options.cache:
        return []
    data, started = texts.config.data, time.perf_counter()
    keys = {"file": options.tune, "document_end": data.document_end, "column": data.column}
    in_bytes = texts.train.manifest.tokenizer == "bytes"
    corpus = TextFiles(keys)
    tune = prepare_text(corpus, ByteTokenizer() if in_bytes else run.tokenizer(), data.cache_dir)
    if tune.manifest.sha256 == texts.scored.manifest.sha256:
        raise ValueError(f"tune={options.tune} is the scored text; fit the weights on another one")
    if texts.objective.selects:
        raise ValueError(
            f"objective={texts.config.objective.name} with a cache, which predicts each token; leave --cache out"
        )
    tuned = documents_of(tune, corpus) if data.isolate_documents else [np.asarray(tune.tokens)]
    vocab_size = texts.train.manifest.vocab_size
    *_, scores = ngram_scores(texts.train_documents, tuned, vocab_size, ngram.order)
    both = (tuned, scores.nats[ngram.smoothing]), (texts.scored_documents, ngram.nats)
    results = []
    for width in options.cache:
        tuned_models, models = (
            np.stack([plain := np.exp(-nats), *cache_probabilities(documents, width, plain)])
            for documents, nats in both
        )
        weights = fitted_weights(tuned_models)
        nats = -np.log(weights @ models)
        results.append(
            dataclasses.replace(
                ngram,
                smoothing=f"{ngram.smoothing}-cache={width}",
                nll_nats=float(nats.sum()),
                seconds=time.perf_counter() - started,
                weights=tuple(weights.tolist()),
                tuned_on=tune.manifest.sha256,
                nats=nats,
            )
        )
    return results


def _table(run: RunDirectory, texts: Texts, ngrams: Sequence[NGram], best: Sequence[NGram]) -> str:
    """Returns perplexity and bits per byte for all orders and smoothings, the best with an asterisk."""
    scored = texts.run_text
    unit = "bytes" if texts.train.manifest.tokenizer == "bytes" else "tokens"
    tokens = scored.tokens  # the n-gram may be of bytes
    if texts.objective.selects:
        tokens = best[0].nats[texts.mask(texts.config.train_length)].size
    size = scored.bytes * tokens / scored.tokens
    heads = [head for one in best for head in (f"{one.smoothing}, perplexity", "bits per byte")]
    lines = [["order", f"{unit} of context", "distinct n-grams", *heads]]
    for order, alike in grouped(ngrams, lambda one: one.order).items():
        cells = [str(order), str(order - 1), f"{alike[0].grams:,}"]
        for one in alike:
            star = "*" if one in best else " "
            perplexity = f"{math.exp(one.nll_nats / tokens):.3f}{star}"
            cells += [perplexity, f"{one.nll_nats / math.log(2) / size:.4f}{star}"]
        lines.append(cells)
    return (
        f"{run.name}: n-grams of {texts.train.manifest.tokens:,} {unit} of the train text; {texts.title}, "
        f"{scored.split}: {tokens:,} tokens ({scored.tokenizer}) of {size:,.0f} bytes, "
        f"{ngrams[0].seconds:.1f} s\n" + aligned(lines, left=())
    )


def _perplexity(texts: Texts, ngram: NGram, length: int) -> dict[str, Any]:
    """Returns the results of an n-gram's row, as a run's in windows of `length`."""
    scored, every = texts.run_text, not texts.objective.selects
    results = text_results(
        ngram.nats[texts.mask(length)],
        ngram.seconds,
        tokens=None if texts.in_own_tokens else scored.tokens,
        words=scored.words if every else None,
        bytes=scored.bytes if every else None,
    )
    return results | ({"weights": ngram.weights} if ngram.weights else {})


def _dump(texts: Texts, ngram: NGram, row: Row, output: Output) -> None:
    """Writes the NLL of each token, as a run's at the row's length."""
    dump = Dump(row, ngram.nats.astype(np.float32), np.asarray(texts.scored.tokens, np.int32))
    path = file_beside(row, output.folder / "nll", ".npz")
    output.guard(lambda: write_dump(path, dump))


def _row(
    texts: Texts,
    ngram: NGram,
    evaluator: OfText,
    cell: Cell,
    results: Mapping[str, Any],
    options: NGramOptions,
    output: Output,
) -> Row:
    """Returns the row beside the models' rows in a cell. An n-gram has its full context everywhere.

    If n-grams of another text, or per token of another tokenizer, have its name, part of a hash
    follows.
    """
    scored = texts.run_text
    content = {"train": texts.train_key, "tokenizer": scored.tokenizer_fingerprint}
    key = content_key(content | ({"tune": ngram.tuned_on} if ngram.tuned_on else {}))[:12]
    # of tokens too if masks or answers of the run's tokens are scored, whatever the unit
    in_bytes = options.unit == texts.train.manifest.tokenizer == "bytes"
    kind = "ngram" if in_bytes else "token-ngram"
    end = ngram.smoothing
    if kind == "ngram" and scored.tokenizer != "bytes":
        end += f"-per-{scored.tokenizer}"
    if options.train_bytes is not None:
        end += f"-train_bytes={options.train_bytes}"
    if any(row.position == f"{kind}-{end}" and row.config_hash != key for row in output.rows):
        end += f"#{key[:6]}"
    return Row(
        run=f"{kind}-{ngram.order}-{end}",
        position=f"{kind}-{end}",
        train_length=0,
        seed=0,
        step=0,
        parameters=ngram.grams,
        corpus=output.name_text(texts.title, scored.split, scored.text_hash),
        split=scored.split,
        evaluator=evaluator.name(),
        cell=cell,
        options=evaluator.options,
        results=results,
        seconds=ngram.seconds,
        **made_here(),
        dtype="float64",
        config_hash=key,
        tokens_sha256=scored.sha256,
        text_hash=scored.text_hash,
        unknown_tokens=(scored.unknown_words or None) if kind == "token-ngram" else None,
        documents=texts.config.data.isolate_documents or None,
        objective=texts.objective.recorded,
    )
