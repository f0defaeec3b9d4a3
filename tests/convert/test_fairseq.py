"""A checkpoint of the paper's own code as a work directory: its settings, its tensors, its numbers."""

import functools
import hashlib
import importlib.util
import math
import os
import pathlib
import shutil
import sys

import jax
import numpy as np
import optax
import pytest

from alibi.config import Config, read_config, replaced
from alibi.convert.families.fairseq import FAMILY, read_checkpoint
from alibi.convert.importing import describe, import_fairseq, read_params
from alibi.convert.tensors import Model
from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import WordTokenizer
from alibi.data.tokens import prepare_text
from alibi.evaluation.dumps import find_dumps
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import Scorer, model_nll, run_objective
from alibi.extras import MissingPackageError
from alibi.model.decoder import build_model, param_shapes
from alibi.optimizers import make_optimizer, make_schedule
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory, config_hash
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.trained import TrainedRun
from alibi.training.setup import check_config, prepare_files, sequences_per_update
from alibi.training.step import abstract_state
from configs import wikitext103
from tests.convert.papers import SETTINGS, as_model
from tests.evaluation.runs import options_of
from tests.hosts import ROOT
from tests.programs import OPTIMIZED
from tests.refusals import assert_refused

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is an extra of the project: --extra=torch",
)

DATA = ROOT / "tests" / "data"
CHECKPOINT, DICTIONARY, TEXT = (DATA / f"fairseq-tiny{end}" for end in (".pt", "-dict.txt", ".txt"))
BIAS = "decoder.layers.1.fc2.bias"
TAIL = "decoder.adaptive_softmax.tail.0.0.weight"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    with np.load(DATA / "trajectory.npz") as file:
        return {
            name.removeprefix("init/"): file[name]
            for name in file.files
            if name.startswith("init/")
        }


# Files.


def save(content: object, path: pathlib.Path) -> None:
    import torch  # here, as it takes a second

    torch.save(content, path)


class RunsCode:
    """Unpickling it calls os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    save({"model": {}, "extra_state": [RunsCode(f"touch {tmp_path}/made")]}, tmp_path / "x.pt")
    assert_refused(r"x\.pt.*posix\.system", read_checkpoint, tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()
    # here it does run: the pickle is one that works
    import torch

    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"is missing, .* \(.*No such file"),
        ({"modal": {}}, "holds no model and settings of fairseq"),
        ([1], "holds no model and settings of fairseq"),
        ({"model": {}, "args": SETTINGS}, "holds no model and settings of fairseq"),
    ],
)
def test_each_unreadable_file_is_one_line(tmp_path, content, message):
    if content is not None:
        save(content, tmp_path / "x.pt")
    assert_refused(message, read_checkpoint, tmp_path / "x.pt")


def test_without_pytorch_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert_refused("package torch", read_checkpoint, CHECKPOINT, raised=MissingPackageError)


# Settings.


def described(model: Model) -> Config:
    return describe(model, config_of(DATA), family=FAMILY)[1]


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ({"relu_dropout": 0.1}, 0.1),
        ({"activation_dropout": 0.2, "relu_dropout": 0.0}, 0.2),
        ({}, 0.0),
    ],
)
def test_the_arguments_of_older_versions(tensors, arguments, rate):
    arguments = arguments | {"decoder_attention_heads": 8}
    config = described(as_model(tensors, max_tokens=512, **arguments))
    model = config.model
    rates = (model.dropout, model.attention_dropout, model.activation_dropout)
    assert (*rates, model.softmax_dropout) == (0.3, 0.1, rate, 0.2)
    assert (model.num_heads, config.train_length, config.seed) == (8, 16, 7)
    assert (config.position, model.activation) == ("sinusoidal", "relu")
    none = as_model(tensors, no_token_positional_embeddings=True, **arguments)
    assert described(none).position == "none"


@pytest.mark.parametrize(
    ("theirs", "ours"), [("gelu", "gelu_exact"), ("gelu_fast", "gelu"), ("swish", "silu")]
)
def test_activations_have_other_names(tensors, theirs, ours):
    model = as_model(tensors, activation_fn=theirs, decoder_attention_heads=8)
    assert described(model).model.activation == ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "transformer_wmt_en_de"}, "architecture transformer_wmt_en_de; only"),
        ({"base_layers": 2}, r"base_layers=2, which is not implemented here \(only 0\)"),
        ({"activation_fn": "linear"}, "activation_fn='linear', .* 'relu', 'gelu', 'gelu_fast'"),
        ({"dropout": None}, "cfg has no dropout"),
        ({"decoder_attention_heads": 6}, r"num_heads=6 .*32"),
    ],
)
def test_other_settings_are_named(tensors, arguments, message):
    assert_refused(
        rf"^x\.pt: .*{message}",
        lambda: described(as_model(tensors, **{"decoder_attention_heads": 8} | arguments)),
    )


# Parameters.


def tied(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the same layers with a single matrix for all words and a norm at the end."""
    adaptive = ("decoder.embed_tokens", "decoder.adaptive_softmax")
    embedding = tensors["decoder.embed_tokens.embeddings.0.0.weight"]
    return {
        **{name: tensor for name, tensor in tensors.items() if not name.startswith(adaptive)},
        **dict.fromkeys(
            ("decoder.embed_tokens.weight", "decoder.output_projection.weight"), embedding
        ),
        **dict.fromkeys(
            ("decoder.layer_norm.weight", "decoder.layer_norm.bias"), np.ones(32, np.float32)
        ),
    }


