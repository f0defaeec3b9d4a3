"""Configs that can't work, or would mix two runs, are refused before any work; a single process at a
time trains in a work directory.
"""

import pathlib

import pytest

from alibi.data.tokenizers import ByteTokenizer, WordTokenizer
from alibi.errors import UserError
from alibi.extras import MissingPackageError
from alibi.runs import RunDirectory, config_hash
from alibi.training import loop
from tests.refusals import assert_refused
from tests.storage.locks import without_locks


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"train__batch_tokens": 100},
            r"batch_tokens=100 must be a multiple of 128 \(train_length=16 .* 8 devices",
        ),
        ({"train__accumulation": 3}, r"use 384"),
        ({"mesh__data": 3}, "do not fit 8 devices"),
        ({"mesh__data": -1, "mesh__fsdp": -1}, "one of them may be -1"),
        (
            {"optimizer__warmup_steps": 6},
            "warmup_steps=6 must be below train.steps=6; lower the warm",
        ),
        ({"position": "alibbi"}, "did you mean 'alibi'"),
        ({"model__num_heads": 3}, "does not divide model.width=16; use 1, 2, 4"),
        (
            {"train_length": 8192, "train__batch_tokens": 65536},
            "longer than the corpus, which has 6,000 tokens",
        ),
        ({"data__train": "missing.txt"}, "missing.txt"),
        ({"data__valid": "missing.txt"}, "missing.txt.*; set data.valid, or leave it empty"),
        (
            {"model__embedding": "adaptive", "model__cutoffs": (4, 400)},
            "below the 256 tokens of the vocabulary",
        ),
        (
            {"model__embedding": "adaptive", "model__adaptive_factor": 8},
            "no feature of model.width=16",
        ),
        ({"position": "rotary", "position_options__base": 0.0}, "base=0.0 .* must be above 0"),
        (
            {"position": "sinusoidal", "position_options__max_period": -1.0},
            "max_period=-1.0 .* must be above 0",
        ),
        ({"position_options__slopes": "foo"}, "slope convention 'foo' is unknown"),
        (
            {"position_options__slopes": 3},
            r"slopes=\[3.0\] must be \d+ finite numbers of at least 0",
        ),
        (
            {"position": "learned", "position_options__num_positions": 8},
            "at least the training length 16",
        ),
        # updates that never come
        *[
            ({"log__profile_steps": steps}, r"log\.profile_steps")
            for steps in ("10", "3:2", "0:1", "2:7")
        ],
        (
            {"checkpoint__keep_every": 3, "checkpoint__every_steps": 2},
            "checkpoint.keep_every=3 must be a multiple of checkpoint.every_steps=2",
        ),
        ({"model__layer_draws": True}, "model.layer_draws=True draws positions"),
        (
            {"imported_from": "0" * 64},
            "leave it empty, or give .* --workdir",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    tiny_config, tmp_path: pathlib.Path, overrides: dict, message: str
) -> None:
    assert_refused(message, lambda: loop.train(tiny_config(**overrides), str(tmp_path / "run")))
    assert not (tmp_path / "run").exists(), "no empty directory is left"


def test_another_config_is_refused_with_its_differing_keys(
    tiny_config, finished: pathlib.Path
) -> None:
    assert_refused(
        r"model\.width: 16 there, 32 now\n  seed: 0 there, 1 now\n",
        loop.train,
        tiny_config(model__width=32, seed=1, log__every_steps=3),
        str(finished),
        listed=True,
    )
    assert_refused(
        r"model.attention_dropout: 0.0 there, 0.5 now",
        lambda: RunDirectory(finished).check(
            tiny_config(model__attention_dropout=0.5, model__attention="reference")
        ),
        listed=True,
    )
    assert RunDirectory(finished).differing(tiny_config()) == {}
    assert RunDirectory(finished).differing(tiny_config(model__window=5)) == {
        "model.window": (0, 5)
    }
    layers = tiny_config(position="alibi,none", model__num_layers=2, model__window=(5, 0))
    lists = {"position": ("alibi", "alibi,none"), "model.window": (0, [5, 0])}
    assert RunDirectory(finished).differing(layers) == lists | {"model.num_layers": (1, 2)}
    assert config_hash(RunDirectory(finished).config()) == config_hash(tiny_config())


