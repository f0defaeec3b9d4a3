"""A checkpoint of the paper's own code becomes a work directory."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from jaxtyping import PyTree

from alibi.convert.fairseq.archive import Archive
from alibi.convert.fairseq.parameters import Architecture, architecture, to_params
from alibi.convert.fairseq.settings import POSITIONS, Settings, read_settings
from alibi.convert.fairseq.unpickle import Tensor
from alibi.data.cache import file_sha256
from alibi.data.dictionary import read_dictionary
from alibi.data.tokenizers import WordTokenizer
from alibi.model.decoder import build_model, param_shapes
from alibi.runs import RunDirectory, make_provenance
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.storage.atomic import is_address, made_whole
from alibi.training.optimizer import make_optimizer

# Written beside config.json, so that training can be told the run's own config.
CONFIG_FILE = '''"""The config of the run in this directory: python train.py --config=DIR/config.py --workdir=DIR"""

import json
import pathlib

import ml_collections

from alibi.runs import completed
from configs import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    folder = pathlib.Path(__file__).resolve().parent  # which may have been moved since
    saved = json.loads((folder / "config.json").read_text())
    saved["model"]["cutoffs"] = tuple(saved["model"]["cutoffs"])
    saved["data"]["tokenizer_file"] = str(folder / "tokenizer" / "dict.txt")
    return base.apply(completed(ml_collections.ConfigDict(saved)), arg)
'''


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was found in a checkpoint, and the work directory that was made of it."""

    run: RunDirectory
    config: ml_collections.ConfigDict
    settings: Settings
    parameters: int
    vocab_size: int


def import_run(
    checkpoint: str | os.PathLike[str],
    dictionary: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    config: ml_collections.ConfigDict,
    *,
    position: str = "",
) -> Imported:
    """Makes `workdir`, a directory or gs://BUCKET/PATH, of a fairseq checkpoint and its dict.txt, as training would.

    Further training begins with an empty momentum, at the learning rate of the checkpoint's
    update.

    Args:
      config: what the checkpoint doesn't say: the text, and how further training goes.
      position: a name from `alibi.convert.fairseq.settings.POSITIONS`; empty: as the checkpoint says.

    Raises:
      ValueError: a checkpoint or dictionary that can't be used, or that don't belong
        together; a work directory that isn't empty. Nothing is left behind.
    """
    run = RunDirectory(workdir)
    if run.store.names() or not (is_address(str(run)) or _is_free(run.path)):
        raise ValueError(f"work directory {run} holds something already; choose another --workdir, or remove it")
    if position not in ("", *POSITIONS):
        raise ValueError(f"position={position!r} is unknown; use one of {', '.join(POSITIONS)}")
    with Archive(checkpoint) as archive:
        try:
            sizes, settings, params = _read(archive.content)
        except ValueError as error:
            raise ValueError(f"checkpoint {os.fspath(checkpoint)} can't be used: {error}") from error
    settings = dataclasses.replace(settings, position=position or settings.position)
    tokenizer = _read_tokenizer(dictionary, sizes.vocab_size)
    sha256 = file_sha256(checkpoint)
    config = _complete(config, sizes, settings, str(run), sha256)
    state = _state(config, params, sizes.vocab_size, settings.updates)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    origin = {"checkpoint": os.fspath(checkpoint), "sha256": sha256}
    about = make_provenance(imported_from=origin, parameters=parameters, vocab_size=sizes.vocab_size, corpus={})
    _write(run, config, tokenizer, state, about)
    return Imported(run, config, settings, parameters, sizes.vocab_size)


