"""N-grams of a run's train text, against the formulas written out in plain Python, and their rows."""

import collections
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from alibi.config import make_config
from alibi.data.tokens import find_tokenizer, make_corpus, prepare
from alibi.evaluation.by_position import analyse
from alibi.evaluation.context_use import CONTEXT_GAIN
from alibi.evaluation.dumps import find_dumps
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.ngram import FALLBACK, cache_probabilities, fitted_weights, ngram_scores
from alibi.evaluation.ngram_runs import NGramOptions, evaluate_ngrams
from alibi.objectives import Masked, Sequences
from alibi.reporting.equivalence import Reference, comparison
from alibi.reporting.intervals import TEXT as TEXT_COVERED
from alibi.reporting.panels import build_table, caption
from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import read_rows
from alibi.reporting.writers import to_html
from alibi.runs import RunDirectory
from tests.evaluation.runs import TEXT, make_run, options_of
from tests.hosts import ROOT
from tests.refusals import assert_refused
from tests.reporting.rowmaker import make_row, panels

START = -1


class Written:
    """The formulas of Witten & Bell (1991) and Chen & Goodman (1999), a gram at a time."""

    def __init__(self, documents, vocab_size):
        self.vocab_size = vocab_size
        texts = [(START, *document) for document in documents]
        self.counts = [
            collections.Counter(
                text[at : at + order]
                for text in texts
                for at in range(order == 1, len(text) - order + 1)
            )
            for order in range(13)
        ]
        self.before = [collections.defaultdict(set) for _ in range(12)]
        for order in range(1, 12):
            for gram in self.counts[order + 1]:
                self.before[order][gram[1:]].add(gram[0])

    def adjusted(self, order, top):
        """The counts at a lower `order` in a model with order `top`."""
        if order == top:
            return self.counts[order]
        first = {gram: n for gram, n in self.counts[order].items() if gram[0] == START}
        return first | {gram: len(symbols) for gram, symbols in self.before[order].items()}

    def discounts(self, counts):
        of = collections.Counter(counts.values())
        if not (of[1] and of[2] and of[3]):
            return FALLBACK
        share = of[1] / (of[1] + 2 * of[2])
        found = tuple(k - (k + 1) * share * of[k + 1] / of[k] for k in (1, 2, 3))
        return found if min(found) > 0 else FALLBACK

    def witten_bell(self, context, symbol, order):
        if order == 0:
            return 1 / self.vocab_size
        lower = self.witten_bell(context[1:], symbol, order - 1)
        after = {g[-1]: n for g, n in self.counts[order].items() if g[:-1] == context}
        if not after:
            return lower
        return (after.get(symbol, 0) + len(after) * lower) / (sum(after.values()) + len(after))

    def kneser_ney(self, context, symbol, order, top):
        if order == 0:
            return 1 / self.vocab_size
        lower = self.kneser_ney(context[1:], symbol, order - 1, top)
        counts = self.adjusted(order, top)
        after = {g[-1]: n for g, n in counts.items() if g[:-1] == context}
        if not after:
            return lower
        discount = (0, *self.discounts(counts))
        given = sum(discount[min(n, 3)] for n in after.values())
        count = after.get(symbol, 0)
        return (count - discount[min(count, 3)] + given * lower) / sum(after.values())

    def nats(self, documents, order):
        """Returns the NLL of each symbol by both smoothings."""
        found = {"witten-bell": [], "kneser-ney": []}
        for document in documents:
            text = (START, *document)
            for at in range(1, len(text)):
                seen = min(order, at + 1)
                context = text[at - seen + 1 : at]
                # where the context is shorter, a lower order has the last word, with its own counts
                probabilities = {
                    "witten-bell": self.witten_bell(context, text[at], seen),
                    "kneser-ney": self.kneser_ney(context, text[at], seen, order),
                }
                for name, probability in probabilities.items():
                    found[name].append(-math.log(probability))
        return found


def drawn(seed, sizes, symbols):
    """Returns documents in which some sequences repeat, as in a language."""
    random = np.random.default_rng(seed)
    phrases = [random.integers(0, symbols, 5) for _ in range(6)]
    long = np.concatenate([phrases[i] for i in random.integers(0, 6, 60)])
    noise = np.where(random.random(long.size) < 0.2, random.integers(0, symbols, long.size), long)
    return [noise[start : start + size] for start, size in zip(itertools.count(0, 37), sizes)]


