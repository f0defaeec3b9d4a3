"""Values that change over updates: one run, which goes on bit for bit, each program compiled once."""

import json
import pathlib

import jax
import numpy as np
import pytest

from alibi.config import Config, as_file, load_config, make_config, read_config, replaced
from alibi.config.fields import as_text
from alibi.config.files import set_key
from alibi.config.override import Override
from alibi.convert.exporting import export_model
from alibi.evaluation.evaluate import EvaluationOptions, evaluate_runs
from alibi.reporting.rows import read_rows
from alibi.runs import RunDirectory, config_hash, evaluation_hash
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.trained import TrainedRun
from alibi.sweeps.definition import make_sweep
from alibi.training import loop, setup, updates
from configs import llama_like
from tests.evaluation.runs import make_run
from tests.hosts import ROOT
from tests.refusals import assert_refused
from tests.training.runs import assert_same, figures, final_state, interrupt, rows, stop_at

# Of 6 updates: changes after 2 and 4, so that three stretches have other programs.
CHANGES = {
    "model.window": ((0, 4), (2, 0)),
    "train_length": ((0, 8), (2, 16)),
    "position": ((0, "rotary"), (4, "none")),
}


LLAMA = ("gated", "activation", "norm", "qkv_bias", "out_bias", "feed_forward_bias", "embedding")


@pytest.fixture(scope="session")
def config(tiny_config) -> Config:
    return replaced(
        tiny_config(checkpoint__keep=9, checkpoint__every_steps=1, eval__every_steps=1), CHANGES
    )


