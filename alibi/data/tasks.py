"""Tasks with answers that need a known part of the context, such as copying, recall and needles.

An example is a sequence of symbols, some of which are answers. The gap of an answer is its distance in
tokens from the symbol that decides it. Three symbols mark answers, so that training and evaluation find
them in the tokens alone (`alibi.objectives.answers`).
"""

import dataclasses
import functools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from alibi.config import DataConfig
from alibi.config.fields import did_you_mean
from alibi.data.corpus import Corpus, Piece
from alibi.objectives import answers

END, EQUALS, ASK, QUERY = range(4)  # ids of the symbols that every task has
OWN = 4  # the first id of a task's own symbols
SYMBOLS = np.frombuffer(
    bytes((answers.END, answers.EQUALS, answers.ASK, answers.QUERY))
    + (string.ascii_letters + string.digits).encode(),
    np.uint8,
)  # the byte of each id

Made = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]
Make = Callable[[np.random.Generator, int], Made]


@dataclasses.dataclass(frozen=True)
class Task:
    """A rule that makes examples of any length.

    Attributes:
      make: takes a generator and a length, and returns at most `length - 1` symbols and their gaps,
        0 for symbols that are no answers.
      least: tokens of the shortest example.
      chance: probability that an answer drawn from all possible answers is right.
      about: the task in words, and its paper.
    """

    make: Make
    least: int
    chance: float
    about: str

    def example(
        self, random: np.random.Generator, length: int
    ) -> tuple[UInt8[np.ndarray, " length"], Int[np.ndarray, " length"]]:
        """Returns `length` bytes, filled up with line ends, and their gaps.

        Raises:
          ValueError: no example is as short as this.
        """
        if length < self.least:
            raise ValueError(
                f"an example of this task has at least {self.least} tokens; {length} are too few"
            )
        symbols, gaps = np.full(length, END), np.zeros(length, int)
        made, distances = self.make(random, length)
        symbols[: len(made)], gaps[: len(made)] = made, distances
        return SYMBOLS[symbols], gaps


def find_task(name: str) -> Task:
    """Returns the task of this name. Raises ValueError with the nearest name if there is none."""
    if name not in TASKS:
        raise ValueError(
            f"data.task={name!r} is no task; {did_you_mean(name, TASKS)}there are: {', '.join(TASKS)}"
        )
    return TASKS[name]


class Tasks(Corpus):
    """Endless examples of a task, cut at `data.max_train_bytes` and `data.max_valid_bytes`.

    Each block of `data.task_length` tokens holds whole examples. Their lengths are drawn up to the
    block's. Splits with different names have different examples.
    """

    name = "tasks"
    tokens_have_ends = True
    version = 1  # grows with each change to the examples

    def __init__(self, data: DataConfig):
        super().__init__(data)
        self.task, self.length = find_task(data.task), data.task_length
        sizes = data.max_train_bytes, data.max_valid_bytes
        if self.length < self.task.least or min(sizes) < self.length:
            raise ValueError(
                f"data.task_length={self.length}, data.max_train_bytes={sizes[0]} and data.max_valid_bytes={sizes[1]} "
                f"with data.task={data.task}: a block needs {self.task.least} tokens, and each split a block; "
                "configs/task.py sets them"
            )

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields each example as a document."""
        random = np.random.default_rng([*f"{self.data.task} {self.data[split]}".encode()])
        while True:
            left = self.length
            while left:
                drawn = int(random.integers(self.task.least, self.length + 1))
                size = left if left - drawn < self.task.least else drawn
                yield Piece(self.task.example(random, size)[0].tobytes(), ends_document=True)
                left -= size

    def description(self, split: str) -> dict[str, Any]:
        """Returns the task, the length, the split and the version of the examples."""
        keys = {"task": self.data.task, "length": self.length, "split": self.data[split]}
        return {"corpus": self.name, "version": self.version} | keys

    def title(self, split: str) -> str:
        """Returns the task's name."""
        return self.data.task


def _sequence(order: Callable[[np.ndarray], np.ndarray]) -> Make:
    """Returns the task that gives back a sequence in the order of the indices `order`."""

    def make(random: np.random.Generator, length: int) -> Made:
        size = (length - 2) // 2
        sequence = random.integers(10, size=size) + OWN
        places = order(sequence)
        gaps = np.arange(size) + size + 1 - places
        return np.concatenate([sequence, [EQUALS], sequence[places]]), np.append(
            np.zeros(size + 1, int), gaps
        )

    return make


def _addition(random: np.random.Generator, length: int) -> Made:
    """Two numbers and their sum, the lowest digit first. A gap reaches to the first number's digit."""
    size, plus = (length - 4) // 3, OWN + 10
    one, other = random.integers(10, size=(2, size))
    total, carry = [], 0
    for a, b in zip(one, other, strict=True):
        carry, digit = divmod(int(a + b) + carry, 10)
        total.append(digit)
    digits = [*(one + OWN), plus, *(other + OWN), EQUALS, *(np.array([*total, carry]) + OWN)]
    return digits, [0] * (2 * size + 2) + [2 * size + 2] * (size + 1)


