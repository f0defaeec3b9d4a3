"""An imported model is a run like any other."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from alibi.config import Config, load_config
from alibi.convert.importing import import_model
from alibi.model.decoder import build_model
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.trained import TrainedRun
from alibi.training.parent import Parent
from tests.convert.described import FAMILIES
from tests.convert.imported import save_tokenizer


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A work directory of a random MPT; not to be changed."""
    folder = tmp_path_factory.mktemp("mpt")
    family, hub = FAMILIES["mpt"], folder / "hub"
    hub.mkdir()
    config = family.config(vocab=320, length=16)
    (hub / "config.json").write_text(json.dumps(config))
    save_file(family.tensors(config, 0), hub / "model.safetensors")
    save_tokenizer(hub)
    import_model(str(hub), folder / "run", Config())
    import_model(str(hub), folder / "narrow", Config(), dtype="bfloat16")
    return folder / "run"


def test_parameters_keep_or_change_their_dtype(imported: pathlib.Path) -> None:
    """bfloat16 halves the bytes; features differ by its 8 bits."""
    wide, narrow = TrainedRun(imported), TrainedRun(imported.parent / "narrow")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(wide.params)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow.params)} == {"bfloat16"}
    tokens = jnp.arange(32)[None]
    found = [
        np.asarray(run.model.apply({"params": run.params}, tokens), np.float32)
        for run in (wide, narrow)
    ]
    assert 0 < np.abs(found[0] - found[1]).max() < 0.2
    assert narrow.config.model.param_dtype == "bfloat16"


def test_a_run_starts_from_it_at_another_length_and_with_flatter_slopes(
    imported: pathlib.Path,
) -> None:
    """MPT's way to longer contexts; all parameters are taken, also of bfloat16."""
    for workdir in (imported, imported.parent / "narrow"):
        config = load_config(f"{workdir}/config.py:length=64,position_options.alibi_bias_max=16")
        assert (config.init_from, config.imported_from) == (str(workdir), "")
        assert (config.train_length, config.model.param_dtype) == (64, "float32")
        parent = Parent(config, build_model(config, 300))
        about = parent.about()
        assert about["new"] == about["dropped"] == []
        assert about["taken"] == TrainedRun(workdir).num_parameters
        assert "alibi_bias_max=16" in parent.describe()


def test_another_method_takes_its_place(imported: pathlib.Path) -> None:
    """Its options are not those of the method before."""
    config = load_config(f"{imported}/config.py:position=t5")
    assert config.position_options == {}
    about = Parent(config, build_model(config, 300)).about()
    assert about["new"] == ["position/table"]
    assert about["dropped"] == []


def test_it_is_not_trained_itself(imported: pathlib.Path) -> None:
    run = TrainedRun(imported)
    state = RunDirectory(imported).status()
    assert (state["state"], state["reason"], state["step"]) == ("finished", "imported", 0)
    with (
        Checkpoints(RunDirectory(imported).checkpoints, read_only=True) as checkpoints,
        pytest.raises(
            ValueError, match=r"without an optimizer's state; train on from it in another"
        ),
    ):
        checkpoints.restore(run.step, None)


def test_a_model_larger_than_the_memory_is_refused_with_its_size(
    imported: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Free)
    with pytest.raises(
        ValueError, match=r"parameters, needs \d\.\d GB and this machine has 0\.0 GB free"
    ):
        _ = TrainedRun(imported).params
