"""An imported model is a run like any other."""

import datetime
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from alibi.config import Config, MeshConfig, load_config
from alibi.convert.importing import import_model
from alibi.data.tokenizers import given_tokenizer
from alibi.evaluation.harness import PairScorer
from alibi.evaluation.scorer import Scorer, model_nll, run_objective
from alibi.generation import GREEDY
from alibi.generation.decoding import decode_answer
from alibi.generation.texts import Prompt, Writer
from alibi.model.decoder import build_model
from alibi.parallel import hosts
from alibi.parallel.sharding import batch_sharding
from alibi.runs import RunDirectory
from alibi.runs.trained import TrainedRun
from alibi.sweeps.watch import standings
from alibi.training.loop import train
from alibi.training.parent import Parent
from tests.convert.imported import of_description, save_tokenizer
from tests.hosts import ROOT, finish, start_hosts
from tests.refusals import assert_refused

FullPass = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A work directory of a random MPT; not to be changed."""
    folder = tmp_path_factory.mktemp("mpt [1]*:")
    hub = folder / "hub"
    hub.mkdir()
    of_description("mpt")(hub)
    save_tokenizer(hub)
    import_model(str(hub), folder / "run", Config())
    import_model(str(hub), folder / "narrow", Config(), dtype="bfloat16")
    return folder / "run"


@pytest.fixture(scope="module")
def full_pass(imported: pathlib.Path) -> FullPass:
    """A function of `[batch, length]` tokens to the logits in one pass over all of them."""
    run = TrainedRun(imported)
    apply = jax.jit(run.model.apply)
    return lambda tokens: np.asarray(apply({"params": run.params}, jnp.asarray(tokens)))


def score(run: TrainedRun, tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns the NLL of each token, by evaluation."""
    scorer = Scorer(
        model_nll(run.model),
        objective=run_objective(run),
        batch_tokens=256,
        sharding=batch_sharding(run.mesh),
    )
    return scorer.score(run.params, tokens, length).values


def test_each_tokens_nll_is_that_of_a_full_pass(
    imported: pathlib.Path, full_pass: FullPass
) -> None:
    """In windows of eight training lengths. All 320 rows of the embedding take part in the softmax,
    as in the model's own code, and not only the tokenizer's 300.
    """
    run, length = TrainedRun(imported), 8 * 16
    assert (run.config.train_length, run.tokenizer.vocab_size) == (16, 300)
    tokens = np.random.default_rng(0).integers(0, 300, 2 * length)
    inputs = np.r_[run.tokenizer.boundary_id, tokens[:-1]].reshape(2, length)
    logits = full_pass(inputs).astype(np.float64)
    assert logits.shape == (2, length, 320)
    sums = np.log(np.exp(logits).sum(-1)).ravel()
    expected = sums - logits.reshape(-1, 320)[np.arange(tokens.size), tokens]
    np.testing.assert_allclose(score(run, tokens, length), expected, atol=2e-5)
    assert np.ptp(expected) > 1  # the tokens are not alike, so places can't be confused


def test_parameters_of_bfloat16_are_evaluated(imported: pathlib.Path) -> None:
    """Each is rounded by up to 2^-9 of itself, in either direction. Measured: the NLL, of standard
    deviation 2.07 nats over the tokens, moves by 0.024 in the root mean square, and its mean by
    0.002.
    """
    tokens = np.random.default_rng(1).integers(0, 300, 256)
    runs = TrainedRun(imported), TrainedRun(imported.parent / "narrow")
    for run, dtype in zip(runs, ("float32", "bfloat16"), strict=True):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(run.params)} == {dtype}
        assert run.config.model.param_dtype == dtype
    wide, narrow = (score(run, tokens, 32) for run in runs)
    assert 0 < np.sqrt(np.square(wide - narrow).mean()) < 0.05
    assert narrow.mean() == pytest.approx(wide.mean(), abs=0.01)


def test_eos_token_id_ends_answers_and_documents(
    imported: pathlib.Path, tmp_path: pathlib.Path, full_pass: FullPass, run_script
) -> None:
    """Its ids in generation_config.json come before the one in config.json, as in transformers; they
    stay in a training from the run and in an export.
    """
    run, prompt = TrainedRun(imported), Prompt([5, 250, 17], 0, {})
    (unended,) = Writer(run, GREEDY, 16).write([prompt])
    greedy = list(unended.tokens)
    assert run.tokenizer.ends == (0,)
    end, further = greedy[5], 7
    hub = shutil.copytree(imported.parent / "hub", tmp_path / "hub")
    ends = json.dumps({"eos_token_id": [end, further, 10**30, -1]})
    (hub / "generation_config.json").write_text(ends)
    content = json.loads((hub / "config.json").read_text()) | {"eos_token_id": 0}
    (hub / "config.json").write_text(json.dumps(content))
    import_model(str(hub), tmp_path / "run", Config())
    ended = TrainedRun(tmp_path / "run")
    config = load_config(f"{tmp_path}/run/config.py")
    for tokenizer in (ended.tokenizer, given_tokenizer(config.data)):
        assert (tokenizer.boundary_id, tokenizer.ends) == (end, (end, further))
        assert tokenizer.encode_beginning("") == [end]
        assert tokenizer.encode("a").tolist() == [*run.tokenizer.encode("a")[:-1], end]
    Parent(config, build_model(config, 300)).check_vocabulary(ended.tokenizer.fingerprint())
    (answer,) = Writer(ended, GREEDY, 16).write([prompt])
    assert (answer.tokens, answer.end) == (greedy[: greedy.index(end) + 1], "document")
    assert answer.text == decode_answer(run.tokenizer, prompt.ids, answer.tokens[:-1])
    (score,) = PairScorer(ended, 16).score([([], [further])])
    first = jax.nn.log_softmax(full_pass(np.array([[end]]))[0, 0])
    assert score[0] == pytest.approx(float(first[further]), abs=1e-5)
    flags = f"--workdir={tmp_path}/run", f"--output_dir={tmp_path}/out"
    printed, out = run_script(ROOT / "scripts" / "export_hf.py", *flags).stdout, tmp_path / "out"
    size = (out / "model.safetensors").stat().st_size / 1e6
    last = f"{out}: {content['architectures'][0]}, {size:,.1f} MB of tensors"
    assert printed.splitlines()[-1] == last
    assert (out / "generation_config.json").read_text() == ends
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0


