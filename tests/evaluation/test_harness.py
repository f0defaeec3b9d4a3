"""Tasks of the harness, against full passes of the model and against our own perplexity."""

import functools
import json
import re
import socket
import sys

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")

import datasets
import jax
import numpy as np

from alibi.cli import harness
from alibi.config.override import Override
from alibi.evaluation.harness import PairScorer, harness_model
from alibi.evaluation.scorer import run_scorer
from alibi.runs.trained import TrainedRun
from alibi.training.loop import train
from tests.refusals import assert_refused

ADAPTIVE = {"model__embedding": "adaptive", "model__cutoffs": (20,)}
QUESTIONS = [
    {"question": "the cat sat on", "choices": ["the mat", "a tree", "it"], "answer": 1},
    {"question": "then a dog", "choices": ["ran.", "saw", "under the tree and a"], "answer": 0},
    {"question": "", "choices": ["the", "a cat"], "answer": 0},
]
TASKS = {
    "choices": "output_type: multiple_choice\n"
    "doc_to_text: '{{question}}'\ndoc_to_target: answer\ndoc_to_choice: choices\n"
    "metric_list: [{metric: acc}]",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]",
    "answers": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{answer}}'\n"
    "generation_kwargs: {until: ['e'], max_gen_toks: 12, do_sample: false}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
}


@pytest.fixture(scope="module")
def runs(tiny_config, tmp_path_factory):
    """Returns the work directory of a run with a tokenizer and a method."""
    made = {}

    def run_of(tokenizer="bytes", position="alibi", **keys):
        name = "-".join([tokenizer, position, *map(str, keys.values())])
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(re.sub("\\W", "-", name)))
            train(tiny_config(position=position, data__tokenizer=tokenizer, **keys), made[name])
        return made[name]

    return run_of


@functools.cache
def forward(model):
    return jax.jit(model.apply)


def full_pass(run, ids, length):
    """Returns the log-probabilities after each of the ids, of a pass over a window of `length`."""
    inputs = np.pad(np.asarray([ids], np.int32), ((0, 0), (0, length - len(ids))))
    logits = forward(run.model)({"params": run.params}, inputs)
    return np.asarray(jax.nn.log_softmax(logits[0, : len(ids)]), np.float64)


def expected(run, context, continuation, length):
    ids = ([*context] or [run.tokenizer.boundary_id]) + [*continuation]
    ids = ids[-length - 1 :]
    ahead = full_pass(run, ids[:-1], length)[-len(continuation) :]
    likeliest = (ahead.argmax(axis=1) == continuation).all()
    return ahead[np.arange(len(continuation)), continuation].sum(), bool(likeliest)


@pytest.mark.parametrize(
    ("tokenizer", "position", "keys"),
    [
        ("words", "rotary", ADAPTIVE),
        (
            "bpe",
            "alibi,none",
            {"model__num_layers": 2, "model__scan_layers": True, "data__bpe_vocab_size": 300},
        ),
        ("bytes", "rotary_ntk", {}),
        ("bytes", "alibi", {"model__max_position": 64, "model__logits_chunk": 8}),
    ],
)
def test_scores_are_those_of_full_passes(runs, tokenizer, position, keys):
    """Each request alone in a window, also with a method that depends on the window's length."""
    run = TrainedRun(runs(tokenizer, position, **keys), batch_tokens=64)
    scorer, rng = PairScorer(run, 60), np.random.default_rng(0)
    assert scorer.lengths == [16, 32, 60]

    def ids(count):
        return rng.integers(0, run.tokenizer.vocab_size, count).tolist()

    pairs = [(ids(n), ids(to)) for n, to in ((0, 3), (9, 1), (14, 2), (30, 7), (55, 9), (80, 60))]
    for context in (ids(5), ids(20), ids(50)):
        greedy = []
        for _ in range(3):
            greedy.append(int(full_pass(run, [*context, *greedy], 60)[-1].argmax()))
        pairs += [
            (context, greedy),
            (context, [*greedy[:2], (greedy[2] + 1) % run.tokenizer.vocab_size]),
        ]
    found = scorer.score(pairs)
    wanted = [expected(run, *pair, 60) for pair in pairs]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-5)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert {True, False} == {is_greedy for _, is_greedy in found}
    assert len(scorer.scorers[True].compiled) == len(scorer.lengths)
    again = scorer.score(pairs[::-1])
    np.testing.assert_allclose([x for x, _ in again[::-1]], [x for x, _ in found], rtol=1e-6)
    assert len(scorer.scorers[True].compiled) == len(scorer.lengths)
    without = scorer.score(pairs[:2], greedy=False)
    np.testing.assert_allclose([x for x, _ in without], [x for x, _ in found[:2]], rtol=1e-6)