@pytest.fixture(scope="session")
def changed(config, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run of `config`, without a stop."""
    workdir = tmp_path_factory.mktemp("changed") / "run"
    loop.train(config, str(workdir))
    return workdir


def test_it_goes_on_bit_for_bit_where_values_change(config, changed, tmp_path, capsys) -> None:
    interrupt(config, tmp_path / "run", 2)
    loop.train(config, str(tmp_path / "run"))
    assert_same(final_state(config, tmp_path / "run"), final_state(config, changed))
    assert figures(tmp_path / "run") == [
        row
        for row in figures(changed)
        # a run that stops is not validated there
        if "valid_nll" not in row or row["step"] != 2
    ]
    said = capsys.readouterr().err
    assert "run: from update 5 on model.window=0, position=none, train_length=16" in said


def test_each_stretch_computes_what_a_run_of_its_values_does(
    config, changed, tmp_path, tiny_config, monkeypatch
) -> None:
    """The first ends as a plain run does that is stopped there; a wrong window or length would show."""
    plain = tiny_config(position="rotary", model__window=4, train_length=8)
    assert config.at(2) == replaced(
        plain,
        {
            "checkpoint.keep": 9,
            "checkpoint.every_steps": 1,
            "eval.every_steps": 1,
            "changes": config.changes,
        },
    )
    with monkeypatch.context() as patch:
        # the text in blocks of 16, as the lengths after it have them
        for name in ("longest", "last_length"):
            patch.setattr(Config, name, property(lambda config: 16))
        interrupt(plain, tmp_path / "plain", 2)
    with Checkpoints(changed / "checkpoints", read_only=True) as checkpoints:
        ours = checkpoints.restore(2, final_state(config, changed))
    assert_same(ours, final_state(plain, tmp_path / "plain"))


def test_each_value_is_compiled_once(config, tmp_path, monkeypatch) -> None:
    """Before the first update, and again only what a run that goes on still needs."""
    made, compiled = [], updates.make_train_step
    monkeypatch.setattr(
        updates,
        "make_train_step",
        lambda model, *args, **how: (
            made.append(model.config.window) or compiled(model, *args, **how)
        ),
    )
    turns = replaced(
        config,
        {"changes": (), "position": "alibi", "train_length": 16, "model.window": "0:4;2:8;3:4"},
    )
    seen = []
    stop_at(monkeypatch, 3, lambda: seen.extend(made))
    interrupt(turns, tmp_path / "run", 4)
    assert seen == made == [4, 8], "two values, one of them twice"
    loop.train(turns, str(tmp_path / "run"))
    assert made[2:] == [4]


def test_a_checkpoint_knows_the_values_it_was_trained_with(config, changed) -> None:
    """And is of one run, whose hash and directory stay."""
    for step, values in {
        2: ("rotary", 8, 4),
        3: ("rotary", 16, 0),
        4: ("rotary", 16, 0),
        6: ("none", 16, 0),
    }.items():
        run = TrainedRun(changed, str(step))
        at = run.config
        assert (at.position, at.train_length, at.model.window) == values
        assert run.model.pattern[0].window == values[2]
        assert config_hash(at) == config_hash(config)
        assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(run.params))
    assert RunDirectory(changed).config() == config


def test_the_best_checkpoint_is_of_the_last_values(config, changed) -> None:
    """Losses at length 8, or by another method, compare with none at 16."""
    valid = {row["step"]: row["valid_nll"] for row in rows(changed) if "valid_nll" in row}
    assert sorted(valid) == [1, 2, 3, 4, 5, 6]
    best = min((5, 6), key=lambda step: valid[step])
    assert RunDirectory(changed).status()["best"]["step"] == best
    with Checkpoints(changed / "checkpoints", read_only=True) as checkpoints:
        assert [step for step, _ in checkpoints.ranked] == sorted((5, 6), key=valid.__getitem__)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("position", "3:rotary;0:none", "must begin with update 0"),
        ("position", "1:rotary;3:none", "must begin with update 0"),
        ("model.window", "0:4;3:8;3:0", "each update be later than the one before"),
        ("model.window", "0:4;6:8", r"after update 6, and the run ends with train\.steps=6"),
        ("model.window", ((0, 4, 1), (3, 8)), "must list pairs of an update and a value"),
        ("model.window", "0:4;x:8", "must list pairs of an update and a value"),
        ("model.window", "0:4;3:-1", r"model\.window=-1 must be at least 0"),
        ("train_length", "0:6;3:16", "train_length=6 does not divide 16"),
        ("changes", (("seed", 0, 1), ("seed", 3, 2)), "seed can't change over updates; position,"),
        (
            "changes",
            (("model.window", 0, 1), ("model.window", 3, 2)),
            "set model.window to the list",
        ),
    ],
)
def test_a_wrong_list_is_refused(key, value, reason, tiny_config) -> None:
    assert_refused(reason, replaced, tiny_config(), {key: value})


@pytest.mark.parametrize("values", ["0:alibi;3:t5", "0:t5;3:none", "0:none;3:learned"])
def test_position_parameters_that_come_or_go_are_refused(values, tiny_config) -> None:
    assert_refused("after update 3", setup.check_trainable, tiny_config(position=values))
    assert_refused(
        "another meaning",
        setup.check_trainable,
        tiny_config(position="0:kerple_log;3:kerple_power"),
    )


def test_options_go_to_the_methods_that_know_them(tiny_config) -> None:
    """Rotary's base is none of `none`, and an option that neither has is refused."""
    setup.check_trainable(tiny_config(position="0:rotary;3:none", position_options__base=100.0))
    assert_refused(
        "has no option 'bases'",
        setup.check_trainable,
        tiny_config(position="0:rotary;3:none", position_options__bases=100.0),
    )


def test_methods_and_scales_are_made_for_the_last_length(tiny_config) -> None:
    """So learned tables keep their size, and ln n / ln L is one function over all updates."""
    config = tiny_config(position="learned", train_length="0:8;3:16", model__logit_scale="log_n")
    for _, each in config.stretches:
        (kind, *_) = setup.build_model(each, 10).pattern
        assert (kind.position.train_length, kind.position.max_length) == (16, 16)


def test_a_list_is_one_in_files_flags_and_python(config) -> None:
    texts = {key: as_text(value) for key, value in CHANGES.items()}
    assert texts["position"] == "0:rotary;4:none"
    plain = replaced(config, {"position": "alibi", "train_length": 16, "model.window": 0})
    assert plain.changes == ()
    assert replaced(plain, texts) == config
    namespace: dict = {}
    exec(as_file(config), namespace)
    assert read_config(namespace["get_config"]()) == config
    again = read_config(namespace["get_config"]("model.window=3,length=0:8;2:16"))
    assert again == replaced(config, {"model.window": 3})
    assert_refused("must be of type", make_config, seed=((0, 1), (3, 2)))
    assigned = namespace["get_config"]()
    assigned.position = "rotary"  # in the list, and not the last
    assert_refused("position=rotary .* 0:rotary;4:none", read_config, assigned)
    one = namespace["get_config"]()
    set_key(one, "train_length", ((0, 16),))
    assert read_config(one) == replaced(config, {"train_length": 16})


@pytest.mark.parametrize(
    ("name", "key", "pairs"),
    [
        ("drope", "position", ((0, "rotary"), (300, "none"))),
        ("skyladder", "train_length", ((0, 8), (36, 16), (109, 32), (256, 64))),
        ("growing_window", "model.window", ((0, 8), (100, 16), (200, 32), (300, 0))),
    ],
)
def test_the_configs_follow_steps_and_length(name, key, pairs) -> None:
    """SkyLadder's line 1/8 + 7/8 t / 256 is at a quarter after 36.6 updates, at half after 109.7."""
    keys = {"train.steps": 400, "train_length": 64}
    config = load_config(str(ROOT / f"configs/{name}.py") + ":train.steps=400,length=64")
    assert config.over_updates == {key: pairs}
    assert config.train_length == 64
    setup.check_trainable(config)
    if key != "train_length":  # a value that is given replaces the list
        value = "alibi" if key == "position" else 5
        assert not load_config(str(ROOT / f"configs/{name}.py"), keys | {key: value}).changes


def test_a_list_is_a_value_of_a_sweep() -> None:
    """With the list in its name, and the same config by the flags of its process."""
    lists = [64, ((0, 16), (200, 64))]
    sweep = make_sweep(
        {
            "config": "configs/quickstart.py",
            "product": {"train_length": lists, "model.window": [((0, (8, 0)), (9, 0))]},
            "multiples": [1],
        },
        title="lists",
    )
    assert [run.name for run in sweep.runs] == [
        "alibi-L64-window=0_8_0_9_0-seed0",
        "alibi-L64-train_length=0_16_200_64-window=0_8_0_9_0-seed0",
    ]
    for run, value in zip(sweep.runs, lists, strict=True):
        window = {"model.window": ((0, (8, 0)), (9, 0))}
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in run.config_flags)
        given = {
            key.removeprefix("config."): text for key, text in flags.items() if key != "config"
        }
        assert load_config(flags["config"], given) == run.config
        assert run.config.over_updates == window | (
            {"train_length": value} if isinstance(value, tuple) else {}
        )
        assert run.evaluations[0].lengths == (64,)