def test_a_text_that_changed_is_refused_before_anything_is_overwritten(
    tiny_config, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("six seven eight nine ten\n" * 100)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert_refused(
        "SHA-256 of the train text", loop.train, tiny_config(data__train=str(text)), str(finished)
    )
    assert {path: path.read_bytes() for path in before} == before


def test_a_work_directory_that_cannot_be_written(tiny_config, tmp_path: pathlib.Path) -> None:
    """Root may write in any directory, but in no file."""
    (tmp_path / "file").write_text("")
    assert_refused(
        "file is a file, not a directory", loop.train, tiny_config(), str(tmp_path / "file" / "run")
    )


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        (
            "s3://bucket/run",
            "directories and gs:// only",
        ),
        ("gs:/bucket/run", "give gs://BUCKET/PATH"),
        (r"a\b/run", r"a\\\\b/run' .* misread '\\\\'"),
        ("gs:/", r"give gs://BUCKET/PATH"),
        ("", "the work directory's name is empty"),  # it is not the current directory
        ("a/gs:/run", "a/gs:/run' .* misread 'gs:'"),
        ("a/xgs:", "misread 'xgs:'"),
        ("run\n", r"/run\\n' .* misread '\\n'"),
        ("\udcff/run", r"'\S*/\\udcff/run' .* misread '\\udcff'"),
        ("/s3/run", "'/s3/run' .* misread '/s3'"),
    ],
)
def test_a_name_that_cannot_be_a_work_directory(
    tiny_config, tmp_path: pathlib.Path, monkeypatch, workdir: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(message, loop.train, tiny_config(), workdir)
    assert not list(tmp_path.iterdir())


def test_an_address_without_its_package(tiny_config, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert_refused(
        "gs://bucket/run .* gcsfs",
        loop.train,
        tiny_config(),
        "gs://bucket/run",
        raised=MissingPackageError,
    )


def test_a_run_that_began_meanwhile_is_not_mixed_with_another(
    tiny_config, tmp_path: pathlib.Path
) -> None:
    """Between the check and the lock the text is prepared, for up to an hour."""
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    configs = tiny_config(seed=1), tiny_config(seed=2)
    first.check(configs[0])
    second.check(configs[1])
    first.claim(configs[0], ByteTokenizer())
    assert_refused("another process is training in", loop.train, configs[0], str(tmp_path / "run"))
    first.release()
    assert_refused("seed: 1 there, 2 now", second.claim, configs[1], ByteTokenizer(), listed=True)
    assert first.config().seed == 1
    assert_refused(
        "tokenizer of the run",
        lambda: second.claim(
            configs[0], WordTokenizer(dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>"], 0))
        ),
    )
    first.claim(configs[0], ByteTokenizer())  # the lock was given back
    first.release()


def test_without_file_locks_the_newest_start_wins(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """The older process stops before its next write of a checkpoint or a status."""
    without_locks(monkeypatch)
    write, later = RunDirectory.write_status, RunDirectory(tmp_path)

    def write_status(run: RunDirectory, state: str, *, step: int, **more: object) -> None:
        write(run, state, step=step, **more)
        if (state, step) == ("running", 3):
            later.claim(run.config(), run.tokenizer())

    monkeypatch.setattr(RunDirectory, "write_status", write_status)
    assert_refused("started later", loop.train, tiny_config(), str(tmp_path), raised=UserError)
    assert later.saved_steps() in ([2], [2, 3])
    later.check_claim()
    assert later.status()["state"] == "running"  # as it was when the later process came