def model(workdir, length=0, **options):
    return harness_model()(workdir, length, **options)


class Request:
    def __init__(self, *args):
        self.args = args


@pytest.mark.parametrize(("tokenizer", "length"), [("bytes", 48), ("words", 16), ("bpe", 16)])
def test_rolling_windows_are_ours(runs, tiny_text, tokenizer, length):
    """Ours and the harness's differ in the last window alone, where the harness reads a full one."""
    keys = {"data__bpe_vocab_size": 300} if tokenizer == "bpe" else {}
    run = TrainedRun(runs(tokenizer, **keys))
    text = tiny_text["valid"].read_text()
    ids = run.tokenizer.encode_open(text)
    whole = len(ids) // length * length
    assert 0 < whole < len(ids)
    ours = run_scorer(run).score(run.params, np.asarray(ids, np.int32), length).values
    lm = model(runs(tokenizer, **keys), length)
    (found,) = lm.loglikelihood_rolling([Request(text)])
    last = expected(run, ids[:whole], ids[whole:], length)[0]
    np.testing.assert_allclose(-found, ours[:whole].sum(dtype=np.float64) - last, rtol=1e-5)
    if tokenizer == "bytes":
        found, none = lm.loglikelihood_rolling([Request(text[:whole]), Request("")])
        np.testing.assert_allclose(-found, ours[:whole].sum(dtype=np.float64), rtol=1e-5)
        assert none == 0


def test_pairs_are_encoded_together(runs):
    """Words that a context and its continuation share make one token, as in the harness."""
    lm = model(runs("words"), 16)
    run = lm.run
    (joint, _), (alone, _) = lm.loglikelihood(
        [Request("the cat ", "sat on"), Request("", "the cat")]
    )
    words = run.tokenizer.encode_open
    assert joint == pytest.approx(expected(run, words("the cat"), words("sat on"), 16)[0], rel=1e-5)
    assert alone == pytest.approx(expected(run, [], words("the cat"), 16)[0], rel=1e-5)
    assert_refused("no token", lambda: lm.loglikelihood([Request("the", " ")]))
    assert_refused("'at'.* 'the c'", lambda: lm.loglikelihood([Request("the c", "at")]))
    assert_refused("17 tokens.* length=16", lambda: lm.loglikelihood([Request("a", " the" * 17)]))


def test_drawn_answers(runs, capsys):
    lm = model(runs(), 64)
    drawn = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 0.9, "top_k": 5}
    requests = [Request("the cat", drawn)] * 2 + [Request("the cat", drawn | {"num_beams": 2})]
    answers = lm.generate_until(requests)
    assert len(set(answers)) == 3, "each draws by its own seed"
    assert lm.generate_until(requests) == answers
    assert "options of generation without effect here: {'num_beams': 2}" in capsys.readouterr().err
    assert_refused(
        "64 tokens.* length=64",
        lambda: lm.generate_until([Request("the cat", {"until": ["."], "max_gen_toks": 64})]),
    )


@pytest.fixture
def no_network(monkeypatch):
    """Fails at any look for a host."""

    def refused(*_, **__):
        pytest.fail("a task with local data looked for a network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.fixture
def tasks(tmp_path, tiny_text):
    """Returns a folder of YAML tasks with local data, and the documents of each task."""
    lines = tiny_text["valid"].read_text().splitlines(keepends=True)
    documents = {
        "choices": QUESTIONS,
        "rolling": [{"text": "".join(lines[:7])}, {"text": lines[7]}],
        "answers": [{"text": "".join(lines[:n]), "answer": ""} for n in (1, 3)],
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in documents.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: '{data}'}}, cache_dir: '{tmp_path / 'hf'}'}}\n"
            f"metadata: {{version: 2}}\n{TASKS[name]}\n"
        )
    return folder, documents


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs the harness's command line in this process; returns its code, stdout and stderr."""

    def run(arguments, *words):
        text = ",".join(f"{key}={value}" for key, value in arguments.items())
        words = ["--model=alibi", f"--model_args={text}", *map(str, words)]
        monkeypatch.setattr(sys, "argv", ["harness", *words])
        monkeypatch.setenv("DISABLE_MULTIPROC", "1")
        monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # read before
        capfd.readouterr()
        return harness.main(), *capfd.readouterr()

    return run