def test_a_run_starts_from_it_at_another_length_and_with_flatter_slopes(
    imported: pathlib.Path,
) -> None:
    """MPT's way to longer contexts; all parameters are taken, here of bfloat16."""
    workdir = imported.parent / "narrow"
    config = load_config(f"{workdir}/config.py:length=64,position_options.alibi_bias_max=16")
    assert (config.init_from, config.imported_from) == (str(workdir), "")
    assert (config.train_length, config.model.param_dtype) == (64, "float32")
    assert (config.train.batch_tokens, config.optimizer.learning_rate) == (2048, 2e-5)
    parent = Parent(config, build_model(config, 300))
    about = parent.about()
    assert about["new"] == about["dropped"] == []
    assert about["taken"] == TrainedRun(workdir).num_parameters
    assert "alibi_bias_max=16" in parent.describe()
    longer = load_config(f"{imported}/config.py:length=3000,optimizer.learning_rate=0.001")
    assert (longer.train.batch_tokens, longer.optimizer.learning_rate) == (3000, 0.001)


def test_another_method_takes_its_place(imported: pathlib.Path) -> None:
    """Its options are not those of the method before, which keeps its own when it is named."""
    assert TrainedRun(imported).config.position_options == {"alibi_bias_max": 8}
    config = load_config(f"{imported}/config.py:position=alibi")
    assert config.position_options == {"alibi_bias_max": 8}
    config = load_config(f"{imported}/config.py:position=t5")
    about = Parent(config, build_model(config, 300)).about()
    assert (config.position_options, about["new"]) == ({}, ["position/table"])
    assert about["dropped"] == []
    assert about["taken"] == TrainedRun(imported).num_parameters  # ALiBi has no parameters


def test_hosts_with_different_folders_import_nothing(
    imported: pathlib.Path, tmp_path: pathlib.Path, monkeypatch
) -> None:
    monkeypatch.setattr(hosts, "gather", lambda facts: [facts, facts | {"imported_from": "other"}])
    assert_refused(
        r":\n  imported_from: .* on process 0, .*other",
        import_model,
        str(imported.parent / "hub"),
        tmp_path / "run",
        Config(),
        listed=True,
    )
    assert not (tmp_path / "run").exists()


def test_it_is_not_trained_itself(imported: pathlib.Path) -> None:
    state = RunDirectory(imported).status()
    assert (state["state"], state["reason"], state["step"]) == ("finished", "imported", 0)
    longer = load_config(f"{imported}/config.py:length=64")
    assert_refused(
        f"another --workdir by --init_from={re.escape(str(imported))}$",
        train,
        longer,
        str(imported),
    )
    (shown,) = standings(RunDirectory(imported).path, datetime.datetime.now(datetime.UTC))
    assert (shown.state, shown.steps, shown.is_over) == ("imported", 0, True)


def test_a_model_larger_than_the_memory_is_refused_with_its_size(
    imported: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Free)
    assert_refused(r"\d\.\d GB .* 0\.0 GB free", lambda: TrainedRun(imported).params)


def test_two_hosts_import_the_parts_of_their_devices(
    imported: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Two processes with two devices each, over which every large parameter is split, write the
    checkpoint that a single device writes.
    """
    words = [sys.executable, str(ROOT / "scripts/import_hf.py"), "--model=hub"]
    words.append(f"--workdir={tmp_path / 'run'}")
    words.append(f"--config={ROOT}/configs/base.py:mesh.data=1,mesh.fsdp=2,mesh.tensor=2")
    here = imported.parent
    first, second = finish(start_hosts(words, devices=2, folders=(here, here)))
    assert "MPTForCausalLM: position=alibi (alibi_bias_max=8.0), L=16" in first
    assert "documents end with '</s>'; answers at ids 0\n" in first
    assert "MPTForCausalLM" not in second
    alone, apart = TrainedRun(imported), TrainedRun(tmp_path / "run")
    assert apart.config.mesh == MeshConfig(data=1, fsdp=2, tensor=2)
    assert len(apart.params["embedding"].sharding.device_set) == 4
    jax.tree.map(np.testing.assert_array_equal, alone.params, apart.params)