@pytest.mark.parametrize("kind", ["adaptive", "tied"])
def test_each_tensor_has_its_place(tensors, kind: str) -> None:
    tensors = tensors if kind == "adaptive" else tied(tensors)
    theirs = as_model(tensors, decoder_attention_heads=8)
    config, vocab_size = described(theirs), theirs.config["vocab_size"]
    assert config.model.embedding == kind
    assert (vocab_size, config.model.final_norm) == {
        "adaptive": (1000, False),
        "tied": (200, True),
    }[kind]
    assert theirs.config["cutoffs"] == ((200, 500) if kind == "adaptive" else ())
    needed = param_shapes(build_model(config, vocab_size))
    found = read_params(theirs, FAMILY, config, vocab_size)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), needed
    )
    taken = sum(leaf.size for leaf in jax.tree.leaves(found))
    no_parameters = ("version", "_float_tensor")
    copies = ("head.word_proj", "adaptive_softmax.tail", "output_projection")
    assert taken == sum(
        x.size
        for name, x in tensors.items()
        if not name.endswith(no_parameters) and not any(copy in name for copy in copies)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({BIAS: None}, rf"lacks 1 tensor \({BIAS}\)"),
        ({BIAS: np.zeros(31, np.float32)}, rf"{BIAS} has shape \[31\].* \[32\]"),
        ({BIAS: np.full(32, np.nan, np.float32)}, "layers_1/down/bias has NaN or infinite"),
        ({"decoder.more": np.zeros(32)}, r"no place for 1 tensor \(decoder\.more\)"),
        ({TAIL: np.zeros((32, 8))}, "tail.0.0.weight differs from .*only models with tied"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tensors, change: dict[str, np.ndarray | None], message: str
) -> None:
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    theirs = as_model(changed, decoder_attention_heads=8)
    assert_refused(
        message, lambda: read_params(theirs, FAMILY, described(theirs), theirs.config["vocab_size"])
    )


# Work directories.


def config_of(folder):
    text = f"data.corpus=text,data.train={TEXT},data.valid=,data.test=,data.cache_dir={folder / 'cache'}"
    keys = "train.steps=151,train.batch_tokens=128,optimizer.warmup_steps=100,log.tensorboard=false"
    return read_config(wikitext103.get_config(f"{text},{keys},eval.batch_tokens=512"))


def resaved(path, change):
    """Writes the tiny checkpoint with its settings as older versions have them, and then changed."""
    import torch

    tensors = read_checkpoint(CHECKPOINT).tensors
    tensors = {name: torch.from_numpy(x.read()) for name, x in tensors.items()}
    history = [{"num_updates": 150}]
    content = {"args": dict(SETTINGS), "model": tensors, "optimizer_history": history}
    change(content)
    save(content, path)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported")
    return import_fairseq(CHECKPOINT, DICTIONARY, folder / "run", config_of(folder))


@pytest.fixture(scope="module")
def expected():
    return dict(np.load(DATA / "fairseq-tiny.npz"))


def test_the_config_is_the_checkpoints(imported):
    """6 heads, halved bands, the rates and the seed come from the checkpoint, not from the given
    config.
    """
    config = imported.config()
    model = config.model
    assert (model.num_layers, model.width, model.num_heads, model.feed_forward) == (2, 24, 6, 40)
    assert (model.embedding, list(model.cutoffs), model.adaptive_factor) == (
        "adaptive",
        [40, 72],
        2,
    )
    assert (model.final_norm, model.norm_epsilon, model.activation) == (False, 1e-5, "relu")
    rates = (
        model.dropout,
        model.attention_dropout,
        model.activation_dropout,
        model.softmax_dropout,
    )
    assert rates == (0.3, 0.1, 0.1, 0.2)
    assert (config.position, config.train_length, config.seed) == ("alibi", 16, 7)
    assert imported.status()["state"] == "interrupted"
    assert imported.provenance()["vocab_size"] == 96
    assert TrainedRun(imported.path).step == 150


def score(run, tokens, length, stride, **compiler_options):
    """Returns the NLL of each token on a single device, which compiles faster than eight."""
    nll = model_nll(build_model(run.config, run.tokenizer.vocab_size))
    how = {"objective": run_objective(run), "batch_tokens": run.config.eval.batch_tokens}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=compiler_options))
        scorer = Scorer(nll, **how)
    return scorer.score(jax.device_get(run.params), tokens, length, stride).values


