"""What belongs to a run: it goes on only as it began, and its small files are made again from its
checkpoints.
"""

import dataclasses
import logging
import pathlib
import shutil
import sys

import jax
import pytest

from alibi.config import replaced
from alibi.runs import RunDirectory
from alibi.runs.identity import differing
from alibi.runs.trained import TrainedRun
from alibi.training import loop
from tests.training.runs import assert_same, final_state, rows

METHOD = """
import dataclasses

from alibi.positions.alibi import Alibi


@dataclasses.dataclass(frozen=True)
class Mine(Alibi):
    share: float = {share}
"""


def test_what_may_differ_as_a_run_goes_on(tiny_config) -> None:
    config = tiny_config()
    elsewhere = replaced(config, {"data.train": "/scratch/2/train.txt", "data.valid": "/b.txt"})
    assert differing(config, elsewhere) == {}, "the tokens' hashes are compared"
    without = replaced(config, {"data.valid": ""})
    assert list(differing(config, without)) == ["data.valid"]
    other = replaced(elsewhere, {"data.document_end": "blank_line"})
    assert list(differing(config, other)) == ["data.document_end"]
    more = {"train.accumulation": 2}
    assert differing(config, replaced(config, more)) == {}, "the gradient is the same sum"
    dropping = replaced(config, {"model.attention_dropout": 0.1})
    assert list(differing(dropping, replaced(dropping, more))) == ["train.accumulation"], (
        "each micro-batch draws its own dropout"
    )
    longer, restarts = {"train.steps": 9}, {"optimizer.schedule": "cosine_restarts"}
    assert differing(config, replaced(config, longer)) == {"train.steps": (6, 9)}
    endless = replaced(config, restarts)
    assert differing(endless, replaced(endless, longer)) == {}
    assert differing(replaced(endless, longer), endless) == {"train.steps": (9, 6)}


@pytest.mark.usefixtures("one_device")
def test_a_finished_run_is_trained_longer_with_its_optimizer(tiny_config, tmp_path) -> None:
    """From another place of its text; the state is that of a run which was as long at once."""
    config = tiny_config(optimizer__schedule="cosine_restarts")
    longer = replaced(config, {"train.steps": 9})
    loop.train(longer, str(tmp_path / "at once"))
    loop.train(config, str(tmp_path / "run"))
    moved = shutil.copy(config.data.train, tmp_path / "moved.txt")
    status = loop.train(replaced(longer, {"data.train": str(moved)}), str(tmp_path / "run"))
    assert (status["state"], status["step"]) == ("finished", 9)
    assert_same(*(final_state(longer, tmp_path / name) for name in ("at once", "run")))
    run = RunDirectory(tmp_path / "run")
    cosine = replaced(run.config(), {"optimizer.schedule": "cosine"})
    run.write("config.json", dataclasses.asdict(cosine))
    with pytest.raises(ValueError, match=r"train.steps: 9 there, 12 now\n.*\n.*--init_from="):
        run.check(replaced(cosine, {"train.steps": 12}))


@pytest.mark.usefixtures("one_device")
def test_another_file_of_the_method_and_other_random_numbers_are_told(
    tiny_config, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my_method.py"
    file.write_text(METHOD.format(share=0.5))
    config, workdir = tiny_config(position="my_method:Mine"), str(tmp_path / "run")
    config = replaced(config, {"train.steps": 2, "optimizer.warmup_steps": 1})
    loop.train(config, workdir)
    recorded = RunDirectory(workdir).provenance()
    assert list(recorded["method_files"]) == ["own file my_method"]
    assert recorded["jax"]["jax_default_prng_impl"] == "threefry2x32"
    with jax.default_prng_impl("rbg"), pytest.raises(
        ValueError, match=r"trained with jax_default_prng_impl=threefry2x32, .* set JAX_DEFAULT_PRNG"
    ):  # fmt: skip
        loop.train(config, workdir)
    file.write_text(METHOD.format(share=0.25))
    del sys.modules["my_method"]
    with pytest.raises(ValueError, match=r"own file my_method, which defines .* has changed"):
        loop.train(config, workdir)
    with caplog.at_level(logging.WARNING):
        assert TrainedRun(workdir).model.vocab_size == 256
    assert f"{workdir}: own file my_method has changed since training" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "status.json", "provenance.json", "tokenizer"])
@pytest.mark.usefixtures("one_device")
def test_a_small_file_is_made_again_from_a_checkpoint(
    tiny_config,
    finished: pathlib.Path,
    caplog,
    name: str,
) -> None:
    run, config = RunDirectory(finished), tiny_config()
    last = (
        finished / "tokenizer" / "tokenizer_config.json" if name == "tokenizer" else finished / name
    )
    before, half = last.read_bytes(), last.read_bytes()[: last.stat().st_size // 2]
    for damage in (half, None):
        if damage is None:
            last.unlink()
        else:
            last.write_bytes(damage)
        caplog.clear()
        assert run.config() == config
        assert run.status()["state"] == "finished"
        assert run.provenance()["corpus"] == TrainedRun(finished).directory.provenance()["corpus"]
        assert run.tokenizer().vocab_size == 256
        assert name in caplog.text, "it is told"
        with pytest.raises(ValueError, match="seed: 0 there, 1 now"):
            loop.train(replaced(config, {"seed": 1}), str(finished))
    # a run that goes on writes it anew
    shutil.rmtree(finished / "checkpoints" / "6")
    loop.train(config, str(finished))
    if name in ("config.json", "tokenizer"):
        assert last.read_bytes() == before
    caplog.clear()
    assert run.status()["state"] == "finished"
    assert run.tokenizer().vocab_size == 256
    assert caplog.text == ""


@pytest.mark.usefixtures("one_device")
def test_damaged_metrics_are_told(tiny_config, finished: pathlib.Path, capsys) -> None:
    file, shown = finished / "metrics.jsonl", "had 6 rows, now"
    shutil.rmtree(finished / "checkpoints" / "6")
    whole_file = file.read_bytes()
    loop.train(tiny_config(), str(finished))
    assert shown not in capsys.readouterr().err
    assert len(rows(finished)) == whole_file.count(b"\n")
    flipped = whole_file.replace(b'"train_nll": 5', b'"train_nll": 4')
    for damaged, count in ((flipped, 5), (whole_file[:300], 1)):
        shutil.rmtree(finished / "checkpoints" / "6")
        file.write_bytes(damaged)
        loop.train(tiny_config(), str(finished))
        message = capsys.readouterr().err
        assert f"is damaged: at update 4 it had 5 rows, now {count}, or other values" in message