@pytest.mark.parametrize(
    ("train", "scored", "symbols", "id_of", "order"),
    [
        ((120,), (60,), 7, 1, 8),
        ((40, 1, 3, 60, 8), (30, 2, 1, 9), 5, 1, 8),
        ((3,), (4, 1), 3, 1, 8),
        # three of these ids fit into 64 bits, so places are sorted in three rounds
        ((90, 40), (90, 40), 6, 70_000, 11),
    ],
    ids=["a text", "documents", "fewer symbols than orders", "large ids"],
)
def test_all_orders_and_smoothings_are_the_written_formulas(train, scored, symbols, id_of, order):
    """Also where documents begin and end, which no n-gram joins, and beyond the longest document."""
    train, scored = (
        [document.astype(np.uint32) * id_of for document in drawn(seed, sizes, symbols)]
        for seed, sizes in enumerate((train, scored))
    )
    written = Written([document.tolist() for document in train], id_of << 8)
    found = list(ngram_scores(train, scored, id_of << 8, order=order))
    assert [scores.order for scores in found] == list(range(1, order + 1))
    for scores in found:
        expected = written.nats([document.tolist() for document in scored], scores.order)
        for name, nats in expected.items():
            np.testing.assert_allclose(scores.nats[name], nats, rtol=1e-12, err_msg=name)
        assert scores.grams == sum(map(len, written.counts[1 : scores.order + 1]))
    for alone in (3, 7):
        *_, highest = ngram_scores(train, scored, id_of << 8, order=alone)
        for name, nats in found[alone - 1].nats.items():
            np.testing.assert_array_equal(highest.nats[name], nats, "an order needs no higher one")


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_the_probabilities_of_all_bytes_sum_to_one(seen):
    """After contexts of the train text, and after others."""
    train = drawn(2, (200, 30), 20)
    context = train[0][40:48] if seen else np.random.default_rng(3).integers(0, 250, 8)
    for scores in ngram_scores(train, [np.append(context, byte) for byte in range(256)], 256):
        for name, nats in scores.nats.items():
            last = nats.reshape(256, 9)[:, -1]
            assert np.exp(-last).sum() == pytest.approx(1, abs=1e-12), (name, scores.order)
    assert scores.order == 8


def test_an_empty_text_is_refused():
    text, none = np.array([1, 2]), np.zeros(0, np.uint8)
    for train, scored, name in (([none], [text], "to count"), ([text], [], "to score")):
        assert_refused(f"text {name} is empty", next, ngram_scores(train, scored, 256))


def claimed(folder, name, keys="", splits=("train", "valid")):
    """Returns a work directory at the start of a training, without a checkpoint."""
    config = make_config(
        f"length=16,model.num_layers=1,model.width=16,model.num_heads=2,data.corpus=text,"
        f"data.train={folder / 'train.txt'},data.valid={folder / 'valid.txt'},"
        f"data.cache_dir={folder / 'cache'},{keys}"
    )
    run = RunDirectory(folder / name)
    run.check(config)
    run.claim(config, find_tokenizer(config.data, make_corpus(config.data)))
    files = {split: prepare(config.data, split, progress=False) for split in splits}
    corpus = {split: dataclasses.asdict(file.manifest) for split, file in files.items()}
    run.write("provenance.json", {"corpus": corpus, "command": ["train.py"]})
    run.release()
    return str(run)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "train.txt").write_text(TEXT)
    (tmp_path / "valid.txt").write_text("the lazy dog jumps\n")
    return tmp_path


def rows_of(texts, *names, **options):
    options = NGramOptions(output_dir=texts / "out", multiples=(1, 2), report=False, **options)
    assert evaluate_ngrams([str(texts / name) for name in names], options) == []
    return read_rows(texts / "out" / "results.jsonl")


def test_rows_of_runs_with_any_tokenizer_hold_the_same_nll(texts, capsys):
    """The bytes of a text cost the same, whatever the tokens of the run; perplexity is per token of
    the run, and runs of the same texts are counted once.
    """
    claimed(texts, "of-bytes")
    claimed(texts, "rotary", "position=rotary")
    claimed(texts, "of-words", "data.tokenizer=words")
    claimed(texts, "of-bpe", "data.tokenizer=bpe,data.bpe_vocab_size=270")
    rows = rows_of(texts, "of-bytes", "rotary", "of-words", "of-bpe")
    assert capsys.readouterr().out.count("n-grams of 155 bytes") == 3
    by_run = {(row.run, row.length): row for row in rows}
    assert len(rows) == 2 * 2 * 3
    bpe = prepare(RunDirectory(texts / "of-bpe").config().data, "valid").manifest.tokens
    assert 2 < bpe < 19
    for end, tokens in zip(("", "-per-words", "-per-bpe"), (19, 5, bpe), strict=True):
        (order,) = {row.run[6] for row in rows if row.run.endswith(f"witten-bell{end}")}
        for length in (16, 32):
            row = by_run[f"ngram-{order}-witten-bell{end}", length]
            assert (row.results["tokens"], row.results["words"], row.results["bytes"]) == (
                tokens,
                4,
                19,
            )
            assert row.results["nll_nats"] == pytest.approx(
                by_run[f"ngram-{order}-witten-bell", 16].results["nll_nats"]
            )
            assert (row.evaluator, row.options, row.train_length) == ("perplexity", {}, 0)
    assert rows_of(texts, "of-bytes", "rotary", "of-words", "of-bpe") == rows, "found again"


