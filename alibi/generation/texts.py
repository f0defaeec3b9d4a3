"""Texts from a trained run: prompts as text, in batches, with the reasons for which they end."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from alibi.data.tokenizers.base import UNFINISHED, Tokenizer
from alibi.generation.decoding import checked_seed, decode_answer, stream, unrolled
from alibi.generation.sampling import Sampler
from alibi.objectives import make_objective
from alibi.runs.trained import TrainedRun
from alibi.storage.files import resolve

CHUNKS = 16, 512  # the least and the most tokens of a prompt that are read at a time
BATCH = 32  # prompts at a time, if their caches fit


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text's beginning.

    Attributes:
      ids: its tokens.
      seed: makes the key that draws the answer.
      row: the prompt's row in a file. The answer's row repeats it.
    """

    ids: list[int]
    seed: int
    row: dict[str, Any]


@dataclasses.dataclass
class Answer:
    """A continuation.

    Attributes:
      tokens: its ids.
      text: the text that they add to the prompt's, up to a stop string.
      nll: each token's NLL under the model in nats, before any limits on sampling.
      end: "length" after the most tokens, "stop" at a stop string, "document" at a token that ends
        a document or an answer; "" before its end.
    """

    prompt: Prompt
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    nll: list[float] = dataclasses.field(default_factory=list)
    end: str = ""

    def to_json(self) -> dict[str, Any]:
        rounded = [round(x, 6) for x in self.nll]
        keys = {"seed": self.prompt.seed, "tokens": self.tokens, "text": self.text, "nll": rounded}
        return self.prompt.row | keys | {"end": self.end}