def _is_free(path: pathlib.Path) -> bool:
    """Whether a directory can be made there: nothing is there, or an empty one."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _read(content: Any) -> tuple[Architecture, Settings, PyTree]:
    tensors = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError("it holds no tensors under `model`; give the .pt file that fairseq wrote")
    if not all(isinstance(name, str) for name in tensors):
        raise ValueError("it holds tensors whose names are no strings; give the .pt file that fairseq wrote")
    arrays = {name: tensor.read() for name, tensor in tensors.items()}
    sizes = architecture(arrays)
    settings = read_settings(content, sizes)
    return sizes, settings, to_params(arrays, settings.num_heads)


def _read_tokenizer(dictionary: str | os.PathLike[str], vocab_size: int) -> WordTokenizer:
    tokenizer = WordTokenizer(read_dictionary(dictionary))
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"the dictionary {os.fspath(dictionary)} has {tokenizer.vocab_size:,} entries (with special symbols and "
            f"padding to a multiple of 8) and the checkpoint {vocab_size:,}; give the dict.txt that it was trained with"
        )
    return tokenizer


def _complete(
    config: ml_collections.ConfigDict, sizes: Architecture, settings: Settings, workdir: str, sha256: str
) -> ml_collections.ConfigDict:
    """`config` with all that the checkpoint says."""
    config = config.copy_and_resolve_references()
    config.update(seed=settings.seed, train_length=settings.train_length, imported_from=sha256)
    config.position, config.position_options = settings.position, ml_collections.ConfigDict()
    config.model.update(sizes.config | settings.rates)
    config.model.update(num_heads=settings.num_heads, activation=settings.activation)
    config.data.update(tokenizer="words", tokenizer_file=f"{workdir}/tokenizer/dict.txt")
    config.train.batch_tokens = _whole_batch(config)
    return config


def _whole_batch(config: ml_collections.ConfigDict) -> int:
    """train.batch_tokens with each device's part of it cut to whole sequences, as the paper's code does: 8 x 8,192."""
    tokens, part, length = config.train.batch_tokens, config.train.max_device_tokens, config.train_length
    part = part if part and tokens % part == 0 else tokens
    return tokens // part * max(part // length, 1) * length


def _state(config: ml_collections.ConfigDict, params: PyTree, vocab_size: int, updates: int) -> TrainState:
    """The state of a run of `config` after `updates`; ValueError where its model has other parameters."""
    model = build_model(config, vocab_size)
    ours, theirs = _shapes(param_shapes(model)), _shapes(params)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"parameter {name} has shape {theirs.get(name)} in the checkpoint and {ours.get(name)} in the model "
                "of its settings; it is of another architecture"
            )
    params = jax.tree.map(jnp.asarray, params)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    opt_state = optax.tree_utils.tree_set(optimizer.init(params), count=jnp.asarray(updates, jnp.int32))
    return TrainState(step=jnp.asarray(updates, jnp.int32), params=params, opt_state=opt_state)


def _shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}


def _write(
    run: RunDirectory,
    config: ml_collections.ConfigDict,
    tokenizer: WordTokenizer,
    state: TrainState,
    provenance: dict[str, Any],
) -> None:
    """All files into a directory beside, which is then renamed, so that nobody ever sees half of them.

    At an address, where nothing is renamed, the status is the last of them: without it nothing goes on from the rest.
    """
    fill = functools.partial(_fill, config=config, tokenizer=tokenizer, state=state, provenance=provenance)
    if is_address(str(run)):
        fill(run)
    else:
        with made_whole(run.path) as partial:
            fill(RunDirectory(partial))


@contextlib.contextmanager
def _emptied_on_failure(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for name in run.store.names():
            run.store.delete(name)
        raise


def _fill(
    run: RunDirectory,
    *,
    config: ml_collections.ConfigDict,
    tokenizer: WordTokenizer,
    state: TrainState,
    provenance: dict[str, Any],
) -> None:
    about = {"config": config.to_dict(), **provenance}
    updates, steps = int(state.step), config.train.steps
    run.claim(config, tokenizer)
    with contextlib.ExitStack() as stack:
        stack.callback(run.release)
        stack.enter_context(_emptied_on_failure(run))  # only now: what is here is of no other process
        run.write("provenance.json", about)
        run.store.write("config.py", CONFIG_FILE)
        with Checkpoints(run.checkpoints) as checkpoints:
            checkpoints.save(state, updates, about)
        reached = "finished" if updates >= steps else "interrupted"
        run.write_status(reached, step=updates, steps=steps, reason="imported", tokens_per_second=None, best=None)