def _parity(random: np.random.Generator, length: int) -> Made:
    bits = random.integers(2, size=length - 3)
    return [*(bits + OWN), EQUALS, OWN + int(bits.sum()) % 2], [0] * (length - 2) + [length - 2]


def _flip_flop(random: np.random.Generator, length: int) -> Made:
    """Instructions, each with a bit: write, ignore, and `ASK` to read the bit written last."""
    write, ignore = OWN + 2, OWN + 3
    pairs = (length - 1) // 2
    orders = random.choice([write, ignore, ASK], pairs, p=[0.1, 0.8, 0.1])
    orders[0], orders[-1] = write, ASK
    reads, places = orders == ASK, np.arange(pairs)
    written = np.maximum.accumulate(np.where(orders == write, places, 0))
    bits = np.empty(pairs, int)
    bits[~reads] = random.integers(2, size=pairs - reads.sum()) + OWN
    bits[reads] = bits[written[reads]]
    gaps = np.where(reads, 2 * (places - written), 0)
    return np.stack([orders, bits], 1).ravel(), np.stack([0 * gaps, gaps], 1).ravel()


def _recall(pairs: int, symbols: int = 60) -> Make:
    """Returns the task of `pairs` keys with values, and later a query for each key."""

    def make(random: np.random.Generator, length: int) -> Made:
        keys = random.choice(symbols // 2, pairs, replace=False) + OWN
        values = random.integers(symbols // 2, symbols, size=pairs) + OWN
        # the queries' places by a power law, as zoology's MQAR
        room = (length - 1 - 2 * pairs) // 3
        weights = np.arange(1, room + 1) ** -0.99
        slots = random.choice(room, pairs, replace=False, p=weights / weights.sum())
        tokens = random.integers(symbols // 2, symbols, size=2 * pairs + 3 * room) + OWN
        tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        gaps, start = np.zeros(tokens.size, int), 2 * pairs + 3 * slots
        tokens[start], tokens[start + 1], tokens[start + 2] = QUERY, keys, values
        gaps[start + 2] = start + 2 - (2 * np.arange(pairs) + 1)
        return tokens, gaps

    return make


def _hidden(
    random: np.random.Generator, needles: Int[np.ndarray, "needles 3"], size: int, noise: int
) -> tuple[np.ndarray, Int[np.ndarray, " needles"]]:
    """Returns `size` tokens with needles, in their order, at random places in noise, and the place of
    each needle's last token. `noise` is the first of `NOISE` ids.
    """
    count = len(needles)
    tokens = random.integers(noise, noise + NOISE, size=size)
    starts = np.sort(random.integers(size - 3 * count + 1, size=count)) + 3 * np.arange(count)
    tokens[starts[:, None] + np.arange(3)] = needles
    return tokens, starts + 2


NAMES = NOISE = 20  # ids of keys, of values and of noise


def _needles(keys: int = 1, values: int = 1, queries: int = 1) -> Make:
    """Returns the task of needles (a mark, a key, a value) in noise, and queries at the end; a key
    with several values is asked as often, in their order.
    """

    def make(random: np.random.Generator, length: int) -> Made:
        names = np.repeat(random.choice(NAMES, keys, replace=False), values) + OWN + 1
        contents = random.integers(NAMES, size=keys * values) + OWN + 1 + NAMES
        needles = np.stack([np.full(names.size, OWN), names, contents], axis=1)
        asked = queries * values
        size = length - 1 - 3 * asked
        tokens, places = _hidden(random, needles, size, OWN + 1 + 2 * NAMES)
        by_key = np.arange(keys * values).reshape(keys, values)
        which = random.permutation(by_key)[:queries].ravel()
        ends = np.stack([np.full(asked, QUERY), names[which], contents[which]], axis=1)
        gaps = np.zeros(size + 3 * asked, int)
        gaps[size + 2 :: 3] = size + 2 + 3 * np.arange(asked) - places[which]
        return np.append(tokens, ends), gaps

    return make


def _tracking(hops: int) -> Make:
    """Returns the task of two chains of variables with a value, each copied to the next variable `hops`
    times; the value of a chain's last variable is asked.
    """

    def make(random: np.random.Generator, length: int) -> Made:
        chains, links = 2, hops + 1
        names = random.choice(NAMES, (chains, links), replace=False) + OWN + 1
        values = random.integers(NAMES, size=(chains, 1)) + OWN + 1 + NAMES
        assigned = np.concatenate([values, names[:, :-1]], axis=1)
        needles = np.stack([np.full_like(names, OWN), names, assigned], axis=-1)
        chain = random.permutation(np.repeat(np.arange(chains), links))  # of each needle
        in_order = np.zeros((chain.size, 3), int)
        for index in range(chains):
            in_order[chain == index] = needles[index]
        tokens, places = _hidden(random, in_order, length - 4, OWN + 1 + 2 * NAMES)
        question = [QUERY, names[0, -1], values[0, 0]]
        gap = length - 2 - places[np.argmax(chain == 0)]
        return np.append(tokens, question), np.append(np.zeros(length - 2, int), gap)

    return make


def _common(count: int, times: int) -> Make:
    """Returns the task of words in any order, `count` of which come `times` as often as the others;
    the common ones are asked, by id.
    """

    def make(random: np.random.Generator, length: int) -> Made:
        size = length - 2 - count
        words = random.permutation(NAMES)
        ends = np.cumsum(np.repeat([times, 1], [count, NAMES - count]))
        shares = np.diff(ends * size // ends[-1], prepend=0)
        tokens = random.permutation(np.repeat(words, shares)) + OWN
        answers = np.sort(words[:count]) + OWN
        last = [size - 1 - np.argmax(tokens[::-1] == answer) for answer in answers]
        gaps = size + 1 + np.arange(count) - last
        return np.concatenate([tokens, [EQUALS], answers]), np.append(np.zeros(size + 1, int), gaps)

    return make


def _frequent(random: np.random.Generator, length: int) -> Made:
    """Words from a zeta distribution with exponent 2. The three most frequent are asked, in order."""
    size = length - 5
    weights = np.arange(1.0, NAMES + 1) ** -2
    counts = np.zeros(NAMES, int)
    while len({*np.sort(counts)[-4:]}) < 4:  # no ties
        tokens = random.choice(NAMES, size, p=weights / weights.sum())
        counts = np.bincount(tokens, minlength=NAMES)
    names = random.permutation(NAMES)
    tokens, answers = names[tokens] + OWN, names[np.argsort(counts)[:-4:-1]] + OWN
    last = [size - 1 - np.argmax(tokens[::-1] == answer) for answer in answers]
    gaps = size + 1 + np.arange(3) - last
    return np.concatenate([tokens, [EQUALS], answers]), np.append(np.zeros(size + 1, int), gaps)


TASKS: Mapping[str, Task] = {
    "copy": Task(
        _sequence(lambda sequence: np.arange(sequence.size)),
        4,
        1 / 10,
        "digits, and the same digits again (arXiv 2305.19466)",
    ),
    "reverse": Task(
        _sequence(lambda sequence: np.arange(sequence.size)[::-1]),
        4,
        1 / 10,
        "digits, and the same from the last to the first (arXiv 2305.19466)",
    ),
    "sort": Task(
        _sequence(functools.partial(np.argsort, kind="stable")),
        4,
        1 / 10,
        "digits, and the same in ascending order (arXiv 2305.19466)",
    ),
    "addition": Task(
        _addition,
        7,
        1 / 10,
        "two numbers and their sum, the lowest digit first (arXiv 2305.19466)",
    ),
    "parity": Task(_parity, 4, 1 / 2, "bits, and whether their sum is odd (arXiv 2305.16843)"),
    "flip_flop": Task(
        _flip_flop,
        5,
        1 / 2,
        "write, ignore and read a bit: what is read is the bit written last (arXiv 2306.00946)",
    ),
    "recall": Task(
        _recall(pairs=8),
        41,
        1 / 30,
        "8 keys with values, and a query of each; queries follow at gaps by a power law (MQAR, arXiv 2312.04927)",
    ),
    "recall_few": Task(
        _recall(pairs=4, symbols=20),
        21,
        1 / 10,
        "recall with 4 keys, and 10 symbols each for keys and values",
    ),
    "needle": Task(
        _needles(), 16, 1 / NAMES, "a key with a value in noise (RULER, arXiv 2404.06654)"
    ),
    "needle_keys": Task(
        _needles(keys=4), 32, 1 / NAMES, "four keys in noise, one is asked (RULER)"
    ),
    "needle_values": Task(
        _needles(values=4),
        32,
        1 / NAMES,
        "a key with four values, which are asked in order (RULER)",
    ),
    "needle_queries": Task(
        _needles(keys=4, queries=4), 32, 1 / NAMES, "four keys in noise, all are asked (RULER)"
    ),
    "tracking": Task(
        _tracking(hops=4),
        40,
        1 / NAMES,
        "two chains of variables, each assigned the one before; the last one's value (RULER)",
    ),
    "common_words": Task(
        _common(count=4, times=10),
        48,
        1 / NAMES,
        "words, of which 4 come 10 times as often as the others: these, in alphabetical order (RULER)",
    ),
    "frequent_words": Task(
        _frequent,
        32,
        1 / NAMES,
        "words by a zeta law: the three most frequent, the most frequent first (RULER)",
    ),
}
