"""A trained run as a model of EleutherAI's harness (the package `lm_eval`).

The harness makes requests of text; a run answers them in windows of a length. Continuations and
rolling windows are scored as rows of a few lengths, and a program is compiled for each length.
"""

import collections
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from alibi.evaluation.output import print_once
from alibi.evaluation.scorer import unrounded
from alibi.generation.sampling import Sampling
from alibi.generation.texts import Prompt, Writer
from alibi.model.decoder import DecoderLM
from alibi.parallel.sharding import batch_parts
from alibi.progress import Progress
from alibi.runs.trained import TrainedRun

LEAST_LENGTH = 16  # of a row of requests; longer rows double up to the window
MAX_TOKENS = 256  # of an answer, if its task does not say; the harness's own default

Pair = tuple[list[int], list[int]]  # the ids of a context and of its continuation


class PairScorer:
    """Scores continuations of contexts by a run's model.

    A row of requests is padded at its end to a power of two or to the window, and a batch holds
    `run.batch_tokens` inputs on each device. For methods that depend on the length of a sequence
    every row is the beginning of a window, so a score does not depend on the padding.

    Args:
      run: of a causal objective.
      length: inputs of a window; a longer context loses its beginning.
    """

    def __init__(self, run: TrainedRun, length: int):
        self.run, self.length, self.params = run, length, run.params
        powers = itertools.takewhile(
            lambda size: size < length, (LEAST_LENGTH << n for n in itertools.count())
        )
        self.lengths = [*powers, length]
        self.programs = jax.jit(_nll_and_greedy(run.model, length), static_argnames="greedy")

    def score(
        self, pairs: Sequence[Pair], *, greedy: bool = True, title: str = "requests"
    ) -> list[tuple[float, bool]]:
        """Returns for each pair the log-probability of the continuation in nats, and whether each
        of its tokens is the likeliest after the tokens before it.

        An empty context is the boundary that stands before a text. Without `greedy` the second
        result is meaningless.

        Raises:
          ValueError: a continuation without a token, or longer than the window.
        """
        for _, continuation in pairs:
            if not 0 < len(continuation) <= self.length:
                raise ValueError(
                    f"a continuation has {len(continuation):,} tokens; it needs 1 to --length={self.length:,}"
                )
        tokens = [((context or [self._boundary]) + to) for context, to in pairs]
        _say_cut(sum(len(ids) > self.length + 1 for ids in tokens), len(pairs), self.length)
        requests = [
            (ids[-self.length - 1 :], len(to)) for ids, (_, to) in zip(tokens, pairs, strict=True)
        ]
        sizes = [next(n for n in self.lengths if n >= len(ids) - 1) for ids, _ in requests]
        order = sorted(range(len(pairs)), key=lambda number: -sizes[number])
        found = [(0.0, True)] * len(pairs)
        with Progress(f"{self.run.name}: {title}", len(pairs), "request") as bar:
            for size, alike in itertools.groupby(order, key=lambda number: sizes[number]):
                numbers = list(alike)
                rows = self._rows(len(numbers), size)
                for start in range(0, len(numbers), rows):
                    part = numbers[start : start + rows]
                    scores = self._score([requests[n] for n in part], size, rows, greedy)
                    for number, score in zip(part, scores, strict=False):
                        found[number] = score
                    bar.update(len(part))
        return found

    @property
    def _boundary(self) -> int:
        return self.run.tokenizer.boundary_id

    def _rows(self, requests: int, size: int) -> int:
        """Returns the rows of a batch: a power of two on each device, or all that it may hold."""
        devices = batch_parts(self.run.model.sharding)
        needed = 1 << (-(-requests // devices) - 1).bit_length()
        return devices * min(max(1, self.run.batch_tokens // size), needed)

    def _score(
        self, requests: Sequence[tuple[list[int], int]], size: int, rows: int, greedy: bool
    ) -> Iterator[tuple[float, bool]]:
        """Yields the score of each row of a batch, of rows of `size` inputs; the last rows may be
        empty.

        Args:
          requests: tokens, and the number of the last ones that are scored.
        """
        inputs = np.full((rows, size), self._boundary, np.int32)
        targets = np.full((rows, size), -1, np.int32)
        for row, (ids, scored) in enumerate(requests):
            inputs[row, : len(ids) - 1] = ids[:-1]
            targets[row, len(ids) - 1 - scored : len(ids) - 1] = ids[-scored:]
        batch = jax.device_put((inputs, targets), self.run.model.sharding)
        for nll, is_likeliest in zip(
            *map(np.asarray, self.programs(self.params, *batch, greedy=greedy)), strict=True
        ):
            yield -float(nll.sum(dtype=np.float64)), bool(is_likeliest.all())


def _nll_and_greedy(model: DecoderLM, total: int) -> Any:
    """Returns the function of parameters, inputs and targets to the NLL of each target in nats, and
    whether it is the likeliest token; 0 and True for negative targets.

    Args:
      total: the length of the sequences that begin with the inputs.
    """

    def computed(
        module: DecoderLM,
        inputs: Int[Array, "rows length"],
        targets: Int[Array, "rows length"],
        greedy: bool,
    ) -> tuple[Float[Array, "rows length"], Bool[Array, "rows length"]]:
        features = module.features(inputs, total=total)
        if not greedy:
            return module.vocabulary.token_losses(features, targets)[1], targets < 0
        is_likeliest, nll = module.vocabulary.token_losses(
            features, targets, lambda logits, targets: logits.argmax(axis=-1) == targets
        )
        return nll, (is_likeliest > 0) | (targets < 0)

    def score(params: PyTree, inputs: Array, targets: Array, *, greedy: bool) -> Any:
        with unrounded(model):
            return model.apply({"params": params}, inputs, targets, greedy, method=computed)

    return score


def write_answers(
    run: TrainedRun,
    length: int,
    contexts: Sequence[str],
    seeds: Sequence[int],
    given: Mapping[str, Any],
) -> list[str]:
    """Returns the run's answer to each context, up to the first stop string.

    Prompt and answer share a window, so a longer context loses its beginning; methods that depend
    on the length of a sequence take the window's.

    Args:
      seeds: of the answers, if they are drawn.
      given: max_gen_toks, until, do_sample, temperature, top_k, top_p and min_p, as the harness
        normalizes them; a line names others, which have no effect.

    Raises:
      ValueError: an answer as long as the window.
    """
    options = dict(given)
    count, stop = options.pop("max_gen_toks"), [text for text in options.pop("until") if text]
    if count >= length:
        raise ValueError(
            f"a task asks for answers of up to {count:,} tokens, and --length={length:,} leaves no room for a "
            f"question; use a --length above {count:,}"
        )
    draws, limits = options.pop("do_sample"), ("temperature", "top_k", "top_p", "min_p")
    drawn = {key: options.pop(key) for key in limits if key in options}
    sample = Sampling(**drawn) if draws else Sampling(temperature=0.0)
    if options:
        print_once(f"{run.name}: options of generation without effect here: {options}")
    ids = [run.tokenizer.encode_beginning(context) for context in contexts]
    _say_cut(sum(len(own) > length - count for own in ids), len(ids), length - count)
    prompts = [
        Prompt(own[-(length - count) :], seed, {}) for own, seed in zip(ids, seeds, strict=True)
    ]
    answers = []
    with Progress(f"{run.name}: answers", len(prompts), "answer") as bar:
        for answer in Writer(run, sample, count, stop).write(prompts, total=length):
            answers.append(answer.text)
            bar.update(1)
    return answers


def _say_cut(cut: int, requests: int, most: int) -> None:
    if cut:
        print_once(
            f"{cut:,} of {requests:,} requests are longer than {most:,} tokens, and lost their beginning; "
            "--length sets the window"
        )


def harness_model(run: TrainedRun, length: int) -> Any:
    """Returns the run as an `lm_eval.api.model.LM` with windows of `length` inputs.

    The token that stands before a text without context is the boundary that stood before each text
    in training: `<|endoftext|>` or its like of BPE, `</s>` of words, a line end of bytes. Rolling
    windows are the harness's: they don't overlap, but the last one reads a full window.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    scorer, tokenizer = PairScorer(run, length), run.tokenizer

    class RunModel(TemplateLM):
        eot_token_id = tokenizer.boundary_id
        max_length = length
        max_gen_toks = MAX_TOKENS

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return tokenizer.encode_open(string)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            for context, continuation in (request.args for request in requests):
                if not context and not tokenizer.encode_open(continuation):
                    raise ValueError(f"the continuation {continuation!r} has no token")
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            for (before, continuation), _context, to in requests:
                if not to:
                    raise ValueError(
                        f"the continuation {continuation!r} has no token of its own after {before[-60:]!r}, whose last "
                        "token takes it in; put a space between them, or use a run of bytes"
                    )
            return scorer.score([(context, to) for _, context, to in requests], title="choices")

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            windows: list[tuple[int, Pair]] = [
                (number, make_disjoint_window(window))
                for number, request in enumerate(requests)
                for window in get_rolling_token_windows(
                    tokenizer.encode_open(request.args[0]), self.prefix_token_id, length, 1
                )
            ]
            totals = [0.0] * len(requests)
            scores = scorer.score([pair for _, pair in windows], greedy=False, title="windows")
            for (number, _), (total, _) in zip(windows, scores, strict=True):
                totals[number] += total
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            alike = collections.defaultdict(list)
            for number, request in enumerate(requests):
                alike[json.dumps(request.args[1], sort_keys=True)].append(number)
            texts: dict[int, str] = {}
            for options, numbers in alike.items():
                given = normalize_gen_kwargs(json.loads(options), MAX_TOKENS)
                contexts = [requests[number].args[0] for number in numbers]
                answers = write_answers(run, length, contexts, numbers, given)
                texts |= zip(numbers, answers, strict=True)
            return [texts[number] for number in range(len(requests))]

    return RunModel()