def test_separate_documents_do_not_see_each_other(texts):
    """With data.isolate_documents contexts begin with the document, in bytes as in tokens; the
    newline that a byte run reads after an open document belongs to it.
    """
    (texts / "train.txt").write_text("ab ab\nabab\nab\n")
    (texts / "valid.txt").write_text("ab\nba\nabab")
    keys = "data.tokenizer=bpe,data.bpe_vocab_size=270,data.document_end=line,"
    claimed(texts, "alone", keys + "data.isolate_documents=restart")
    alone, together = (
        Written(documents, 256)
        for documents in ([b"ab ab\n", b"abab\n", b"ab"], [b"ab ab\nabab\nab"])
    )
    rows = rows_of(texts, "alone")
    assert {row.documents for row in rows} == {"restart"}
    row = next(row for row in rows if "witten" in row.run)
    sums = [
        [sum(written.nats(documents, order)["witten-bell"]) for order in range(1, 9)]
        for written, documents in (
            (alone, [b"ab\n", b"ba\n", b"abab"]),
            (together, [b"ab\nba\nabab"]),
        )
    ]
    assert row.results["nll_nats"] == pytest.approx(min(sums[0]), rel=1e-12)
    assert row.run.startswith(f"ngram-{np.argmin(sums[0]) + 1}-witten-bell"), "the best order"
    assert row.results["nll_nats"] != pytest.approx(min(sums[1]), rel=1e-3)


def test_other_train_texts_and_tokens_are_lines_of_their_own(texts):
    """A part of the text, tokens in place of bytes, and a run of another train text."""
    bpe = "data.tokenizer=bpe,data.bpe_vocab_size=270"
    claimed(texts, "run", bpe)
    rows_of(texts, "run")
    part = rows_of(texts, "run", train_bytes=60)
    tokens = rows_of(texts, "run", unit="tokens")
    (texts / "train.txt").write_text("the lazy dog, a fox\n" * 3)
    claimed(texts, "other", bpe)
    rows = rows_of(texts, "other")
    assert {row.position for row in rows if "witten" in row.position} == {
        "ngram-witten-bell-per-bpe",
        "ngram-witten-bell-per-bpe-train_bytes=60",
        "token-ngram-witten-bell",
        next(row.position for row in rows if "#" in row.position and "witten" in row.position),
    }
    assert [len(part), len(tokens), len(rows)] == [8, 12, 16]
    (panel,) = panels(rows)
    assert len(panel.series) == 8


def test_tables_show_n_grams_beside_runs():
    """They have no training length, seed or step, and runs keep their short names."""
    runs = [
        make_row(position, length, 9.0, run=f"{position}-L128-lr=0.1")
        for position in ("alibi", "rotary")
        for length in (128, 256)
    ]
    ngrams = [
        make_row(
            "ngram-witten-bell", length, 4.0, run="ngram-6-witten-bell", train_length=0, step=0
        )
        for length in (128, 256)
    ]
    (panel,) = panels([*ngrams, *runs])
    table = build_table(panel)
    assert table.labels == (("ngram-6-witten-bell", ""), ("alibi", 128), ("rotary", 128))
    assert [cell[0].ratio for cell in table.cells[0]] == [None, None]
    assert "seed 0; step 600; commit" in caption(panel)
    assert '<th scope="col" data-type="number"><button type="button">trained at L' in to_html(table)


