"""A checkpoint of the paper's own code becomes a work directory."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath
from jaxtyping import PyTree

from alibi.config import Config, replaced
from alibi.convert import fairseq
from alibi.data.tokenizers import Tokenizer, WordTokenizer, read_dictionary
from alibi.errors import cause
from alibi.model.decoder import build_model, param_shapes
from alibi.parallel import hosts
from alibi.runs import RunDirectory, make_provenance
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.runs.provenance import TOKENIZER
from alibi.storage.cache import file_sha256
from alibi.storage.claims import remove_left
from alibi.storage.files import check_writable, is_address, listed, made_whole, write_whole
from alibi.training.optimizer import make_optimizer

WRITTEN = 1 << 24  # bytes of parameters that are written at a time, beside the largest

# Written beside config.json, for `train.py --config=DIR/config.py`.
CONFIG_FILE = '''"""The config of the run in this directory: python train.py --config=DIR/config.py --workdir=DIR"""

import json
import pathlib

import ml_collections

from alibi.config import apply, as_config_dict, read_config


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    folder = pathlib.Path(__file__).resolve().parent  # which may have been moved since
    saved = json.loads((folder / "config.json").read_text())
    saved["data"]["tokenizer_file"] = str(folder / "tokenizer" / "dict.txt")
    return apply(as_config_dict(read_config(saved)), arg)
'''


def import_run(
    checkpoint: str | os.PathLike[str],
    dictionary: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    config: Config,
    *,
    position: str = "",
) -> RunDirectory:
    """Makes a work directory, as training leaves it, from a fairseq checkpoint and its dict.txt.

    Its provenance names the checkpoint, and the setting by which its position method was chosen.
    Training continues with an empty momentum, at the learning rate of the checkpoint's update.

    Args:
      workdir: a directory or gs://BUCKET/PATH, which must be empty or absent.
      config: the text, and the settings of further training, which a checkpoint does not have.
      position: a name from `alibi.convert.fairseq.POSITIONS`; empty: as the checkpoint's settings
        show.

    Raises:
      ValueError: an unreadable checkpoint or dictionary, or a dictionary of another checkpoint;
        another objective; a work directory with files.
    """
    run = empty_run(workdir)
    if position not in ("", *fairseq.POSITIONS):
        raise ValueError(
            f"position={position!r} is unknown; use one of {', '.join(fairseq.POSITIONS)}"
        )
    if not config.objective.causal:
        raise ValueError(
            f"objective={config.objective.name} can't go on from a checkpoint of fairseq, a model of the next token; "
            "use objective=next_token"
        )
    content = fairseq.read_checkpoint(checkpoint)
    try:
        sizes = fairseq.architecture(content["model"])
        settings = fairseq.read_settings(content, sizes)
        params = fairseq.to_params(content["model"], settings.num_heads)
    except ValueError as error:
        raise ValueError(f"checkpoint {os.fspath(checkpoint)} can't be used: {error}") from error
    if position:
        settings = dataclasses.replace(
            settings, position=position, position_reason="given by --position"
        )
    tokenizer = WordTokenizer(read_dictionary(dictionary))
    if tokenizer.vocab_size != sizes.vocab_size:
        raise ValueError(
            f"the dictionary {os.fspath(dictionary)} has {tokenizer.vocab_size:,} entries (with special symbols and "
            f"padding to a multiple of 8) and the checkpoint {sizes.vocab_size:,}; give the dict.txt that it was "
            "trained with"
        )
    sha256 = file_sha256(checkpoint)
    config = _complete(config, sizes, settings, str(run), sha256)
    state = _state(config, params, sizes.vocab_size, settings.updates)
    origin = {"checkpoint": os.fspath(checkpoint), "sha256": sha256}
    about = make_provenance(
        imported_from=origin | {"position_reason": settings.position_reason},
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        vocab_size=sizes.vocab_size,
        corpus={},
    )
    write_run(run, config, tokenizer, state, about, CONFIG_FILE)
    return run


def empty_run(workdir: str | os.PathLike[str]) -> RunDirectory:
    """Returns the run of a work directory; ValueError if it has files."""
    run = RunDirectory(workdir)
    check_empty(run.path, f"work directory {run}", "--workdir")
    return run


def check_empty(place: epath.Path, name: str, flag: str) -> None:
    """Raises ValueError for a folder with files, hidden ones too, or a place that no new folder can
    replace; removes what killed processes left beside it.

    Args:
      name: of the place, in messages.
      flag: by which another place is chosen.
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
    """Writes the files of an imported run; a local directory appears when it is whole.

    Args:
      config_file: the content of its config.py.
      add: writes further files into the directory.
    """
    parts = config, tokenizer, state, provenance, config_file, add
    if is_address(str(run)) or jax.process_count() > 1:
        _fill(run, *parts)
    else:
        with made_whole(run.path) as partial:
            _fill(RunDirectory(partial), *parts)


