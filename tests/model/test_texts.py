"""Texts from trained runs: scripts/generate.py, and its parts."""

import functools
import io
import json
import os
import pty
import re
import sys
import tracemalloc

import jax
import numpy as np
import pytest

from alibi.data.tokenizers import BpeTokenizer, ByteTokenizer
from alibi.data.tokenizers.bpe import END_OF_TEXT, train_bpe
from alibi.evaluation.harness import write_answers
from alibi.generation import GREEDY, Sampling
from alibi.generation.decoding import decode_answer
from alibi.generation.texts import Answer, Prompt, Writer, make_prompt, read_prompts
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run
from tests.hosts import ROOT

SCRIPT = ROOT / "scripts" / "generate.py"
ADAPTIVE = {"keys": "model.embedding=adaptive,model.cutoffs=20"}


@pytest.fixture(scope="module")
def runs(tiny_text, tmp_path_factory):
    """Returns the work directory of a run, with random parameters, with a tokenizer and a method."""

    @functools.cache
    def run_of(tokenizer="bytes", position="alibi", keys=""):
        folder, keys = tmp_path_factory.mktemp("run"), f"data.tokenizer={tokenizer},{keys}"
        text = tiny_text["train"]
        return str(make_run(folder, position, "run", steps=(6,), text=text, keys=keys.strip(",")))

    return run_of


def prompt_of(text, seed=0):
    return Prompt(list(text.encode()), seed, {"prompt": text})


@pytest.mark.parametrize(
    ("tokenizer", "keys"),
    [
        ("words", ADAPTIVE),
        (
            "bpe",
            {
                "position": "alibi,none",
                "keys": "model.num_layers=2,model.window=4,0,model.scan_layers=true,data.bpe_vocab_size=300",
            },
        ),
    ],
)
def test_answers_are_the_likeliest_tokens_of_full_passes(runs, tokenizer, keys):
    """At eight times the training length, with the NLL that scoring gives."""
    run = TrainedRun(runs(tokenizer, **keys))
    writer = Writer(run, GREEDY, 8 * 16 - 20)
    prompts = [
        make_prompt(run.tokenizer, {"prompt": text}, 0, print)
        for text in ("the sea", "a longer day of")
    ]
    total, forward = writer.check(prompts), jax.jit(run.model.apply)
    for prompt, answer in zip(prompts, writer.write(prompts), strict=True):
        tokens = np.asarray([prompt.ids + answer.tokens])
        inputs = jax.numpy.asarray(np.pad(tokens, ((0, 0), (0, total - tokens.shape[1]))))
        logits = np.asarray(forward({"params": run.params}, inputs))[0]
        ahead = logits[len(prompt.ids) - 1 : tokens.shape[1] - 1]
        nll = -np.asarray(jax.nn.log_softmax(ahead))[np.arange(len(ahead)), answer.tokens]
        np.testing.assert_allclose(answer.nll, nll, atol=2e-4)
        np.testing.assert_allclose(
            nll, -np.asarray(jax.nn.log_softmax(ahead)).max(axis=1), atol=2e-4
        )
        ended = tokenizer == "bpe" and answer.tokens[-1] == run.tokenizer.boundary_id
        assert answer.end == ("document" if ended else "length")
        whole = run.tokenizer.decode(prompt.ids + answer.tokens[: len(answer.tokens) - ended])
        assert run.tokenizer.decode(prompt.ids) + answer.text == whole, "with a space between words"


