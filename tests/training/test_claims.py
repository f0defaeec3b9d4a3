"""A single process at a time trains in a work directory."""

import errno
import fcntl
import pathlib

import pytest

from alibi.data.tokenizers import ByteTokenizer, WordTokenizer
from alibi.errors import UserError
from alibi.runs import RunDirectory
from alibi.training import loop


def test_a_run_that_began_meanwhile_is_not_mixed_with_another(
    tiny_config, tmp_path: pathlib.Path
) -> None:
    """Between the check and the lock the text is prepared, for up to an hour."""
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    configs = tiny_config(seed=1), tiny_config(seed=2)
    first.check(configs[0])
    second.check(configs[1])
    first.claim(configs[0], ByteTokenizer())
    with pytest.raises(ValueError, match="another process is training in"):
        loop.train(configs[0], str(tmp_path / "run"))
    first.release()
    with pytest.raises(ValueError, match=r"another config:\n  seed: 1 there, 2 now"):
        second.claim(configs[1], ByteTokenizer())
    assert first.config().seed == 1
    with pytest.raises(ValueError, match=r"the tokenizer of the run in .* is another"):
        second.claim(configs[0], WordTokenizer(dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>"], 0)))
    first.claim(configs[0], ByteTokenizer())  # the lock was given back
    first.release()


def test_without_file_locks_the_newest_start_wins(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """The older process stops before its next write of a checkpoint or a status."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write, later = RunDirectory.write_status, RunDirectory(tmp_path)

    def write_status(run: RunDirectory, state: str, *, step: int, **more: object) -> None:
        write(run, state, step=step, **more)
        if (state, step) == ("running", 3):
            later.claim(run.config(), run.tokenizer())

    monkeypatch.setattr(RunDirectory, "write_status", write_status)
    with pytest.raises(
        UserError, match=r"a process that started later is training in .*; this one stops"
    ):
        loop.train(tiny_config(), str(tmp_path))
    assert later.saved_steps() in ([2], [2, 3])
    later.check_claim()
    assert later.status()["state"] == "running"  # as it was when the later process came
