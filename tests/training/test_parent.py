"""A run that starts from a parent's checkpoint: parameters taken, new and dropped; resuming without
the parent.
"""

import dataclasses
import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest

from alibi.config import Config, ModelConfig
from alibi.config.fields import ADAPTIVE
from alibi.config.tree import role_of
from alibi.model.decoder import UNKNOWN_VOCABULARY, build_model, param_shapes
from alibi.model.layers import unstacked
from alibi.optimizers import make_optimizer
from alibi.parallel import axes
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory
from alibi.runs.trained import TrainedRun
from alibi.training import loop, setup
from alibi.training.parent import Parent
from alibi.training.step import initial_state
from tests.evaluation.runs import make_run
from tests.refusals import assert_refused
from tests.training.runs import assert_same, stop_at


@pytest.fixture(scope="module")
def parent(whole: pathlib.Path) -> pathlib.Path:
    """A finished run of ALiBi at 16 tokens; not to be changed."""
    return whole


def arrays(params: dict) -> dict[str, np.ndarray]:
    leaves = axes.by_path(unstacked(params) if "layers" in params else params)
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def parameters(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    return arrays(TrainedRun(workdir).params)


def parent_of(config: Config) -> Parent:
    return Parent(config, build_model(config, UNKNOWN_VOCABULARY))


def started(config: Config) -> tuple[Parent, dict[str, np.ndarray]]:
    """Returns the parent, and the first parameters in a run with `config`."""
    found, model = parent_of(config), build_model(config, 256)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return found, arrays(
        found.replace_in(initial_state(model, optimizer, mesh, config.seed), mesh).params
    )


def with_config(run: pathlib.Path, config: Config, copy: pathlib.Path) -> pathlib.Path:
    """Returns a copy of a run with another config; its parameters must not be read."""
    RunDirectory(shutil.copytree(run, copy)).write("config.json", dataclasses.asdict(config))
    for about in copy.glob("checkpoints/*/about/metadata"):  # which has the config of the run
        about.unlink()
    return copy


def test_what_both_have_is_taken_and_the_rest_is_said(
    tiny_config, parent, tmp_path, capsys
) -> None:
    """Learned positions from ALiBi, at a rate of 0, and from these ALiBi with its layers as a loop."""
    still = {"optimizer__learning_rate": 0.0, "train__steps": 3, "eval__every_steps": 0}
    config = tiny_config(init_from=str(parent), position="learned", length=32, **still)
    loop.train(config, str(tmp_path / "learned"))
    count = sum(value.size for value in parameters(parent).values())
    taken = f"from {parent} after 6 updates: {count:,} parameters taken; new: position/table; dropped: none"
    assert f"starting {taken}\n" in capsys.readouterr().err
    of_learned = parameters(tmp_path / "learned")
    assert of_learned.pop("position/table").shape == (32, 16)
    assert_same(of_learned, parameters(parent))
    assert RunDirectory(tmp_path / "learned").provenance()["parent"]["new"] == ["position/table"]

    of_learned = functools.partial(tiny_config, init_from=str(tmp_path / "learned"))
    found, of_ssmax = started(
        of_learned(seed=1, model__scan_layers=True, model__logit_scale="ssmax")
    )
    assert found.describe().endswith("new: layers/position/ssmax; dropped: position/table")
    assert of_ssmax.pop("layers_0/position/ssmax").shape == (2,)
    assert_same(of_ssmax, parameters(parent))
    about = found.about()
    assert about.pop("config_hash")
    assert about == {
        "workdir": str(tmp_path / "learned"),
        "step": 3,
        "taken": count,
        "new": ["layers/position/ssmax"],
        "dropped": ["position/table"],
    }
    about = parent_of(of_learned(position="learned", length=64)).about()
    assert about["new"] == about["dropped"] == ["position/table"], (
        "a table of another length is another one"
    )


def test_a_run_goes_on_without_its_parent(tiny_config, parent, tmp_path, monkeypatch) -> None:
    """Bit for bit as without a stop, and with the same parent in its provenance; another parent is
    refused.
    """
    gone = shutil.copytree(parent, tmp_path / "gone")
    config = functools.partial(tiny_config, init_from=str(gone))
    loop.train(config(), str(tmp_path / "whole"))

    with monkeypatch.context() as patch:
        stop_at(patch, 4, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.train(config(), str(tmp_path / "run"))
    shutil.rmtree(gone)
    assert_refused(
        r"init_from: '.*gone' there, '.*run' now",
        lambda: loop.train(config(init_from=str(parent)), str(tmp_path / "run")),
        listed=True,
    )
    assert_refused(
        r"init_from: '.*gone' there, '' now",
        lambda: loop.train(config(init_from=""), str(tmp_path / "run")),
        listed=True,
    )
    monkeypatch.chdir(tmp_path)
    loop.train(config(init_from="gone"), "run")  # the same one, named from here
    assert_same(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))
    abouts = [RunDirectory(tmp_path / name).provenance()["parent"] for name in ("run", "whole")]
    assert abouts[0] == abouts[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model__width": 32},
            "16 there and 32 here; set --config.model.width=16$",
        ),
        (
            {"model__num_heads": 4},
            "model.num_heads is 2 there and 4 here; set --config.model.num_heads=2$",
        ),
        # the second would be random
        ({"model__num_layers": 2}, "1 there and 2 here; set --config.model.num_layers=1$"),
        (
            # the same parameters would compute otherwise
            {"model__activation": "gelu", "model__norm_epsilon": 1e-5},
            "activation is relu there and gelu here, model.norm_epsilon is 1e-06 there and 1e-05 here; "
            "set --config.model.activation=relu --config.model.norm_epsilon=1e-06$",
        ),
        (
            {"model__final_norm": False},
            "is True there and False here; set --config.model.final_norm=True$",
        ),
        (
            {"model__embedding": "adaptive", "model__cutoffs": (20, 60)},
            "model.embedding is tied there and adaptive here; set --config.model.embedding=tied$",
        ),
        (
            {"data__tokenizer": "words"},
            r"another vocabulary, of 256 tokens \(bytes\), .*; set data.tokenizer=bytes",
        ),
        ({"init_from": "nowhere"}, "nowhere is no work directory"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_any_work(
    tiny_config, parent, tmp_path, monkeypatch, overrides, message
) -> None:
    monkeypatch.setattr(setup, "prepare_files", None)
    config = tiny_config(**{"init_from": str(parent)} | overrides)
    assert_refused(message, loop.train, config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("there", "here"),
    [
        # a table of [32, 16] each: of positions, and of distances
        (("learned", 32), ("deberta", 16)),
        (("kerple_log", 16), ("kerple_power", 16)),  # r2 within the logarithm, and an exponent
    ],
)
def test_position_parameters_of_another_meaning_are_new(
    tiny_config, parent, tmp_path, there, here
) -> None:
    """The name and the shape are the same, but the numbers mean nothing to the other method."""
    position, length = there
    run = with_config(parent, tiny_config(position=position, length=length), tmp_path / "there")
    about = parent_of(tiny_config(position=here[0], length=here[1], init_from=str(run))).about()
    assert about["new"]
    assert about["dropped"]
    # ALiBi's slopes are none
    assert about["taken"] == sum(value.size for value in parameters(parent).values())


def test_parameters_are_taken_by_the_layers_that_keep_their_method(
    tiny_config, parent, tmp_path
) -> None:
    config = functools.partial(tiny_config, model__num_layers=2)
    run = with_config(parent, config(position="fox"), tmp_path / "fox")
    about = parent_of(config(position="fox,none", init_from=str(run))).about()
    assert about["new"] == []
    assert about["dropped"] == ["layers/position/bias", "layers/position/kernel"]
    of_layer = sum(np.prod(shape) for shape in ((16, 2), (2,)))
    taken = param_shapes(build_model(config(position="none"), 256))
    shared = sum(leaf.size for leaf in jax.tree.leaves(taken))
    assert about["taken"] == shared + of_layer, "the first of two layers"


def test_methods_share_parameters_with_methods_made_of_them(tiny_config) -> None:
    def position(name: str, **options):
        keys = {f"position_options__{option}": value for option, value in options.items()}
        return build_model(tiny_config(position=name, **keys), UNKNOWN_VOCABULARY).methods[0]

    assert not position("alibi_learned").shares_parameters(position("kerple_power"))
    assert position("rotary").shares_parameters(position("yarn"))
    assert position("rotary").shares_parameters(position("rotary", base=500.0))
    assert position("t5").shares_parameters(position("t5", max_distance=512)), (
        "its buckets are stretched"
    )


def test_options_that_differ_from_the_parents_are_named(tiny_config, parent) -> None:
    """Their parameters are taken, as whoever stretches buckets or angles means it; unseen it might
    be a mistake.
    """
    options = {"position_options__alibi_bias_max": 16.0, "position_options__slopes": "closed_form"}
    config = tiny_config(init_from=str(parent), position="alibi", **options)
    shown = (
        "position options: slopes='closed_form' ('paper' there), alibi_bias_max=16.0 (8.0 there)"
    )
    assert parent_of(config).describe().endswith(f"dropped: none; {shown}")
    same = tiny_config(init_from=str(parent), position="alibi")
    assert parent_of(same).describe().endswith("; new: none; dropped: none")


def test_keys_that_do_not_change_what_parameters_compute_may_differ(tiny_config, parent) -> None:
    """Every key that may differ is tested; tied embeddings ignore the keys of adaptive embeddings."""
    free = {
        "initialization": "paper",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "softmax_dropout": 0.1,
        "padding_rows": True,
        "dtype": "bfloat16",
        "remat": True,
        "remat_keeps": "up",
        "scan_layers": True,
        "logit_scale": "",
        "masked_head": False,
        "max_position": 0,
        "layer_draws": False,
        "batch_draws": False,
        "test_draws": 0,
        "window": 8,
        "skip_epsilon": 1e-6,
        "attention": "reference",
        "products": "plain",
        "logits_chunk": 64,
    }
    roles = {key: role_of(f"model.{key}") for key in vars(ModelConfig())}
    # training has float32 parameters
    assert {*free, "param_dtype"} == {key for key in roles if roles[key] not in ("", ADAPTIVE)}
    of_adaptive = {"cutoffs": (9,), "adaptive_factor": 2}
    assert {*of_adaptive} == {key for key in roles if roles[key] == ADAPTIVE}
    keys = {f"model__{key}": value for key, value in (free | of_adaptive).items()}
    about = parent_of(tiny_config(init_from=str(parent), **keys)).about()
    assert about["new"] == about["dropped"] == []


def test_the_newest_whole_checkpoint_is_started_from(tiny_config, parent, tmp_path, capsys) -> None:
    """Evaluation chooses the same; the message and the provenance name its step."""
    old = shutil.copytree(parent, tmp_path / "old")
    steps = RunDirectory(old).saved_steps()
    for file in (old / "checkpoints" / str(steps[-1])).rglob("*"):
        if file.is_file() and "params" in file.parts:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 8])
    found, params = started(tiny_config(init_from=str(old)))
    assert f"checkpoints/{steps[-1]} is damaged" in capsys.readouterr().err
    assert f"from {old} after {steps[-2]} updates" in found.describe()
    assert found.about()["step"] == steps[-2]
    assert params.keys() == parameters(parent).keys()

    for step in steps[:-1]:
        shutil.rmtree(old / "checkpoints" / str(step))
    assert_refused(rf"checkpoints/{steps[-1]} is damaged", started, tiny_config(init_from=str(old)))