def test_a_cache_mixes_in_the_tokens_before_by_weights_of_another_text(texts):
    (texts / "tune.txt").write_text("the dog, the dog, the dog and the fox\n" * 3)
    run = claimed(texts, "cached")
    known = {"output_dir": texts / "out", "lengths": (16,), "report": False, "unit": "tokens"}
    widths = {"cache": (4, 64), "tune": str(texts / "tune.txt")}
    assert evaluate_ngrams([run], NGramOptions(**known, **widths)) == []
    plain, *cached = [row for row in find_rows(texts / "out") if "kneser" in row.run]
    assert [row.run.partition("-cache=")[2] for row in cached] == ["4", "64"]
    data, order = RunDirectory(run).config().data, int(plain.run.split("-")[2])
    train, scored = ([np.asarray(prepare(data, split).tokens)] for split in ("train", "valid"))
    tune = [np.frombuffer((texts / "tune.txt").read_bytes(), np.uint8)]
    for width, row in zip((4, 64), cached, strict=True):
        mixed = []
        for documents in (tune, scored):
            scores = [one for one in ngram_scores(train, documents, 256) if one.order == order]
            own = np.exp(-scores[0].nats["kneser-ney"])
            mixed.append(np.stack([own, *cache_probabilities(documents, width, own)]))
        weights = fitted_weights(mixed[0])
        assert row.results["weights"] == pytest.approx(weights)
        assert row.results["nll_nats"] == pytest.approx(-np.log(weights @ mixed[1]).sum())
    (failure,) = evaluate_ngrams(
        [run], NGramOptions(**known, cache=(4,), tune=str(texts / "valid.txt"))
    )
    assert "is the scored text" in failure
    assert_refused("give both", NGramOptions, **known, cache=(4,))