def test_each_tokens_nll_is_that_of_the_formulas(imported, expected):
    """In windows of stride 1; the others are the paper's code's own, below."""
    run = TrainedRun(imported.path)
    text = prepare_text(
        TextFiles({"file": str(TEXT)}), run.tokenizer, run.config.data.cache_dir, progress=False
    )
    np.testing.assert_array_equal(text.tokens, expected["targets"])
    found = score(run, text.tokens, 16, 1)
    np.testing.assert_allclose(found, expected["nll/length=16,stride=1"], atol=2e-5)


def test_words_outside_the_dictionary_are_counted(imported, expected, tmp_path, capsys):
    options = options_of(tmp_path, lengths=(16,), text_file=str(TEXT), dump_nll=True, report=False)
    assert evaluate_runs([imported.path], options) == []
    words = TEXT.read_text().split()
    lacking, literal = words.count("unheard"), words.count("<unk>")
    unknown = lacking + literal
    assert unknown == (expected["targets"] == 3).sum() > 0
    told = f"{lacking} words outside the run's dictionary, {literal} <unk> in the text itself"
    assert (
        f"{unknown} of {expected['targets'].size} tokens are <unk>: {told}"
        in capsys.readouterr().err
    )
    (dump,) = find_dumps([f"{tmp_path}/nll/run-length=16-stride=16-*.npz"])
    np.testing.assert_allclose(dump.nll_nats, expected["nll/length=16,stride=16"], atol=2e-5)


