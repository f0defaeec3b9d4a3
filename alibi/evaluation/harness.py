"""Trained runs as the model `alibi` of EleutherAI's harness (the package `lm_eval`).

The harness sends requests of text, which a run answers in windows of one length. Continuations and
rolling windows are scored as rows of a few lengths, and each length compiles one program.
"""

import collections
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from alibi.config.override import Override
from alibi.evaluation.output import print_once
from alibi.evaluation.scorer import Scorer
from alibi.evaluation.windows import Windows
from alibi.extras import needs
from alibi.generation.sampling import Sampling
from alibi.generation.texts import Prompt, Writer
from alibi.model.decoder import DecoderLM, unrounded
from alibi.objectives import NextToken, make_objective
from alibi.parallel.sharding import batch_parts
from alibi.progress import Progress
from alibi.runs.trained import TrainedRun

LEAST_LENGTH = 16  # inputs of the shortest row; longer rows double up to the window
MAX_TOKENS = 256  # of an answer, if its task does not say; the harness's own default

Pair = tuple[list[int], list[int]]  # the ids of a context and of its continuation


class PairScorer:
    """Scores continuations of contexts with a run's model.

    A row is padded at its end to a power of two or to the window, and a batch holds
    `run.batch_tokens` inputs on each device. Methods that depend on the length of a sequence take
    the window's for every row, so a score does not depend on the padding.

    Args:
      run: a run with a causal objective.
      length: inputs of a window. A longer context loses its beginning.
    """

    def __init__(self, run: TrainedRun, length: int):
        self.run, self.length, self.params = run, length, run.params
        powers = (LEAST_LENGTH << n for n in itertools.count())
        self.lengths = [*itertools.takewhile(lambda size: size < length, powers), length]
        tokenizer = run.tokenizer
        self.scorers = {
            greedy: Scorer(
                _nll_and_greedy(run.model, length, greedy),
                objective=NextToken(tokenizer.vocab_size, tokenizer.boundary_id),
                batch_tokens=run.batch_tokens,
                sharding=run.model.sharding,
            )
            for greedy in (True, False)
        }

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
                    f"a continuation has {len(continuation):,} tokens; it needs 1 to length={self.length:,}"
                )
        boundary = self.run.tokenizer.boundary_id
        tokens = [((context or [boundary]) + to) for context, to in pairs]
        _say_cut(sum(len(ids) > self.length + 1 for ids in tokens), len(pairs), self.length)
        requests = [
            (ids[-self.length - 1 :], len(to)) for ids, (_, to) in zip(tokens, pairs, strict=True)
        ]
        by_size = collections.defaultdict(list)
        for index, (ids, _) in enumerate(requests):
            by_size[next(n for n in self.lengths if n >= len(ids) - 1)].append(index)
        scores = [(0.0, True)] * len(pairs)
        with Progress(f"{self.run.name}: {title}", len(pairs), "request") as bar:
            for size, indices in sorted(by_size.items(), reverse=True):
                # a power of two, or whole batches, so that few numbers of requests compile programs
                whole = max(1, self.run.batch_tokens // size) * batch_parts(self.run.model.sharding)
                power = 1 << (len(indices) - 1).bit_length()
                padded = min(power, -(-len(indices) // whole) * whole)
                rows = np.full((padded, size + 1), -1, np.int32)
                for row, index in zip(rows, indices, strict=False):
                    row[: len(requests[index][0])] = requests[index][0]
                windows = Windows(1, rows.size, size, size, spacing=size + 1)
                left = iter(indices)
                batches = self.scorers[greedy].batches(self.params, rows.ravel(), windows)
                for _, of_batch in batches:
                    for nll, is_likeliest, index in zip(
                        *map(np.asarray, of_batch), left, strict=False
                    ):
                        ids, count = requests[index]
                        scored = slice(len(ids) - 1 - count, len(ids) - 1)
                        total = -nll[scored].sum(dtype=np.float64)
                        scores[index] = float(total), bool(is_likeliest[scored].all())
                        bar.update(1)
        return scores


def _nll_and_greedy(model: DecoderLM, total: int, greedy: bool) -> Callable[..., Any]:
    """Returns a function of parameters, inputs and targets that gives the NLL of each target in
    nats, and with `greedy` whether it is the likeliest token.

    Args:
      total: the length of the sequences that begin with the inputs.
    """

    def computed(
        module: DecoderLM, inputs: Int[Array, "rows length"], targets: Int[Array, "rows length"]
    ) -> tuple[Float[Array, "rows length"], Bool[Array, "rows length"]]:
        features = module.features(inputs, total=total)
        if not greedy:
            return module.vocabulary.token_losses(features, targets)[1], targets >= 0
        is_likeliest, nll = module.vocabulary.token_losses(
            features,
            targets,
            lambda logits, targets: module.writable(logits).argmax(axis=-1) == targets,
        )
        return nll, is_likeliest > 0

    def score(params: PyTree, inputs: Array, targets: Array, *_: None) -> Any:
        with unrounded(model):
            return model.apply({"params": params}, inputs, targets, method=computed)

    return score


def write_answers(
    run: TrainedRun,
    length: int,
    contexts: Sequence[str],
    seeds: Sequence[int],
    request: Mapping[str, Any],
) -> list[str]:
    """Returns the run's answer to each context, up to the first stop string.

    Prompt and answer share a window, so a longer context loses its beginning; methods that depend
    on the length of a sequence take the window's.

    Args:
      seeds: a seed for each answer that is drawn.
      request: max_gen_toks, until, do_sample, temperature, top_k, top_p and min_p, as the harness
        normalizes them; a line names other keys, which have no effect.

    Raises:
      ValueError: an answer as long as the window.
    """
    options = dict(request)
    count, stop = options.pop("max_gen_toks"), [text for text in options.pop("until") if text]
    if count >= length:
        raise ValueError(
            f"a task asks for answers of up to {count:,} tokens, and length={length:,} leaves no room for a "
            f"question; use a length above {count:,}"
        )
    draws, limits = options.pop("do_sample"), ("temperature", "top_k", "top_p", "min_p")
    drawn = {key: options.pop(key) for key in limits if key in options}
    sample = Sampling(**drawn) if draws else Sampling(temperature=0.0)
    if options:
        print_once(f"{run.name}: options of generation without effect here: {options}")
    ids = [run.tokenizer.encode_beginning(context) for context in contexts]
    room = length - count
    _say_cut(sum(len(prompt) > room for prompt in ids), len(ids), room)
    prompts = [Prompt(prompt[-room:], seed, {}) for prompt, seed in zip(ids, seeds, strict=True)]
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
            "length=N sets the window"
        )


@functools.cache
def harness_model() -> type:
    """Registers the model `alibi` with the harness; returns its class.

    The arguments of the model are `workdir`, `length` (inputs of a window; defaults to the training
    length), `checkpoint` and `batch_tokens`, as for `eval_extrapolation.py`, and the fields of
    `Override`, such as `position`.

    The boundary that stood before each text in training stands before a text without context:
    `<|endoftext|>` or its like of BPE, `</s>` of words, a line end of bytes. Rolling windows are the
    harness's: they don't overlap, but the last one reads a full window.

    Raises:
      MissingPackageError: the package lm_eval is not installed.
    """
    needs("a task of the harness", "lm_eval")
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    @register_model("alibi")
    class RunModel(TemplateLM):
        max_gen_toks = MAX_TOKENS

        def __init__(
            self,
            workdir: str | os.PathLike[str],
            length: int = 0,
            *,
            checkpoint: str | int = "latest",
            batch_tokens: int | None = None,
            options: Mapping[str, Any] | None = None,
            batch_size: Any = None,  # these three are flags of the harness, for models of PyTorch
            max_batch_size: Any = None,
            device: Any = None,
            **override: Any,
        ):
            super().__init__()
            if unknown := override.keys() - Override.__annotations__.keys():
                raise ValueError(
                    f"--model_args has no {', '.join(sorted(unknown))}; use workdir, length, checkpoint, batch_tokens, "
                    f"{', '.join(Override.__annotations__)}"
                )
            if options or override:
                override = {
                    "override": Override(options=tuple((options or {}).items()), **override)
                }
            self.run = run = TrainedRun(
                workdir, str(checkpoint), batch_tokens=batch_tokens, **override
            )
            self.max_length = length or run.config.train_length
            if not make_objective(run.config).causal:
                raise ValueError(
                    f"{run} was trained for objective={run.config.objective.name}; tasks need objective=next_token"
                )
            if reason := run.undefined(self.max_length):
                raise ValueError(
                    f"{run.title} has no result at length={self.max_length:,}: {reason}"
                )
            self.scorer = PairScorer(run, self.max_length)

        @property
        def eot_token_id(self) -> int:
            return self.run.tokenizer.boundary_id

        def get_model_info(self) -> dict[str, Any]:
            """Returns what the results file says of the model."""
            return {"run": self.run.title, "step": self.run.step, "length": self.max_length}

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return self.run.tokenizer.encode_open(string)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            for context, continuation in (request.args for request in requests):
                if not context and not self.tok_encode(continuation):
                    raise ValueError(f"the continuation {continuation!r} has no token")
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            for (before, continuation), _context, to in requests:
                if not to:
                    raise ValueError(
                        f"the continuation {continuation!r} has no token of its own after {before[-60:]!r}, whose last "
                        "token takes it in; put a space between them, or use a run of bytes"
                    )
            return self.scorer.score([(context, to) for _, context, to in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            windows: list[tuple[int, Pair]] = [
                (index, make_disjoint_window(window))
                for index, request in enumerate(requests)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            totals = [0.0] * len(requests)
            scores = self.scorer.score([pair for _, pair in windows], greedy=False, title="windows")
            for (index, _), (total, _) in zip(windows, scores, strict=True):
                totals[index] += total
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            alike = collections.defaultdict(list)
            for index, request in enumerate(requests):
                alike[json.dumps(request.args[1], sort_keys=True)].append(index)
            texts: dict[int, str] = {}
            for options, indices in alike.items():
                settings = normalize_gen_kwargs(json.loads(options), MAX_TOKENS)
                contexts = [requests[index].args[0] for index in indices]
                answers = write_answers(self.run, self.max_length, contexts, indices, settings)
                texts |= zip(indices, answers, strict=True)
            return [texts[index] for index in range(len(requests))]

    return RunModel
