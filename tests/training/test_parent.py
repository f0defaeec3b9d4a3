"""A run that starts from another one's checkpoint: what is taken, new and dropped; and going on without that one."""

import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest

from alibi.model.decoder import UNKNOWN_VOCABULARY, build_model
from alibi.model.layers import unstacked
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory
from alibi.runs.trained import TrainedRun
from alibi.training import loop
from alibi.training.parent import Parent


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def parent(tiny_config, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished run of ALiBi at 16 tokens; not to be changed."""
    workdir = tmp_path_factory.mktemp("parent") / "alibi-16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
        loop.train(tiny_config(eval__every_steps=0), str(workdir))
    return workdir


def parameters(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    params = TrainedRun(workdir).params
    params = unstacked(params) if "layers" in params else params
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for path, value in left.items():
        np.testing.assert_array_equal(value, right[path], path)


def test_what_both_have_is_taken_and_the_rest_is_said(tiny_config, parent, tmp_path, capsys) -> None:
    """Learned positions from ALiBi, and ALiBi from these, with its layers as a loop: at a rate of 0 nothing moves."""
    still = {"init_from": str(parent), "optimizer__learning_rate": 0.0, "train__steps": 3, "eval__every_steps": 0}
    loop.train(tiny_config(position="learned", length=32, **still), str(tmp_path / "learned"))
    count = sum(value.size for value in parameters(parent).values())
    told = f"starting from {parent} after 6 updates: {count:,} parameters taken; new: position/table; dropped: none\n"
    assert told in capsys.readouterr().err
    of_learned = parameters(tmp_path / "learned")
    assert of_learned.pop("position/table").shape == (32, 16)
    assert_same(of_learned, parameters(parent))

    still |= {
        "init_from": str(tmp_path / "learned"),
        "model__scan_layers": True,
        "position_options__logit_scale": "ssmax",
    }
    loop.train(tiny_config(seed=1, **still), str(tmp_path / "ssmax"))
    assert "new: layers/position/ssmax; dropped: position/table\n" in capsys.readouterr().err
    of_ssmax = parameters(tmp_path / "ssmax")
    assert [of_ssmax.pop(f"layers_{layer}/position/ssmax").shape for layer in (0, 1)] == [(2,), (2,)]
    assert_same(of_ssmax, parameters(parent))
    about = RunDirectory(tmp_path / "ssmax").provenance()["parent"]
    assert about.pop("config_hash")
    assert about == {
        "workdir": str(tmp_path / "learned"),
        "step": 3,
        "taken": count,
        "new": ["layers/position/ssmax"],
        "dropped": ["position/table"],
    }
    longer = tiny_config(position="learned", length=64, init_from=str(tmp_path / "learned"))
    about = Parent(longer, build_model(longer, UNKNOWN_VOCABULARY)).about()
    assert about["new"] == about["dropped"] == ["position/table"], "a table of another length is another one"


def test_a_run_goes_on_without_its_parent(tiny_config, parent, tmp_path, monkeypatch) -> None:
    """Bit for bit as without a stop, and with the same parent in its provenance; with another one it is refused."""
    gone = shutil.copytree(parent, tmp_path / "gone")
    config = functools.partial(tiny_config, init_from=str(gone), length=32, position="alibi_learned")
    loop.train(config(), str(tmp_path / "whole"))

    get = loop.Feed.get
    monkeypatch.setattr(loop.Feed, "get", lambda feed, at, *, last: 1 / 0 if at == 4 else get(feed, at, last=last))
    with pytest.raises(ZeroDivisionError):
        loop.train(config(), str(tmp_path / "run"))
    monkeypatch.setattr(loop.Feed, "get", get)
    shutil.rmtree(gone)
    with pytest.raises(ValueError, match=r"init_from: '.*gone' there, '.*alibi-16' now"):
        loop.train(config(init_from=str(parent)), str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"init_from: '.*gone' there, '' now"):
        loop.train(config(init_from=""), str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    loop.train(config(init_from="gone"), "run")  # the same one, named from here
    assert_same(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))
    abouts = [RunDirectory(tmp_path / name).provenance()["parent"] for name in ("run", "whole")]
    assert abouts[0] == abouts[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__width": 32}, r"of other shapes: model.width is 16 there and 32 here \(embedding: \[256, 16\], not"),
        ({"model__num_heads": 4}, r"model.num_heads is 2 there and 4 here .*; use the model keys of that run"),
        ({"model__num_layers": 3, "model__scan_layers": True}, "model.num_layers is 2 there and 3 here"),
        ({"data__tokenizer": "words"}, r"another vocabulary, of 256 tokens \(bytes\), .*; set data.tokenizer=bytes"),
        ({"init_from": "nowhere"}, "nowhere is no work directory of a run: config.json is missing"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_any_work(
    tiny_config, parent, tmp_path, monkeypatch, overrides, message
) -> None:
    monkeypatch.setattr(loop, "prepare_files", None)
    with pytest.raises(ValueError, match=message) as error:
        loop.train(tiny_config(**{"init_from": str(parent)} | overrides), str(tmp_path / "run"))
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_vocabulary_made_from_other_text_is_refused(tiny_config, tiny_text, tmp_path) -> None:
    """Also where only the text tells: words of the train text, and those of the validation text."""
    words = {"data__tokenizer": "words"}
    loop.train(tiny_config(**words, train__steps=3, eval__every_steps=0), str(tmp_path / "words"))
    words |= {"data__train": str(tiny_text["valid"]), "init_from": str(tmp_path / "words")}
    path = tmp_path / "words" / "tokenizer" / "dict.txt"
    with pytest.raises(ValueError, match=f"set data.tokenizer=words and data.tokenizer_file={path}"):
        loop.train(tiny_config(**words), str(tmp_path / "refused"))
    told = tiny_config(**words, data__tokenizer_file=str(path))
    assert Parent(told, build_model(told, UNKNOWN_VOCABULARY)).about()["new"] == []