def test_a_stretched_method_at_another_length_asks_for_the_length_that_is_known(
    tiny_config, parent, tmp_path
) -> None:
    """It would stretch nothing, and train plain rotary, unsaid. ALiBi's model knows no rotation to
    stretch.
    """
    rotary = with_config(parent, tiny_config(position="rotary"), tmp_path / "rotary")

    def start(run: pathlib.Path, position: str, **options) -> Parent:
        keys = {f"position_options__{option}": value for option, value in options.items()}
        return parent_of(tiny_config(position=position, length=32, init_from=str(run), **keys))

    message = "set position_options.original_length=16"
    for position, options in (
        ("rotary_interpolated", {}),
        ("rotary_ntk", {}),
        ("yarn", {"factor": 2.0}),
    ):
        assert_refused(message, start, rotary, position, **options)
        start(rotary, position, **options, original_length=16)
    start(rotary, "rotary_interpolated", factor=2.0)
    start(rotary, "rotary")
    start(parent, "yarn")


def test_options_that_follow_the_length_stay_when_a_run_goes_on_at_another(
    tiny_config, parent, tmp_path
) -> None:
    """T5's buckets would hold other distances, FIRE's network would get other arguments."""
    for position, option, learned in (
        ("t5", "max_distance", 32),  # the number of buckets, which is more than a quarter of 16
        ("fire", "threshold", 4),
        ("xpos", "scale_base", 8.0),
    ):
        run = with_config(parent, tiny_config(position=position), tmp_path / position)
        keys = {"position": position, "length": 256, "init_from": str(run)}
        assert_refused(f"set position_options.{option}={learned}$", parent_of, tiny_config(**keys))
        parent_of(tiny_config(**keys, **{f"position_options__{option}": learned}))


def test_a_vocabulary_made_from_other_text_is_refused(tiny_config, tiny_text, tmp_path) -> None:
    """Also if only the text differs: words in the train text, and words in the validation text."""
    keys, text = "data.tokenizer=words,model.feed_forward=32", tiny_text["train"]
    run = make_run(tmp_path, "alibi", "words", text=text, keys=keys)
    words = {"data__tokenizer": "words", "data__train": str(tiny_text["valid"])}
    words |= {"init_from": str(run)}
    path = run / "tokenizer" / "dict.txt"
    assert_refused(
        f"data.tokenizer=words and data.tokenizer_file={path}",
        loop.train,
        tiny_config(**words),
        str(tmp_path / "refused"),
    )
    assert parent_of(tiny_config(**words, data__tokenizer_file=str(path))).about()["new"] == []
