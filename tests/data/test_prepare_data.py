"""The command that prepares data: its output, and mistakes of the user in one line."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def prepare_data(run_script, monkeypatch, tmp_path):
    """Runs prepare_data.py on the config of these keys, from a folder with the cache."""
    monkeypatch.chdir(tmp_path)

    def run(config, *words, code=0):
        words = (
            f"--config={ROOT}/configs/base.py:{config}",
            f"--config.data.cache_dir={tmp_path}",
            *words,
        )
        return run_script(ROOT / "scripts/prepare_data.py", *words, code=code)

    return run


def test_prepares_the_splits_the_config_names_from_any_directory(prepare_data):
    done = prepare_data(
        "data.tokenizer=words", "--config.data.max_train_bytes=100000", "--noprogress"
    )
    train, train_folder, valid, valid_folder = done.stdout.splitlines()
    assert re.match(
        r"train: [\d,]+ tokens \(words, vocabulary [\d,]+\), [\d,]+ words, 0 unknown, 100,000 bytes",
        train,
    )
    assert "valid: 77,278 tokens" in valid
    assert "69,178 words" in valid
    assert "391,381 bytes, 1 documents" in valid
    for folder in (train_folder, valid_folder):
        assert (pathlib.Path(folder.strip()) / "manifest.json").is_file()
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("", "--workdir=x"),
            "error: there is no flag --workdir; token files belong to no run, so they are made in --config.data.",
        ),
        # Before train, which may take hours, becomes tokens.
        (
            (f"data.corpus=text,data.train={__file__}",),
            "error: data.valid is not set, and there is no file 'valid' (seen from ",
        ),
        (
            ("data.corpus=hub",),
            "error: data.name is empty, but corpus=hub needs the dataset's name; set data.name",
        ),
    ],
)
def test_a_mistake_is_one_line(prepare_data, arguments, message):
    done = prepare_data(*arguments, code=1)
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