class Writer:
    """Continues prompts with a run's model.

    Args:
      run: has the model, the parameters and the tokenizer.
      sample: draws the next token.
      max_tokens: the most tokens in an answer.
      stop: an answer ends before the first of these texts, as if one token were read at a time. Of
        several that end at one place the longest counts.

    Raises:
      ValueError: fewer tokens than one, an empty stop string, or a run without a causal model.
    """

    def __init__(self, run: TrainedRun, sample: Sampler, max_tokens: int, stop: Sequence[str] = ()):
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        if not all(stop):
            raise ValueError("a stop string is empty; leave it out")
        if not make_objective(run.config).causal:
            raise ValueError(
                f"{run} was trained for objective={run.config.objective.name}, which fills in tokens; texts need "
                "objective=next_token"
            )
        self.run, self.sample, self.max_tokens, self.stop = run, sample, max_tokens, tuple(stop)

    def check(self, prompts: Sequence[Prompt]) -> int:
        """Returns the most tokens that a prompt and its answer have together.

        Raises:
          ValueError: the position method is not defined for so many.
        """
        longest = max(len(prompt.ids) for prompt in prompts)
        total = longest + self.max_tokens
        if reason := self.run.undefined(total):
            raise ValueError(
                f"a prompt of {longest:,} tokens and max_tokens={self.max_tokens:,} are {total:,}: {reason}"
            )
        return total

    def write(
        self,
        prompts: Sequence[Prompt],
        *,
        total: int = 0,
        each: int = 16,
        seen: Callable[[Answer], None] = lambda answer: None,
    ) -> Iterator[Answer]:
        """Yields an answer to each prompt, in order. All at a time compile the same two programs.

        Args:
          total: the most tokens of a prompt and its answer, if other prompts are longer. Methods that
            depend on the length use it.
          each: tokens between two looks at the answers.
          seen: is called with each answer of a batch after each look.
        """
        total = max(self.check(prompts), total)
        longest = max(len(prompt.ids) for prompt in prompts)
        chunk = min(max(CHUNKS[0], 1 << (longest - 1).bit_length()), CHUNKS[1])
        batch = max(1, min(len(prompts), BATCH, self.run.batch_tokens // total))
        model, params = unrolled(self.run.model, self.run.params)
        for start in range(0, len(prompts), batch):
            here = prompts[start : start + batch]
            filled = [*here, *[here[0]] * (batch - len(here))]  # the last batch has the same shape
            answers = [Answer(prompt) for prompt in here]
            steps = stream(
                model,
                params,
                [prompt.ids for prompt in filled],
                self.max_tokens,
                sample=self.sample,
                seeds=[prompt.seed for prompt in filled],
                chunk=chunk,
                total=total,
                each=each,
            )
            for tokens, nll in steps:
                for answer, *new in zip(answers, tokens.tolist(), nll.tolist(), strict=False):
                    self.add(answer, *new)
                    seen(answer)
                if all(answer.end for answer in answers):
                    break
            yield from answers

    def add(self, answer: Answer, tokens: list[int], nll: list[float]) -> None:
        """Adds tokens up to the answer's end."""
        if answer.end:
            return
        tokenizer, room = self.run.tokenizer, self.max_tokens - len(answer.tokens)
        until_end = [n for n, token in enumerate(tokens[:room], 1) if token in tokenizer.ends]
        count = min([*until_end, room])
        answer.tokens += tokens[:count]
        answer.nll += nll[:count]

        def text(count: int) -> str:
            return decode_answer(tokenizer, answer.prompt.ids, answer.tokens[:count])

        def stops_in(text: str) -> list[tuple[int, int]]:
            """Returns the end and the beginning of each stop string in the text."""
            firsts = [(text.find(stop), len(stop)) for stop in self.stop]
            return [(first + length, first) for first, length in firsts if first >= 0]

        answer.text = text(len(answer.tokens) - bool(until_end))
        answer.end = "document" if until_end else "length" * (len(answer.tokens) == self.max_tokens)
        # an unfinished character may become another one
        if stops := stops_in(answer.text if answer.end else answer.text.rstrip(UNFINISHED)):
            answer.end = "stop"
            # with the token that completed it
            while stops_in(text(len(answer.tokens) - 1).rstrip(UNFINISHED)):
                del answer.tokens[-1], answer.nll[-1]
            answer.text = answer.text[: min(stops)[1]]

    def settled(self, answer: Answer) -> str:
        """Returns the text that further tokens don't change: without an unfinished
        character, and without what may begin a stop string.
        """
        if answer.end:
            return answer.text
        text = answer.text.rstrip(UNFINISHED)
        first = max(0, len(text) - max(map(len, self.stop), default=0))
        ends = (
            n for n in range(first, len(text)) if any(x.startswith(text[n:]) for x in self.stop)
        )
        return text[: next(ends, None)]


def make_prompt(
    tokenizer: Tokenizer, row: dict[str, Any], seed: int, tell: Callable[[str], None]
) -> Prompt:
    """Returns the prompt in a row with "prompt", a text, or "tokens", its ids, and perhaps "seed".

    Args:
      tell: prints a line about unknown words and about special tokens that the text spells.

    Raises:
      ValueError: a row of another kind, or with keys of its answer.
    """
    seed, text = checked_seed(row.get("seed", seed)), row.get("prompt")
    if ("prompt" in row) == ("tokens" in row):
        raise ValueError('it needs either "prompt", a text, or "tokens", a list of ids')
    of_answer = {"text", "nll", "end", "prompt_tokens" if "tokens" in row else "tokens"}
    if taken := sorted(of_answer & row.keys()):
        raise ValueError(f'its answer has a key "{taken[0]}" of its own; give yours another name')
    if "tokens" in row:
        ids, size = row["tokens"], tokenizer.vocab_size
        fits = isinstance(ids, list) and all(type(x) is int and 0 <= x < size for x in ids)
        if not fits or not ids:
            raise ValueError(f'"tokens" must be a list of ids from 0 to {size - 1}')
        row = {"prompt_tokens" if key == "tokens" else key: x for key, x in row.items()}
        return Prompt(ids, seed, row)
    if not isinstance(text, str):
        raise ValueError(f'"prompt" is {text!r} and must be a text')
    try:
        ids = tokenizer.encode_beginning(text)
    except UnicodeEncodeError as error:
        wrong = f"character {error.start + 1} is {error.object[error.start]!a}"
        raise ValueError(f'"prompt" is no text, since {wrong}, a part of one') from None
    for name in filter(text.__contains__, tokenizer.special_ids):
        token = tokenizer.special_ids[name]
        tell(f'the prompt spells {name}, which is read as text; "tokens" takes its id, {token}')
    if tokenizer.unknown_id is not None and (count := ids.count(tokenizer.unknown_id)):
        name = tokenizer.decode([tokenizer.unknown_id])
        tell(
            f"{count} of {len(ids)} tokens of the prompt are unknown to the run, and became {name}"
        )
    return Prompt(ids, seed, row)


def read_prompts(
    path: str | os.PathLike[str], tokenizer: Tokenizer, seed: int, tell: Callable[[str], None]
) -> list[Prompt]:
    """Returns the prompts in a file of JSON lines (see `make_prompt`). Line n has the seed `seed` + n
    unless it names another.

    Raises:
      ValueError: no such file, no line, or a wrong line, with its number.
    """
    file, prompts = resolve(os.fspath(path)), []
    try:
        lines = file.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts={path} can't be read: {error}") from None
    for index, line in enumerate(lines):
        if line.strip():
            try:
                prompts.append(make_prompt(tokenizer, json.loads(line), seed + index, tell))
            except (ValueError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f'{path}, line {index + 1} is no row such as {{"prompt": "It was"}}: {error}'
                ) from None
    if not prompts:
        raise ValueError(f'{path} has no line; write one such as {{"prompt": "It was"}}')
    return prompts
