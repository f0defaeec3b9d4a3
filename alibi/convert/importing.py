"""Other codebases' models become work directories."""

import dataclasses
import hashlib
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from alibi.config import Config, replaced
from alibi.convert.families import Entry, Family, HubConfig, fairseq, family_of
from alibi.convert.folder import HubFolder, find_folder
from alibi.convert.tensors import CONFIG, FLOATS, Model, to_safetensors
from alibi.convert.work_directory import empty_run, write_run
from alibi.data.tokenizers import Tokenizer, WordTokenizer, read_dictionary, read_tokenizer
from alibi.devices.memory import check_memory
from alibi.model.decoder import build_model, param_shapes
from alibi.objectives import make_objective
from alibi.optimizers import make_optimizer
from alibi.parallel import hosts
from alibi.parallel.axes import by_path
from alibi.parallel.sharding import laid_out
from alibi.runs import RunDirectory, make_provenance, process_facts
from alibi.runs.checkpoint import TrainState
from alibi.runs.trained import fitting_mesh
from alibi.storage.cache import file_sha256

MASKS = "[MASK]", "<mask>"  # names of the mask token
KEPT = "kept.safetensors"  # in HUB: the tensors that the model doesn't use
HUB = "hub"  # the folder in the work directory with the small files of the hub's folder

# Each is written beside config.json, for `train.py --config=DIR/config.py`.
STARTED_FILE = '''"""A run that starts with the model here: python train.py --config=DIR/config.py --workdir=NEW"""

import json
import pathlib

import ml_collections

from alibi.config import Config, apply, as_config_dict, read_config, whole_sequences

LEARNING_RATE = 2e-5  # in place of the default, which suits random parameters


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    folder = pathlib.Path(__file__).resolve().parent  # which may have been moved since
    saved = json.loads((folder / "config.json").read_text())
    saved |= {"imported_from": "", "init_from": str(folder)}
    saved["data"]["tokenizer_file"] = str(folder / "tokenizer" / "tokenizer.json")
    saved["model"]["param_dtype"] = "float32"
    if saved["optimizer"]["learning_rate"] == Config().optimizer.learning_rate:
        saved["optimizer"]["learning_rate"] = LEARNING_RATE
    config = started(saved | {"position_options": {}}, arg)
    # another method has other options
    return started(saved, arg) if config.position == saved["position"] else config


def started(saved: dict, arg: str) -> ml_collections.ConfigDict:
    config = as_config_dict(read_config(saved))
    config.train.batch_tokens = whole_sequences(config.train.batch_tokens, config)
    return apply(config, arg)
'''