def test_tasks_with_local_data(runs, tasks, command, tmp_path, no_network):
    """Each metric is that of full passes; nothing looks for a network."""
    (folder, documents), workdir = tasks, runs()
    words = ["--tasks=choices,rolling,answers", f"--include_path={folder}"]
    words += [f"--output_path={tmp_path / 'results.json'}"]
    code, shown, errors = command({"workdir": workdir, "length": 40}, *words)
    assert code == 0, errors
    assert "|choices" in shown
    (file,) = tmp_path.glob("results*.json")
    written = json.loads(file.read_text())
    found = written["results"]
    run = TrainedRun(workdir)
    encode = run.tokenizer.encode_open

    right = []
    for document in documents["choices"]:
        # "" as a context: the delimiter, a space, is then the beginning of the continuation
        scores = [
            expected(run, encode(document["question"]), encode(" " + choice), 40)[0]
            for choice in document["choices"]
        ]
        right.append(int(np.argmax(scores)) == document["answer"])
    assert found["choices"]["acc,none"] == pytest.approx(np.mean(right))
    assert written["n-samples"]["choices"]["effective"] == 3
    assert found["choices"]["acc_stderr,none"] == pytest.approx(np.std(right, ddof=1) / 3**0.5)

    nats, size = 0.0, 0
    for document in documents["rolling"]:
        ids = encode(document["text"])
        starts = range(0, len(ids), 40)
        nats -= sum(expected(run, ids[:n], ids[n : n + 40], 40)[0] for n in starts)
        size += len(ids)
    assert found["rolling"]["byte_perplexity,none"] == pytest.approx(np.exp(nats / size), rel=1e-5)
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(
        nats / size / np.log(2), rel=1e-5
    )

    greedy = []
    for document in documents["answers"]:
        ids, new = encode(document["text"])[-28:], []
        while len(new) < 12 and "e" not in run.tokenizer.decode(new):
            new.append(int(full_pass(run, [*ids, *new], 40)[-1].argmax()))
        greedy.append(run.tokenizer.decode(new).partition("e")[0])
    answered = model(workdir, 40).generate_until(
        [
            Request(document["text"], {"until": ["e"], "max_gen_toks": 12})
            for document in documents["answers"]
        ]
    )
    assert answered == greedy
    assert found["answers"]["exact_match,none"] == np.mean([text == "" for text in greedy])

    assert written["config"].items() >= {"run": run.name, "step": run.step, "length": 40}.items()
    assert "requests are longer than 28 tokens, and lost their beginning" in errors


def test_a_run_as_another_method(runs):
    """The model takes the arguments that an override takes."""
    ids, workdir = np.arange(40).tolist(), runs("bytes", "rotary")
    options = {"factor": 4}
    lm = model(workdir, 64, position="yarn", options=options, window=32)
    override = Override("yarn", tuple(options.items()), window=32)
    wanted = expected(TrainedRun(workdir, override=override), ids[:30], ids[30:], 64)
    assert lm.scorer.score([(ids[:30], ids[30:])])[0][0] == pytest.approx(wanted[0], rel=1e-5)
    assert lm.get_model_info()["run"].endswith("as yarn(factor=4) with window 32")


def test_bad_input_is_a_line(runs, tasks, command, tmp_path, monkeypatch):
    learned, masked = runs("bytes", "learned"), runs("bytes", "alibi", objective__name="masked")
    (tmp_path / "none").mkdir()
    words = ["--tasks=choices", f"--include_path={tasks[0]}"]
    for changed, message in (
        ({"checkpoint": 7}, "no checkpoint of step 7"),
        ({"lenght": 7}, "has no lenght; use workdir, length, "),
        ({"workdir": learned, "length": 17}, "has no result at length=17: "),
        ({"workdir": masked}, "was trained for objective=masked; tasks need"),
    ):
        assert_refused(re.escape(message), model, **{"workdir": runs()} | changed)
    code, _, errors = command({"workdir": tmp_path / "none"}, *words)
    assert code == 1
    assert errors.splitlines()[-1].startswith(f"error: {tmp_path / 'none'} is no work directory")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    harness_model.cache_clear()
    code, _, errors = command({"workdir": runs()}, *words)
    assert code == 1
    assert "a task of the harness needs the package lm_eval, which is not" in errors
    assert "bash scripts/setup.sh --extra=harness" in errors
