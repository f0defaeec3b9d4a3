"""Tasks: each example has the answers that its rule gives, and nothing but its marks tells where."""

import itertools
import pathlib

import numpy as np
import pytest

from alibi.config import read_config
from alibi.data.tasks import SYMBOLS, TASKS, Tasks
from alibi.objectives import Sequences, make_objective
from alibi.objectives.answers import Answers, answers_of
from configs import task as config_file
from tests.refusals import assert_refused

LETTERS = SYMBOLS[4:].tobytes().decode()


def examples(name, length, count=30):
    random = np.random.default_rng(0)
    return [TASKS[name].example(random, length) for _ in range(count)]


def pairs_of(text, mark):
    """The two letters after each `mark`."""
    return [text[i + 1 : i + 3] for i in range(len(text) - 2) if text[i] == mark]


def added(text):
    one, other = text.split(LETTERS[10])
    number = sum(
        (LETTERS.index(a) + LETTERS.index(b)) * 10**i
        for i, (a, b) in enumerate(zip(one, other, strict=True))
    )
    return "".join(LETTERS[int(digit)] for digit in f"{number:0{len(one) + 1}}"[::-1])


def flipped(text):
    bit, answers = "", ""
    for order, given in zip(text[::2], text[1::2], strict=True):
        bit = given if order == LETTERS[2] else bit
        answers += bit if order == "?" else ""
    return answers


def recalled(text):
    asked = pairs_of(text, "!")  # each key once
    stored = text[: 2 * len(asked)]
    known = dict(zip(stored[::2], stored[1::2], strict=True))
    return "".join(known[key] for key, _ in asked)


def looked_up(text):
    """Needles: a key asked several times has its values in turn."""
    known = {}
    for key, value in pairs_of(text[: text.index("!")], LETTERS[0]):
        known.setdefault(key, []).append(value)
    return "".join(known[key].pop(0) for key, _ in pairs_of(text, "!"))


def tracked(text):
    known = {}
    for key, value in pairs_of(text[: text.index("!")], LETTERS[0]):
        known[key] = known.get(value, value)
    return "".join(known[key] for key, _ in pairs_of(text, "!"))


def by_count(text):
    return sorted(set(text), key=text.count, reverse=True)


# from the whole example; of those with an equals sign from the text before it
RULES = {
    "copy": lambda text: text,
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text, key=LETTERS.index)),
    "addition": added,
    "parity": lambda text: LETTERS[text.count(LETTERS[1]) % 2],
    "flip_flop": flipped,
    "recall": recalled,
    "recall_few": recalled,
    "needle": looked_up,
    "needle_keys": looked_up,
    "needle_values": looked_up,
    "needle_queries": looked_up,
    "tracking": tracked,
    "common_words": lambda text: "".join(sorted(by_count(text)[:4], key=LETTERS.index)),
    "frequent_words": lambda text: "".join(by_count(text)[:3]),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_rule_solves_each_example_and_chance_is_chance(name):
    """The rule reads the text alone; the answers are where the marks say, each after its cause."""
    task, right, drawn = TASKS[name], [], 0
    for length in (task.least, 64, 65, 200):
        for tokens, gaps in examples(name, length):
            assert tokens.shape == gaps.shape == (length,)
            assert tokens[-1] == 10, "an example ends with the end of a line"
            np.testing.assert_array_equal(answers_of(tokens[None].astype(int))[0], gaps > 0)
            assert (gaps <= np.arange(length)).all(), "what decides an answer stands before it"
            text = tokens.tobytes().decode().rstrip("\n")
            answers = bytes(tokens[gaps > 0]).decode()
            assert RULES[name](text.split("=")[0]) == answers
            right += answers
            drawn += len(answers)
    possible = sorted(set(right))
    assert len(possible) == round(1 / task.chance), "all answers occur"
    guesses = np.random.default_rng(1).choice(possible, drawn)
    share, deviation = np.mean(guesses == right), (task.chance / drawn) ** 0.5
    assert abs(share - task.chance) < 4 * deviation


def test_the_gap_of_a_copied_symbol_reaches_to_its_copy():
    (tokens, gaps), *_ = examples("reverse", 24)
    places = np.flatnonzero(gaps)
    np.testing.assert_array_equal(tokens[places], tokens[places - gaps[places]])
    assert gaps[places].tolist() == list(range(2, 24, 2))


def test_blocks_hold_whole_examples_and_splits_differ():
    data = read_config(config_file.get_config("length=64")).data
    texts = {}
    for split in ("train", "valid"):
        texts[split] = [piece.utf8 for piece in itertools.islice(Tasks(data).pieces(split), 400)]
        assert all(text.endswith(b"\n") for text in texts[split])
        ends = {*np.cumsum([len(text) for text in texts[split]])}
        assert {*range(64, max(ends), 64)} <= ends, "no example crosses the border of a block"
    assert not {*texts["train"]} & {text for text in texts["valid"] if len(text) > 20}
    lengths = [len(text) for text in texts["train"]]
    assert min(lengths) == 4
    assert max(lengths) == 64


def test_the_page_shows_each_task():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    for name, task in TASKS.items():
        tokens, gaps = task.example(np.random.default_rng(0), max(task.least, 24))
        text, answers = (bytes(each).decode().rstrip() for each in (tokens, tokens[gaps > 0]))
        line = f"| `{name}` | {task.about} | `{text}` | `{answers}` | {task.chance:.1%} |"
        assert line in page, "docs/tasks.md has another definition, example or chance"


def test_only_answers_are_targets():
    text = np.frombuffer(b"\nab=ab\n?c!def", np.uint8).astype(np.int32)
    batch = Answers(256, 10).batch(Sequences(text[None], np.array([0])))
    assert bytes(batch.inputs[0].astype(np.uint8)) == b"\nab=ab\n?c!de"
    assert [chr(target) for target in batch.targets[0] if target >= 0] == ["a", "b", "c", "e"]


def test_answers_are_marked_in_bytes():
    config = config_file.get_config("length=64")
    config.data.tokenizer = "words"
    assert_refused(
        r"objective\.name=answers .*data\.tokenizer", lambda: make_objective(read_config(config))
    )


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"task": "kopy"}, "data.task='kopy' is no task; did you mean 'copy'"),
        ({"task": "recall", "task_length": 32}, "a block needs 41 tokens"),
        ({"task": "copy", "max_train_bytes": -1}, "data.max_train_bytes=-1"),
    ],
)
def test_impossible_tasks_are_refused(keys, why):
    config = config_file.get_config("length=64")
    config.data.update(keys)
    assert_refused(why, lambda: Tasks(read_config(config).data))