def one_by_one(decode, tokens, stops):
    """The text and the tokens of an answer whose text is looked at after each token."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        if found := [stop for stop in stops if stop in text]:
            first = min(found, key=lambda stop: (text.find(stop) + len(stop), -len(stop)))
            return text[: text.find(first)], tokens[:count], "stop"
    return decode(tokens), tokens, "length"


def test_the_stop_that_ends_first_wins_whatever_is_looked_at_together(runs):
    """Against one token at a time, for random texts and stops, and those of the issue."""
    run, rng = TrainedRun(runs()), np.random.default_rng(0)
    pieces = ["a", "b", "c", "d", "ab", "bcd", "\u00e9", "\U0001f642"]
    merged = BpeTokenizer(
        train_bpe(["ab bcd abab bcdbcd ab\u00e9\U0001f642" * 50], 300), END_OF_TEXT
    )
    cases = [("abcd", ["bcd", "c"]), ("abcd", ["d", "bcd", "abc"]), ("aabab", ["ab", "aab"])]
    for _ in range(200):
        text = "".join(rng.choice(pieces, 30))
        places = [rng.integers(0, len(text), 2) for _ in range(rng.integers(1, 4))]
        cases.append((text, [text[a : a + 1 + b % 4] for a, b in places]))
    ended = set()
    for tokenizer in (ByteTokenizer(), merged):
        run.tokenizer = tokenizer
        for text, stops in cases:
            tokens = tokenizer.encode_open(text)
            right = one_by_one(tokenizer.decode, tokens, stops)
            for each in (1, 3, 16):
                answer = Answer(Prompt([tokenizer.boundary_id], 0, {}))
                writer = Writer(run, GREEDY, len(tokens), stops)
                for start in range(0, len(tokens), each):
                    part = tokens[start : start + each]
                    writer.add(answer, part, [0.5] * len(part))
                assert (answer.text, answer.tokens, answer.end) == right, (text, stops, each)
                assert len(answer.nll) == len(answer.tokens)
                ended.add(answer.end)
    assert ended == {"stop"}


def test_drawn_answers_end_alike_in_files_of_prompts_streams_and_tasks(runs):
    run, stops = TrainedRun(runs()), ["he", "\n", "e t", "s", "\ufffd"]
    writer = Writer(run, Sampling(3.0), 40, stops)
    prompts = [prompt_of("the cat", seed) for seed in range(24)]
    together, single = (list(writer.write(prompts, total=64, each=n)) for n in (16, 1))
    for answer, alone in zip(together, single, strict=True):
        row, of_alone = answer.to_json(), alone.to_json()
        # programs for 16 tokens and for 1 may differ in a last bit
        assert row.pop("nll") == pytest.approx(of_alone.pop("nll"), abs=2e-6)
        assert row == of_alone
        decoded = decode_answer(run.tokenizer, answer.prompt.ids, answer.tokens)
        assert decoded.startswith(answer.text)
        assert (answer.end == "stop") == any(stop in decoded for stop in stops)
        assert not any(stop in answer.text for stop in stops)
    assert {answer.end for answer in together} >= {"stop"}
    given = {"max_gen_toks": 40, "until": stops, "do_sample": True, "temperature": 3.0}
    answers = write_answers(run, 64, ["the cat"] * 24, range(24), given)
    assert answers == [answer.text for answer in together]


def test_a_long_stop_string_takes_no_memory_and_a_cut_prompt_gets_its_character(runs):
    writer = Writer(TrainedRun(runs()), GREEDY, 40, ["x" * 20_000 + "y", "by"])
    answer = Answer(prompt_of("a"), text="abxb\ufffd")
    tracemalloc.start()
    assert writer.settled(answer) == "abx"
    answer.text = "abxx"
    assert writer.settled(answer) == "ab"
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    emoji = list("a\U0001f642b".encode())
    assert decode_answer(ByteTokenizer(), emoji[:3], emoji[3:]) == "\U0001f642b"
    assert decode_answer(ByteTokenizer(), emoji[:3], [98]) == "b"


def test_words_that_a_run_lacks_are_said(runs):
    said, tokenizer = [], TrainedRun(runs("words", **ADAPTIVE)).tokenizer
    prompt = make_prompt(tokenizer, {"prompt": "the qwertz"}, 1, said.append)
    assert prompt.ids.count(tokenizer.unknown_id) == 1
    assert said == ["1 of 2 tokens of the prompt are unknown to the run, and became <unk>"]
    assert make_prompt(tokenizer, {"prompt": ""}, 1, print).ids == [tokenizer.boundary_id]
    special = BpeTokenizer(train_bpe(["the cat"], 260), END_OF_TEXT)
    prompt = make_prompt(special, {"prompt": f"the {END_OF_TEXT}"}, 1, said.append)
    assert special.decode(prompt.ids) == f"the {END_OF_TEXT}"
    assert special.boundary_id not in prompt.ids
    assert said[1:] == [
        'the prompt spells <|endoftext|>, which is read as text; "tokens" takes its id, 0'
    ]


def test_a_file_of_prompts_is_answered_in_batches_as_each_alone(
    runs, tmp_path, run_script, monkeypatch
):
    """With characters that Python takes for ends of lines, and that an output can't have."""
    file, workdir = tmp_path / "prompts.jsonl", runs()
    odd = {"id": "a\u2028\u0085", "half": "\ud83d", "arrow": "\u2192\U0001f642"}
    rows = [{"prompt": "the sea", **odd}, {"tokens": [97, 98]}, {"prompt": "it was", "seed": 9}]
    lines = json.dumps(rows, ensure_ascii=False)[1:-1].replace("}, {", "}\r\n{")
    file.write_bytes(b"\xef\xbb\xbf" + lines.replace("\ud83d", "\\ud83d").encode())
    words = [f"--workdir={workdir}", "--max_tokens=5", "--seed=4"]
    result = run_script(SCRIPT, *words, f"--prompts={file}")
    answers = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    assert [answer["seed"] for answer in answers] == [4, 5, 9]
    assert (odd.items() <= answers[0].items(), answers[1]["prompt_tokens"]) == (True, [97, 98])
    for answer in answers:
        assert (len(answer["tokens"]), len(answer["nll"]), answer["end"]) == (5, 5, "length")
    alone = run_script(SCRIPT, *words, "--prompt=it was", "--seed=9", "--logprobs")
    tokens = alone.stdout.splitlines()[-5:]
    assert alone.stdout.startswith("it was" + answers[2]["text"])
    assert [int(line.split()[1]) for line in tokens] == answers[2]["tokens"]
    assert "the checkpoint after 6 of 600 updates" in alone.stderr
    assert re.search(r"5 tokens, \d\.\d{4} nats each; end: length; seed 9", alone.stderr)
    shown = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", shown)
    run_script(SCRIPT, *words, f"--prompts={file}")
    run_script(SCRIPT, *words, "--prompt=\u00e9\u2192")
    shown.seek(0)
    *lines, text, end = shown.buffer.read().decode("latin-1").split("\n")
    assert [json.loads(line) for line in lines] == answers
    assert (text.startswith("\u00e9\\u2192"), end) == (True, "")
    end, opened = os.pipe()  # as the shell gives /dev/stdin, or <(command)
    os.write(opened, file.read_bytes())
    os.close(opened)
    assert len(read_prompts(f"/dev/fd/{end}", ByteTokenizer(), 4, print)) == 3
    os.close(end)