def test_a_count_pairs_with_a_run_on_the_same_tokens(texts):
    """Dumps, context use and margins, each beside a sum over the tokens by hand."""
    (texts / "text.txt").write_text(TEXT)
    (texts / "tune.txt").write_text("the dog, the dog, the dog and the fox\n" * 3)
    run, out = make_run(texts, "alibi", "a-run"), texts / "out"
    RunDirectory(run).write("provenance.json", {"corpus": {}})
    common = {"lengths": (16, 64), "report": False, "dump_nll": True}
    assert evaluate_runs([run], options_of(out, context_windows=5, **common)) == []
    counts = NGramOptions(
        out, order=3, cache=(64, 16), tune=str(texts / "tune.txt"), context_windows=5, **common
    )
    assert evaluate_ngrams([run], counts) == []

    rows = {(row.run, row.evaluator, row.length): row for row in read_rows(out / "results.jsonl")}
    dumps = {(dump.row.run, dump.length): dump for dump in find_dumps([f"{out}/nll/*"])}
    (count,) = {name for name, _ in dumps if name.endswith("-kneser-ney")}
    models = {length: dumps[f"{count}-cache={length}", 64] for length in (16, 64)}
    own, plain = dumps["a-run", 64], dumps[count, 64]
    np.testing.assert_array_equal(own.targets, plain.targets)
    assert bytes(plain.targets.tolist()) == TEXT.encode()

    lines = analyse([dump for dump in dumps.values() if dump.row.run == count])
    (curse,) = [line for line in lines if "gain_nats" in line]
    assert curse["gain_nats"] == 0, "an n-gram has its full context in windows of each length"

    use = {row.run: row for row in rows.values() if row.evaluator == "context_use"}
    assert use[f"{count}-cache"].cell == use["a-run"].cell == {"lengths": (16, 64)}
    (panel,) = panels([*use.values()], CONTEXT_GAIN)
    assert [one.label for one in panel.series] == ["a-run", f"{count}-cache"]
    # the last token of windows of 16 and 64 at the same ends
    ends = [63 + number * ((155 - 64) // 4) for number in range(5)]
    assert use[f"{count}-cache"].results["gain_nats"] == pytest.approx(
        (0, np.mean([models[16].nll[end] - models[64].nll[end] for end in ends])), rel=1e-5
    )

    beside = [row for row in rows.values() if row.run in ("a-run", count) and row.length == 64]
    table = comparison(panels(beside)[0], Reference(count, 0.1))
    assert table is not None
    ((number, verdict),) = table.cells[0]
    assert number.values[0] == pytest.approx((own.nll - plain.nll).mean(), rel=1e-5)
    assert number.interval.covers == (TEXT_COVERED,), "paired by the parts of the text"
    assert verdict.text == "higher", "an untrained model"


def test_dumps_are_of_the_runs_tokens(texts, capsys):
    run = claimed(texts, "of-bpe", "data.tokenizer=bpe,data.bpe_vocab_size=270")
    known = {"output_dir": texts / "out", "lengths": (2,), "report": False, "dump_nll": True}
    (failure,) = evaluate_ngrams([run], NGramOptions(**known))
    assert "--dump_nll with --unit=bytes: a dump has the NLL of each token" in failure
    assert evaluate_ngrams([run], NGramOptions(**known, unit="tokens")) == []
    tokens = np.asarray(prepare(RunDirectory(run).config().data, "valid").tokens)
    for dump in find_dumps([f"{texts}/out/nll/token-ngram-*"]):
        np.testing.assert_array_equal(dump.targets, tokens)
    keys = "data.tokenizer=bpe,data.bpe_vocab_size=270,data.document_end=line"
    isolated = claimed(texts, "alone", f"{keys},data.isolate_documents=restart")
    (failure,) = evaluate_ngrams([isolated], NGramOptions(**known))
    assert "documents are isolated, and --dump_nll is for models" in failure


def test_masked_tokens_are_scored_by_their_frequency(texts):
    """Neighbours on both sides may be masked, too, so a count of the bytes before says nothing."""
    run = claimed(texts, "masked", "objective.name=masked,objective.mask_rate=0.5")
    evaluate_ngrams([run], NGramOptions(output_dir=texts / "out", lengths=(16,), report=False))
    (row,) = [row for row in find_rows(texts / "out") if "witten-bell" in row.run]
    data = RunDirectory(run).config().data
    train, valid = (np.asarray(prepare(data, split).tokens) for split in ("train", "valid"))
    whole = Sequences(np.append(-1, valid)[None].astype(np.int32), np.zeros(1, int))
    masked = valid[Masked(256, 10, 0.5, 0.1, 0.1, -1).batch(whole).targets[0] >= 0]
    counts, kinds = np.bincount(train, minlength=256), np.unique(train).size
    nats = -np.log((counts + kinds / 256) / (train.size + kinds))[masked].sum()
    assert row.results["nll_nats"] == pytest.approx(nats, rel=1e-12)
    assert (row.run, row.results["tokens"]) == ("ngram-1-witten-bell", masked.size)
    assert row.objective == {
        "name": "masked",
        "mask_rate": 0.5,
        "mask_random": 0.1,
        "mask_kept": 0.1,
    }, "as rows of masked models"
    assert "bytes" not in row.results


def test_answers_are_those_that_the_windows_of_each_length_show(texts):
    """A token after the "z" is an answer if the "z" lies in its window."""
    keys = "objective.name=after_separator,objective.options.separator=z"
    run = claimed(texts, "answers", keys)
    options = NGramOptions(output_dir=texts / "out", lengths=(8, 16, 19), report=False)
    assert evaluate_ngrams([run], options) == []
    rows = [row for row in find_rows(texts / "out") if "witten-bell" in row.run]
    answers = {row.length: row.results["tokens"] for row in rows}
    assert answers == {8: 1, 16: 9, 19: 12}, "of y, of y dog jum, of y dog jumps and the end"


def test_bad_input_is_a_line_before_the_work(texts, capsys):
    def told(name, **options):
        options = NGramOptions(output_dir=texts / "out", report=False, **options)
        (failure,) = evaluate_ngrams([str(texts / name)], options)
        return failure

    run = claimed(texts, "run")
    assert (
        "the config names no test text: data.test is empty; give --text_file=FILE or another --split"
        in told("run", split="test")
    )
    before = json.loads((texts / "run" / "provenance.json").read_text())["corpus"]["train"]
    (texts / "train.txt").write_text("another text\n")
    now = prepare(RunDirectory(run).config().data, "train").manifest
    assert (
        f"the train text of {run} has changed since the run began: the SHA-256 of its tokens was {before['sha256']} "
        f"(text: {texts}/train.txt) and is {now.sha256} (text: {texts}/train.txt); restore the text"
    ) in told("run")
    assert "n-grams of" not in capsys.readouterr().out


def test_the_command_prints_all_orders_and_writes_the_report(texts, run_script):
    run = claimed(texts, "run")
    words = ["--workdirs", run, "--lengths=8,16", "--train_bytes=60", "--output_dir", texts / "out"]
    words.append("--order=10")
    shown = run_script(ROOT / "scripts" / "ngram.py", *words).stdout.splitlines()
    assert shown[0].startswith(
        "run: n-grams of 60 bytes of the train text; valid.txt, valid: 19 tokens"
    )
    assert [line.split()[:2] for line in shown[2:12]] == [
        [str(n), str(n - 1)] for n in range(1, 11)
    ]
    assert "-kneser-ney-train_bytes=60 |" in (texts / "out" / "report.md").read_text()
