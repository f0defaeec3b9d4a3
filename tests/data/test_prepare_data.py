"""The command line: what it prints, and that a user's mistake is one line and not a traceback."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def prepare_data(cache, config, *arguments):
    command = [sys.executable, ROOT / "scripts/prepare_data.py", f"--config={ROOT}/configs/base.py:{config}"]
    command += [f"--config.data.cache_dir={cache}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cache, timeout=60)


def test_prepares_the_splits_the_config_names_from_any_directory(tmp_path):
    done = prepare_data(tmp_path, "data.tokenizer=words", "--config.data.max_train_bytes=100000", "--noprogress")
    assert done.returncode == 0, done.stderr
    train, train_folder, valid, valid_folder = done.stdout.splitlines()
    assert re.match(r"train: [\d,]+ tokens \(words, vocabulary [\d,]+\), [\d,]+ words, 0 unknown, 100,000 bytes", train)
    assert "valid: 77,278 tokens" in valid
    assert "69,178 words" in valid
    assert "391,381 bytes, 1 documents" in valid
    for folder in (train_folder, valid_folder):
        assert (pathlib.Path(folder.strip()) / "manifest.json").is_file()
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        # Told before train, which may take hours, is made into tokens.
        (f"data.corpus=text,data.train={__file__}", "error: there is no file 'valid' (seen from "),
        ("data.corpus=hub", "error: data.name is empty, but corpus=hub needs the dataset's name; set data.name"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, argument, message):
    done = prepare_data(tmp_path, argument)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