def test_training_takes_it_for_its_own(imported):
    """With the config file in it: the state after 150 updates, at the learning rate of the 151st."""
    config = config_in(imported.path)
    assert imported.differing(config) == {}
    check_config(config, make_mesh(config.mesh))
    # its dictionary, not one made of the text
    assert prepare_files(config.data)["train"].manifest.vocab_size == 96
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    abstract = abstract_state(
        build_model(config, 96), optimizer, make_mesh(config.mesh, jax.devices()[:1])
    )
    with Checkpoints(imported.checkpoints, read_only=True) as checkpoints:
        state = checkpoints.restore(checkpoints.latest, abstract)
    assert int(state.step) == int(optax.tree_utils.tree_get(state.opt_state, "count")) == 150
    trace = optax.tree_utils.tree_get(state.opt_state, "trace")
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(trace))
    # Nesterov's first step goes 1 + momentum times as far as the rate; the gradient is clipped to
    # its norm.
    gradient = jax.tree.map(np.ones_like, jax.device_get(state.params))
    change, _ = jax.jit(optimizer.update)(gradient, state.opt_state, state.params)
    rate = float(make_schedule(config.optimizer, config.train.steps)(150))
    length = rate * (1 + config.optimizer.momentum) * config.optimizer.clip_norm
    squares = jax.tree.map(lambda leaf: np.square(np.asarray(leaf, np.float64)).sum(), change)
    assert math.sqrt(sum(jax.tree.leaves(squares))) == pytest.approx(length, rel=1e-4)
    assert length > 1e-4  # at update 0 it would be 1e-7 times as much


def config_in(workdir):
    """Returns the config of the file in a work directory, as train.py reads it."""
    namespace = {"__file__": str(workdir / "config.py")}
    exec((workdir / "config.py").read_text(), namespace)
    return read_config(namespace["get_config"]())


def test_a_work_directory_that_was_moved_is_the_same_run(imported, tmp_path):
    moved = RunDirectory(shutil.copytree(imported.path, tmp_path / "moved"))
    config = config_in(moved.path)
    assert config.data.tokenizer_file == str(moved.path / "tokenizer" / "dict.txt")
    assert moved.differing(config) == {}
    assert config_hash(config) == config_hash(imported.config())
    tokenizer = moved.tokenizer()
    moved.claim(config, tokenizer)
    moved.release()
    assert_refused(
        "tokenizer of the run",
        lambda: moved.claim(config, WordTokenizer(dict(reversed(tokenizer.counts.items())))),
    )


def test_the_config_tells_runs_of_two_checkpoints_apart(imported):
    """Provenance is written anew by training; the config stays, and rows of results are known by
    its hash.
    """
    config = imported.config()
    assert config.imported_from == hashlib.sha256(CHECKPOINT.read_bytes()).hexdigest()
    other = replaced(config, {"imported_from": "0" * 64})
    assert config_hash(other) != config_hash(config)
    assert imported.differing(other) == {"imported_from": (config.imported_from, "0" * 64)}


def test_another_dictionary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # no shell expands the ~ in --dictionary=~/dict.txt
    (tmp_path / "dict.txt").write_text(
        "".join(DICTIONARY.read_text().splitlines(keepends=True)[:-8])
    )
    assert_refused(
        r"88 .* 96; give the dict\.txt",
        lambda: import_fairseq(CHECKPOINT, "~/dict.txt", tmp_path / "run", config_of(tmp_path)),
    )
    assert not (tmp_path / "run").exists()


def test_a_position_method_that_fairseq_lacks_is_refused(tmp_path):
    """Rotary has no parameters, so nothing else would tell that the model is another one."""
    assert_refused(
        "position='rotary'.* use one of alibi",
        lambda: import_fairseq(
            CHECKPOINT, DICTIONARY, tmp_path / "run", config_of(tmp_path), position="rotary"
        ),
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("length", "max_device_tokens", "tokens"),
    [
        (2048, 9_216, 65_536),  # 8 x 8,192: of each part of 9,216 four sequences
        (2048, 0, 73_728),  # one part: 36 sequences
        (10_000, 9_216, 80_000),  # a sequence at least
    ],
)
def test_the_batch_is_cut_as_the_papers_code_cuts_it(tmp_path, length, max_device_tokens, tokens):
    """And at the paper's lengths as configs/wikitext103.py has it, and 8 devices go on with the
    training.
    """
    resaved(tmp_path / "x.pt", lambda content: content["args"].update(tokens_per_sample=length))
    keys = {"train.batch_tokens": 73_728, "train.max_device_tokens": max_device_tokens}
    config = replaced(config_of(tmp_path), keys)
    config = import_fairseq(tmp_path / "x.pt", DICTIONARY, tmp_path / "run", config).config()
    assert config.train.batch_tokens == tokens
    if max_device_tokens == 9_216:
        assert wikitext103.get_config(f"length={length}").train.batch_tokens == tokens
        assert sequences_per_update(config, 8) * length == tokens