CONTINUED_FILE = '''"""The config of the run in this directory: python train.py --config=DIR/config.py --workdir=DIR"""

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


def import_model(
    model: str,
    workdir: str | os.PathLike[str],
    config: Config,
    *,
    revision: str = "",
    dtype: str = "keep",
    tokenizer_file: str = "",
    ignored: tuple[str, ...] = (),
    train_length: int = 0,
) -> RunDirectory:
    """Makes a work directory from a model of the hub, without an optimizer's state.

    Tensors are read one by one, the largest first. Each process keeps its devices' parts alone.

    Args:
      model: a folder, or a name on the hub.
      workdir: a directory or gs://BUCKET/PATH, empty or absent.
      config: text, mesh and settings for further training. The folder's model, position method and
        length replace its own.
      revision: a branch, tag or commit on the hub.
      dtype: saved parameters have float32, bfloat16, float16, or with "keep" the files' dtype
        (float32 if these differ).
      tokenizer_file: replaces the folder's tokenizer.
      ignored: keys in config.json that are not read.
      train_length: tokens of a sequence in an encoder's training, where config.json has another
        length. Defaults to config.json's.

    Raises:
      ValueError: an unknown architecture or key, another objective, a file, tensor or tokenizer that
        is missing, damaged or doesn't fit, too little memory, a work directory with files.
    """
    run = empty_run(workdir)
    folder = HubFolder(find_folder(model, revision))
    family, config = describe(folder, config, ignored)
    if train_length and not family.masked_head:
        raise ValueError(
            f"--train_length={train_length} is for encoders; config.json of {family.architectures[0]} has the length "
            "of its training, so leave it out"
        )
    if config.model.num_layers > len(folder.tensors):  # to build so many would take long
        raise ValueError(
            f"{folder.path}: config.json asks for {config.model.num_layers:,} layers, and the files have "
            f"{len(folder.tensors):,} tensors; download it again"
        )
    named = pathlib.Path(os.path.expanduser(tokenizer_file))
    file = named if tokenizer_file else folder.tokenizer_file()
    rows = config.model.vocab_rows
    tokenizer = read_tokenizer(file, [end for end in folder.ends if 0 <= end < rows], rows)
    hashes = "".join(map(file_sha256, [folder.path / CONFIG, *folder.files]))
    keys: dict[str, Any] = {
        "imported_from": hashlib.sha256(hashes.encode()).hexdigest(),
        "data.tokenizer": "bpe",
        "data.tokenizer_file": str(file),
        "model.param_dtype": _param_dtype(folder, family) if dtype == "keep" else dtype,
        "train_length": train_length or config.train_length,
    }
    if family.masked_head:
        masks = [tokenizer.special_ids[name] for name in MASKS if name in tokenizer.special_ids]
        if not masks:
            raise ValueError(
                f"{file} has no special token {' or '.join(MASKS)}, which stands for masked tokens; give the tokenizer "
                "of this model by --tokenizer_file"
            )
        keys["objective.mask_id"] = masks[0]
    config = replaced(config, keys)
    hosts.check_alike({**process_facts(config), "tokenizer": tokenizer.fingerprint()})
    small = {file.name: file.read_bytes() for file in folder.kept}
    if kept := [name for name in folder.tensors if re.fullmatch(family.kept, name)]:
        small[KEPT] = to_safetensors({name: folder.tensors[name].read() for name in kept})
    origin = {
        "model": model,
        "revision": revision,
        "family": family.name,
        "architecture": folder.config["architectures"][0],
        "sha256": config.imported_from,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in small.items()},
        "lengths": {key: folder.config[key] for key in family.lengths if folder.config.get(key)},
        "set_aside": kept,
    }
    params = read_params(folder, family, config, tokenizer.vocab_size)
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=None)

    def keep(path: Any) -> None:
        (path / HUB).mkdir()
        for name, content in small.items():
            (path / HUB / name).write_bytes(content)

    write_run(
        run, config, tokenizer, state, _provenance(state, tokenizer, origin), STARTED_FILE, keep
    )
    return run


def import_fairseq(
    checkpoint: str | os.PathLike[str],
    dictionary: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    config: Config,
    *,
    position: str = "",
) -> RunDirectory:
    """Makes a work directory, as training leaves it, from a checkpoint of the paper's own code.

    Training continues with an empty momentum, at the learning rate of the checkpoint's update.

    Args:
      dictionary: the dict.txt of its training.
      workdir: a directory or gs://BUCKET/PATH, empty or absent.
      config: text, and settings for further training.
      position: alibi, sinusoidal or none. Defaults to the one that the checkpoint's settings show.

    Raises:
      ValueError: another position method or objective, an unreadable checkpoint or dictionary, a
        dictionary of another checkpoint, a work directory with files.
    """
    if position and position not in fairseq.POSITIONS:
        raise ValueError(
            f"position={position!r} is none of fairseq's; use one of {', '.join(fairseq.POSITIONS)}"
        )
    run = empty_run(workdir)
    model = fairseq.read_checkpoint(pathlib.Path(os.path.expanduser(checkpoint)))
    _, config = describe(model, config, family=fairseq.FAMILY)
    tokenizer, rows = WordTokenizer(read_dictionary(dictionary)), model.config["vocab_size"]
    if tokenizer.vocab_size != rows:
        raise ValueError(
            f"the dictionary {os.fspath(dictionary)} has {tokenizer.vocab_size:,} entries (with special symbols and "
            f"padding to a multiple of 8) and the checkpoint {rows:,}; give the dict.txt that it was trained with"
        )
    # As the paper's code does, each device's share of the batch is cut to whole sequences: 8 shares
    # of 8,192 tokens.
    tokens, share = config.train.batch_tokens, config.train.max_device_tokens
    share = share if share and tokens % share == 0 else tokens
    sequences = max(share // config.train_length, 1)
    keys = {
        "imported_from": file_sha256(checkpoint),
        "position": position or config.position,
        "data.tokenizer": "words",
        "data.tokenizer_file": f"{run}/tokenizer/dict.txt",
        "train.batch_tokens": tokens // share * sequences * config.train_length,
    }
    config = replaced(config, keys)
    params = read_params(model, fairseq.FAMILY, config, tokenizer.vocab_size)
    updates = jnp.asarray(model.config["num_updates"], jnp.int32)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    opt_state = optax.tree_utils.tree_set(optimizer.init(params), count=updates)
    state = TrainState(step=updates, params=params, opt_state=opt_state)
    shown = fairseq.position(model.config)[1]
    origin = {
        "checkpoint": os.fspath(checkpoint),
        "sha256": config.imported_from,
        "position_reason": "given by --position" if position else shown,
    }
    write_run(run, config, tokenizer, state, _provenance(state, tokenizer, origin), CONTINUED_FILE)
    return run


def _provenance(state: TrainState, tokenizer: Tokenizer, origin: dict[str, Any]) -> dict[str, Any]:
    return make_provenance(
        imported_from=origin,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        vocab_size=tokenizer.vocab_size,
        corpus={},
    )


def describe(
    model: Model, config: Config, ignored: tuple[str, ...] = (), family: Family | None = None
) -> tuple[Family, Config]:
    """Returns a model's family (defaults to the one that its config names), and `config` with
    the model. Raises ValueError for a value that is not implemented, or of another type.
    """
    named = model.config.get("architectures") or []
    try:
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValueError(f"config.json has architectures={named!r}, which is no list of names")
        family = family or family_of(model.config, model.tensors)
        settings = family.settings(model.config, ignored) | {"model.scan_layers": False}
        if family.masked_head:
            has_head = any(name.startswith(family.masked_head) for name in model.tensors)
            settings |= {"objective.name": "masked", "model.masked_head": has_head}
        elif (objective := make_objective(config)).both_sides or objective.added_tokens:
            raise ValueError(
                f"objective={config.objective.name} doesn't go with models that predict the next token; use "
                "objective=next_token"
            )
        return family, replaced(dataclasses.replace(config, position_options={}), settings)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(
            f"{model.path}: its config has a value whose type or size doesn't fit {', '.join(named)} "
            f"({error}); download it again"
        ) from error


def read_params(theirs: Model, family: Family, config: Config, vocab_size: int) -> PyTree:
    """Returns the parameters on the devices of `config.mesh`. Raises ValueError for tensors that don't fit
    the model.
    """
    model = build_model(config, vocab_size)
    abstract = laid_out(param_shapes(model), fitting_mesh(config.mesh))
    check_memory(
        f"the model in {theirs.path}",
        abstract,
        "split it over more devices by --config=FILE:mesh.fsdp=N, or import it by --dtype=bfloat16",
    )
    leaves = by_path(abstract)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    entries = model_entries(family, theirs.config, config, shapes)
    names = _names(theirs, family, entries, shapes)
    made: dict[str, jax.Array] = {}

    def place(path: str, array: np.ndarray) -> None:
        leaf = leaves[path]
        made[path] = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: cast(array[index], leaf.dtype, path)
        )
        made[path].block_until_ready()  # before the tensor is freed

    # The largest first: what is read beside it is then small.
    for entry in sorted(entries, key=lambda entry: -np.prod(entry.shape(shapes))):
        tensor = theirs.tensors[names[entry.theirs]]
        for path, array in entry.to_ours(tensor.read(), shapes):
            place(path, array)
    return jax.tree.unflatten(jax.tree.structure(abstract), [made[path] for path in leaves])


def cast(array: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Returns an array in another dtype. Raises ValueError, which says its `name`, for NaN and infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.ascontiguousarray(array.astype(dtype, copy=False))
        # As integers, numbers of a sign grow away from 0, up to infinity and NaN.
        ends = np.array([np.inf, -np.inf]).astype(made.dtype).view(f"u{made.itemsize}")
        if any(
            made.view(f"{sign}{made.itemsize}").max(initial=0) >= end
            for sign, end in zip("iu", ends, strict=True)
        ):
            if np.isfinite(array).all():
                raise ValueError(
                    f"{name} has numbers of up to {float(abs(array).max()):.3g}, and {made.dtype} ends at "
                    f"{float(jnp.finfo(made.dtype).max):,.5g}; use --dtype=bfloat16 or float32"
                )
            raise ValueError(
                f"{name} has NaN or infinite numbers; take an undamaged copy of the model"
            )
    return made


def model_entries(
    family: Family, content: dict[str, Any], config: Config, shapes: dict[str, tuple[int, ...]]
) -> list[Entry]:
    """Returns the family's tensors that hold the model's parameters.

    Raises:
      ValueError: a parameter that no tensor holds.
    """
    layers = config.model.num_layers
    entries = [
        one
        for entry in family.entries(HubConfig(content))
        for one in entry.of_layers(layers)
        if all(path in shapes for path in one.ours)
    ]
    held = {path for entry in entries for path in entry.ours}
    if lost := sorted(shapes.keys() - held):
        raise ValueError(
            f"{family.architectures[0]} has no tensor for {len(lost)} parameters, such as {lost[0]}"
        )
    return entries


def _names(
    model: Model, family: Family, entries: list[Entry], shapes: dict[str, tuple[int, ...]]
) -> dict[str, str]:
    """Returns each entry's name in the file. Raises ValueError for tensors that are missing, left over, or
    of another shape or dtype.
    """
    tensors = model.tensors
    lacks_prefix = not any(name.startswith(family.prefix) for name in tensors)
    names = {
        entry.theirs: entry.theirs.removeprefix(family.prefix) if lacks_prefix else entry.theirs
        for entry in entries
    }
    missing = sorted(set(names.values()) - tensors.keys())
    left = [
        name
        for name in sorted(tensors.keys() - set(names.values()))
        if not re.fullmatch(f"{family.buffers}|{family.kept}", name)
    ]
    first = names[entries[0].theirs]
    tied = family.tied or {"lm_head.weight": first}
    for name in tied.keys() & left if not missing else ():  # some files repeat a tied matrix
        if not np.array_equal(
            tensors[name].read(), tensors[names.get(tied[name], tied[name])].read()
        ):
            raise ValueError(
                f"{model.path}: {name} differs from {tied[name]}, to which {family.file} ties it; {family.untie}"
            )
        left.remove(name)
    if missing == [names.get("lm_head.weight")]:
        raise ValueError(
            f"{model.path} lacks lm_head.weight, and its config.json doesn't tie that to {first}; set "
            "tie_word_embeddings to true there if the model has one matrix for both"
        )
    shown = [
        f"{words} {len(unfit)} tensor{'s' * (len(unfit) > 1)} ({', '.join(unfit[:3])}{', ...' * (len(unfit) > 3)})"
        for words, unfit in (("lacks", missing), ("has no place for", left))
        if unfit
    ]
    if shown:
        raise ValueError(
            f"{model.path} {' and '.join(shown)}: its config.json, its index or its files are of another model than "
            f"{family.architectures[0]} here"
        )
    for entry in entries:
        name, needed = names[entry.theirs], entry.shape(shapes)
        if tensors[name].shape != needed:
            raise ValueError(
                f"{model.path}: tensor {name} has shape {list(tensors[name].shape)}, and {family.file} "
                f"needs {list(needed)}"
            )
        if tensors[name].dtype not in FLOATS:
            raise ValueError(
                f"{model.path}: tensor {name} has dtype {tensors[name].dtype}; only {', '.join(FLOATS)} can be read, "
                "so give the model before it was quantised"
            )
    return names


def _param_dtype(folder: HubFolder, family: Family) -> str:
    """Returns the files' dtype, or float32 if these differ."""
    kept = {
        tensor.dtype
        for name, tensor in folder.tensors.items()
        if tensor.dtype in FLOATS and not re.fullmatch(family.buffers, name)
    }
    return kept.pop() if kept in ({"bfloat16"}, {"float16"}) else "float32"
