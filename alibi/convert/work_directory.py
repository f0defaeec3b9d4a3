"""An imported model is written as a work directory."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from alibi.config import Config
from alibi.data.tokenizers import Tokenizer
from alibi.errors import cause
from alibi.parallel import hosts
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.runs.provenance import TOKENIZER
from alibi.storage.claims import remove_left
from alibi.storage.files import check_writable, is_address, listed, made_whole, write_whole

WRITTEN = 1 << 24  # bytes of parameters that are written at a time, beside the largest


def empty_run(workdir: str | os.PathLike[str]) -> RunDirectory:
    """Returns a work directory's run. Raises ValueError if it has files."""
    run = RunDirectory(workdir)
    check_empty(run.path, f"work directory {run}", "--workdir")
    return run


def check_empty(place: epath.Path, name: str, flag: str) -> None:
    """Raises ValueError for a folder with files, hidden ones too, or a place that no new folder can
    replace. Removes what killed processes left beside it.

    Args:
      name: the place in messages.
      flag: the flag that chooses another place.
    """
    remove_left(place)
    if place.exists() and (not place.is_dir() or listed(place) or any(place.iterdir())):
        raise ValueError(f"{name} is not empty; choose another {flag}, or remove it")
    if is_address(place):
        return
    if os.path.islink(place) or os.path.ismount(place):
        raise ValueError(
            f"{name} is a link or a disk of its own, which no new folder can replace; choose a folder in it by {flag}"
        )
    try:
        check_writable(place.parent)
    except OSError as error:
        raise ValueError(f"{name} can't be made ({cause(error)}); choose another {flag}") from None


def write_run(
    run: RunDirectory,
    config: Config,
    tokenizer: Tokenizer,
    state: TrainState,
    provenance: dict[str, Any],
    config_file: str,
    add: Callable[[epath.Path], None] = lambda path: None,
) -> None:
    """Writes an imported run's files. A local directory appears when it is whole.

    The status is written last: without it nothing continues from the other files.

    Args:
      config_file: its config.py.
      add: writes further files into the directory.
    """
    provenance = {
        "config": dataclasses.asdict(config),
        **provenance,
        TOKENIZER: tokenizer.fingerprint(),
    }
    step, steps = int(state.step), config.train.steps
    shared = is_address(str(run)) or jax.process_count() > 1
    with contextlib.nullcontext(run.path) if shared else made_whole(run.path) as path:
        made = RunDirectory(path)

        def begin() -> None:
            made.claim(config, tokenizer)
            made.write("provenance.json", provenance)
            write_whole(made.path / "config.py", config_file)
            add(made.path)

        def end() -> None:
            reached = "finished" if step >= steps or state.opt_state is None else "interrupted"
            rates = {"tokens_per_second": None, "best": None}
            made.write_status(reached, step=step, steps=steps, reason="imported", **rates)

        try:
            hosts.broadcast(begin)
            largest = max(leaf.nbytes for leaf in jax.tree.leaves(state.params))
            with Checkpoints(made.checkpoints, written_bytes=largest + WRITTEN) as checkpoints:
                checkpoints.save(state, step, provenance)
            hosts.broadcast(end)
        finally:
            made.release()