def test_rows_say_the_values_of_their_checkpoint(config, changed, tmp_path) -> None:
    """By each name that a table has for them, and with one hash of the run."""
    for checkpoint in ("2", "latest"):
        options = EvaluationOptions(
            tmp_path / "rows", lengths=(16,), checkpoint=checkpoint, report=False
        )
        assert evaluate_runs([changed], options) == []
    early, late = read_rows(tmp_path / "rows" / "results.jsonl")
    assert (early.position, early.train_length) == ("rotary", 8)
    assert early.over_updates == {"model.window": 4, "position": "rotary", "train_length": 8}
    assert late.over_updates == {"model.window": 0, "position": "none", "train_length": 16}
    assert early.config_hash == late.config_hash == evaluation_hash(config)
    assert early.results["perplexity"] != late.results["perplexity"]
    # training and evaluation both have dropped rotary by then: with it the NLL is another one
    with_rotary = EvaluationOptions(
        tmp_path / "rotary", lengths=(16,), override=Override(position="rotary"), report=False
    )
    assert evaluate_runs([changed], with_rotary) == []
    (other,) = read_rows(tmp_path / "rotary" / "results.jsonl")
    (valid,) = (
        row["valid_nll"] for row in rows(changed) if "valid_nll" in row and row["step"] == 6
    )
    assert late.results["nll_nats"] / late.results["tokens"] == pytest.approx(valid, rel=1e-5)
    assert other.results["nll_nats"] / other.results["tokens"] != pytest.approx(valid, rel=1e-4)


def test_seeds_train_together_over_updates(config, changed, tmp_path) -> None:
    """As each by itself, to rounding."""
    workdirs = {0: str(tmp_path / "0"), 1: str(tmp_path / "1")}
    seldom = {"eval.every_steps": 0, "checkpoint.every_steps": 0}
    loop.train_seeds(replaced(config, seldom), workdirs)
    together, alone = (
        [row["train_nll"] for row in rows(path) if "train_nll" in row]
        for path in (tmp_path / "0", changed)
    )
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert len(together) == 6


def test_an_export_has_the_last_values(tiny_text, tmp_path) -> None:
    """A checkpoint under a window is refused by Llama, which has none; the last one is taken."""
    like = read_config(llama_like.get_config()).model
    keys = ",".join(f"model.{key}={as_text(like[key])}" for key in LLAMA)
    keys += ",model.embedding_scale=1.0,model.window=0:4;2:0,train_length=0:8;2:16"
    run = make_run(tmp_path, "rotary", "run", steps=(2, 3), text=tiny_text["train"], keys=keys)
    early = {"checkpoint": "2", "family": "llama"}
    assert_refused(r"model\.window", export_model, run, tmp_path / "early", **early)
    export_model(run, tmp_path / "out", family="llama")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["model_type"], content["max_position_embeddings"]) == ("llama", 16)