def test_what_the_command_refuses(runs, run_script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)

    def refused(words, message):
        result = run_script(SCRIPT, f"--workdir={runs()}", *words, code=1)
        assert not result.stdout
        assert message in result.stderr.splitlines()[-1]

    for words, message in (
        (["--prompt=a", "--top_p=0"], "error: top_p=0.0 must be above 0"),
        (["--prompt=a", "--temperature=-1"], "error: temperature=-1.0 must be 0"),
        # a prompt with an address is a text, and goes on to the next check
        (
            ["--prompt=https://example.com is a page", "--max_tokens=0"],
            "error: max_tokens=0 must be at least 1",
        ),
        (["--prompt=a", "--stop="], "error: a stop string is empty"),
        (["--prompt=a", "--prompts=b"], "error: --prompt and --prompts are two ways"),
        (["--prompts=b", "--logprobs"], "error: --logprobs is for --prompt; answers to"),
        (["--prompts=/nowhere"], "error: --prompts=/nowhere can't be read"),
        (
            ["--prompt=a", f"--max_tokens={10**30}"],
            "tokens is too long: positions end at 2,147,483",
        ),
        (["--prompt=a\udcff"], r"""error: "prompt" is no text, since character 2 is '\udcff'"""),
        ([], "error: give a text by --prompt or a file by --prompts: this is no terminal"),
    ):
        refused(words, message)
    file = tmp_path / "prompts.jsonl"
    for line, message in (
        ('{"prom', "Unterminated string"),
        ("3", "'int' object has no attribute"),
        ('{"prompt": 3}', '"prompt" is 3 and must be a text'),
        ('{"text": "a"}', 'it needs either "prompt"'),
        ('{"tokens": [256]}', '"tokens" must be a list of ids from 0 to 255'),
        ('{"prompt": "a", "seed": -1}', "seed=-1 must be a whole number"),
        ('{"prompt": "a", "seed": true}', "seed=True must be a whole number"),
        ('{"prompt": "a", "nll": 1, "text": 2}', 'its answer has a key "nll" of its own; give'),
        ('{"tokens": [1], "prompt_tokens": 1}', 'its answer has a key "prompt_tokens" of its own'),
        ('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", ""),
        ('{"prompt": "\\ud83d"}', r""""prompt" is no text, since character 1 is '\ud83d'"""),
    ):
        file.write_text('{"prompt": "a"}\n\n' + line + "\n")
        form = '{"prompt": "It was"}'
        refused([f"--prompts={file}"], f"prompts.jsonl, line 3 is no row such as {form}: {message}")


def test_a_terminal_is_asked_for_one_line_after_another(runs, run_script, monkeypatch):
    """Through a terminal of its own; a bad line doesn't end it."""
    own, theirs = pty.openpty()
    os.write(own, b"the sea\na line of too many tokens\nit was\n\x04")
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        done = run_script(SCRIPT, f"--workdir={runs(position='learned')}", "--max_tokens=3")
    os.close(own)
    assert done.stdout.startswith("> the sea")
    assert "> it was" in done.stdout
    assert done.stderr.count("end: length") == 2
    ended = r"error: a prompt of 25 tokens and max_tokens=3 are 28: .* has 16 positions"
    assert re.search(ended, done.stderr), "before it starts"