def test_the_position_method_can_be_named(tmp_path, expected):
    """--position decides; of older versions, without max_tokens, it is sinusoidal by itself, above."""
    named = import_fairseq(
        CHECKPOINT, DICTIONARY, tmp_path / "named", config_of(tmp_path), position="sinusoidal"
    )
    assert named.config().position == "sinusoidal"
    found = score(TrainedRun(named.path), expected["targets"][:64], 16, 16)
    assert np.abs(found - expected["nll/length=16,stride=16"][:64]).max() > 0.1


def test_the_command_says_one_line(run_script, tmp_path):
    (tmp_path / "x.pt").write_text("no checkpoint")
    words = (
        f"--checkpoint={tmp_path}/x.pt",
        f"--dictionary={DICTIONARY}",
        f"--workdir={tmp_path}/run",
    )
    done = run_script(ROOT / "scripts/import_fairseq.py", *words, code=1)
    assert done.stderr.startswith(f"error: {tmp_path}/x.pt is no file of tensors alone")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def in_stream_order(recorded, ours, length):
    """Returns `recorded` with its windows in the stream's order, found by their first values.

    The paper's code takes non-overlapping windows sorted by size, and records them in
    this order. Each of our windows must be found in it, and all of it must be found.
    """
    starts, found = range(0, ours.size, length), np.empty_like(recorded)
    taken = np.zeros(recorded.size, bool)
    for start in starts:
        window = ours[start : start + length]
        for place in np.flatnonzero(np.abs(recorded - window[0]) < 2e-4):
            part = slice(place, place + window.size)
            if recorded[part].size == window.size and np.abs(recorded[part] - window).max() < 2e-4:
                found[start : start + length] = recorded[part]
                taken[part] = True
                break
        else:
            pytest.fail(
                f"the window of tokens {start} to {start + window.size} is not in the record"
            )
    assert taken.all()
    return found


def test_what_the_papers_code_computes(shared_dir, tmp_path):
    """Each of 13,175 tokens within 2e-4 nats, the mean within 1e-5, the perplexities to 0.01."""
    oracle = shared_dir / "oracle"
    config = config_of(tmp_path)
    config = replaced(config, {"eval.batch_tokens": 8192})
    made = import_fairseq(oracle / "checkpoint.pt", oracle / "dict.txt", tmp_path / "run", config)
    run, recorded = TrainedRun(made.path), np.load(oracle / "expected.npz")
    corpus = TextFiles({"file": str(oracle / "valid.txt")})
    text = prepare_text(corpus, run.tokenizer, tmp_path / "cache", progress=False)
    np.testing.assert_array_equal(text.tokens, recorded["targets"])
    for length, stride, perplexity in ((512, 512, 524.470), (128, 64, 524.466)):
        nll = recorded[f"nll/length={length},stride={stride}"]
        ours = score(run, text.tokens, length, stride, **OPTIMIZED)
        nll = in_stream_order(nll, ours, length) if length == stride else nll
        np.testing.assert_allclose(ours, nll, atol=2e-4)
        assert ours.mean(dtype=np.float64) == pytest.approx(nll.mean(dtype=np.float64), abs=1e-5)
        assert np.exp(ours.mean(dtype=np.float64)) == pytest.approx(perplexity, abs=0.01)