def _complete(
    config: Config,
    sizes: fairseq.Architecture,
    settings: fairseq.Settings,
    workdir: str,
    sha256: str,
) -> Config:
    """Returns `config` with the checkpoint's sizes and settings."""
    model = (
        sizes.config
        | settings.rates
        | {"num_heads": settings.num_heads, "activation": settings.activation}
    )
    config = dataclasses.replace(
        config,
        seed=settings.seed,
        train_length=settings.train_length,
        imported_from=sha256,
        position=settings.position,
        position_options={},
        model=dataclasses.replace(config.model, **model),
        data=dataclasses.replace(
            config.data, tokenizer="words", tokenizer_file=f"{workdir}/tokenizer/dict.txt"
        ),
    )
    # As the paper's code does, each device's share of the batch is cut to whole sequences: 8 shares
    # of 8,192 tokens.
    tokens, share = config.train.batch_tokens, config.train.max_device_tokens
    share = share if share and tokens % share == 0 else tokens
    sequences = max(share // config.train_length, 1)
    return replaced(
        config, {"train.batch_tokens": tokens // share * sequences * config.train_length}
    )


def _state(config: Config, params: PyTree, vocab_size: int, updates: int) -> TrainState:
    """Returns the training state of a run of `config` after `updates`; ValueError if its model has
    other parameters.
    """
    needed = jax.tree.map(lambda leaf: leaf.shape, param_shapes(build_model(config, vocab_size)))
    if jax.tree.map(lambda leaf: leaf.shape, params) != needed:
        raise ValueError(
            "the parameters of the checkpoint are not those of the model that its settings describe"
        )
    params = jax.tree.map(jnp.asarray, params)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    opt_state = optax.tree_utils.tree_set(
        optimizer.init(params), count=jnp.asarray(updates, jnp.int32)
    )
    return TrainState(step=jnp.asarray(updates, jnp.int32), params=params, opt_state=opt_state)


def _fill(
    run: RunDirectory,
    config: Config,
    tokenizer: Tokenizer,
    state: TrainState,
    provenance: dict[str, Any],
    config_file: str,
    add: Callable[[epath.Path], None],
) -> None:
    """Writes the files of the run; the status last, without which nothing continues from the
    others.
    """
    about = {"config": dataclasses.asdict(config), **provenance, TOKENIZER: tokenizer.fingerprint()}
    updates, steps = int(state.step), config.train.steps

    def begin() -> None:
        run.claim(config, tokenizer)
        run.write("provenance.json", about)
        write_whole(run.path / "config.py", config_file)
        add(run.path)

    def end() -> None:
        trained = updates >= steps or state.opt_state is None
        reached = "finished" if trained else "interrupted"
        run.write_status(
            reached, step=updates, steps=steps, reason="imported", tokens_per_second=None, best=None
        )

    try:
        hosts.broadcast(begin)
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        with Checkpoints(run.checkpoints, written_bytes=largest + WRITTEN) as checkpoints:
            checkpoints.save(state, updates, about)
        hosts.broadcast(end)
    finally:
        run.release()
