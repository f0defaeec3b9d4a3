"""A folder of the Hugging Face hub becomes a work directory."""

import dataclasses
import hashlib
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from alibi.config import Config, replaced
from alibi.convert.families import Entry, Family, HubConfig, family_of
from alibi.convert.folder import CONFIG, FLOATS, HubFolder, find_folder
from alibi.convert.work_directory import empty_run, write_run
from alibi.data.tokenizers import Tokenizer, read_tokenizer
from alibi.model.decoder import build_model, param_shapes
from alibi.parallel import hosts
from alibi.parallel.memory import check_memory
from alibi.parallel.sharding import laid_out
from alibi.runs import RunDirectory, make_provenance, process_facts
from alibi.runs.checkpoint import TrainState
from alibi.runs.trained import fitting_mesh
from alibi.storage.cache import file_sha256

HUB = "hub"  # the folder in the work directory with the small files of the hub's folder

# Written beside config.json, for `train.py --config=DIR/config.py`.
CONFIG_FILE = '''"""A run that starts with the model here: python train.py --config=DIR/config.py --workdir=NEW"""

import json
import pathlib

import ml_collections

from alibi.config import apply, as_config_dict, read_config


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    folder = pathlib.Path(__file__).resolve().parent  # which may have been moved since
    saved = json.loads((folder / "config.json").read_text())
    saved |= {"imported_from": "", "init_from": str(folder)}
    saved["data"]["tokenizer_file"] = str(folder / "tokenizer" / "tokenizer.json")
    saved["model"]["param_dtype"] = "float32"
    config = apply(as_config_dict(read_config(saved | {"position_options": {}})), arg)
    if config.position != saved["position"]:  # another method has other options
        return config
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
) -> RunDirectory:
    """Makes a work directory from a model of the hub: its config, tokenizer and parameters, without
    an optimizer's state.

    Parameters are read tensor by tensor, the largest first, and each process keeps its devices'
    parts alone.

    Args:
      model: a folder, or a name on the hub.
      workdir: a directory or gs://BUCKET/PATH, which must be empty or absent.
      config: the text, the mesh, and the settings of further training; the folder's model, position
        method and length take the place of its own.
      revision: on the hub.
      dtype: of the saved parameters: float32, bfloat16, float16, or "keep" for the files' own
        (float32 if these differ).
      tokenizer_file: in place of the folder's.
      ignored: keys of config.json that are not read.

    Raises:
      ValueError: an unknown architecture or key; another objective; a file, tensor or tokenizer that is missing,
        damaged or doesn't fit; too little memory; a work directory with files.
    """
    if not config.objective.causal:
        raise ValueError(
            f"objective={config.objective.name} doesn't go with models of the hub, which predict the next token; use "
            "objective=next_token"
        )
    run = empty_run(workdir)
    folder = HubFolder(find_folder(model, revision))
    family, config = _described(folder, config, ignored)
    if config.model.num_layers > len(folder.names):  # to build so many would take long
        raise ValueError(
            f"{folder.path}: config.json asks for {config.model.num_layers:,} layers, and the files have "
            f"{len(folder.names):,} tensors; download it again"
        )
    file = (
        pathlib.Path(os.path.expanduser(tokenizer_file))
        if tokenizer_file
        else folder.tokenizer_file()
    )
    config = dataclasses.replace(config, imported_from=_sha256(folder))
    config = replaced(
        config,
        {"data.tokenizer": "bpe", "data.tokenizer_file": str(file)}
        | {"model.param_dtype": _param_dtype(folder, family, dtype)},
    )
    rows = config.model.vocab_rows
    tokenizer = read_tokenizer(file, [end for end in folder.ends if 0 <= end < rows], rows)
    hosts.check_alike({**process_facts(config), "tokenizer": tokenizer.fingerprint()})
    params = read_params(folder, family, config, tokenizer)
    about = make_provenance(
        imported_from={
            "model": model,
            "revision": revision,
            "family": family.name,
            "architecture": folder.config["architectures"][0],
            "sha256": config.imported_from,
            "files": {file.name: file_sha256(file) for file in folder.kept},
        },
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        vocab_size=tokenizer.vocab_size,
        corpus={},
    )
    state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=None)
    write_run(run, config, tokenizer, state, about, CONFIG_FILE, lambda path: _keep(folder, path))
    return run


def _described(
    folder: HubFolder, config: Config, ignored: tuple[str, ...]
) -> tuple[Family, Config]:
    """Returns the family of a folder, and `config` with the model that its config.json describes;
    ValueError for a value that is not implemented, or of another type.
    """
    named = folder.config.get("architectures")
    try:
        if named is not None and not _is_list_of_names(named):
            raise ValueError(f"config.json has architectures={named!r}, which is no list of names")
        family = family_of(folder.config)
        settings = family.settings(folder.config, ignored) | {"model.scan_layers": False}
        return family, replaced(dataclasses.replace(config, position_options={}), settings)
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}") from error
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(
            f"{folder.path}: config.json has a value whose type or size doesn't fit {', '.join(named or ())} "
            f"({error}); download it again"
        ) from error


def _is_list_of_names(named: Any) -> bool:
    return isinstance(named, list) and all(isinstance(name, str) for name in named)


def read_params(folder: HubFolder, family: Family, config: Config, tokenizer: Tokenizer) -> PyTree:
    """Returns the parameters of a folder on the devices of `config.mesh`; ValueError for tensors
    that don't fit the model.
    """
    model = build_model(config, tokenizer.vocab_size)
    abstract = laid_out(param_shapes(model), fitting_mesh(config.mesh))
    check_memory(
        f"the model in {folder.path}",
        abstract,
        "split it over more devices by --config=FILE:mesh.fsdp=N, or import it by --dtype=bfloat16",
    )
    leaves = by_path(abstract)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    entries = model_entries(family, folder.config, config, shapes)
    names = _names(folder, family, entries, shapes)
    made: dict[str, jax.Array] = {}

    def place(path: str, read: Any) -> None:
        leaf = leaves[path]
        made[path] = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: cast(read(index), leaf.dtype, path)
        )
        made[path].block_until_ready()  # before the tensor is freed

    # The largest first: what is read beside it is then small.
    for entry in sorted(entries, key=lambda entry: -np.prod(entry.shape(shapes))):
        name = names[entry.theirs]
        if entry.copies:
            place(entry.ours[0], lambda index, name=name: folder.read(name, index))
        else:
            for path, array in entry.to_ours(folder.read(name), shapes):
                place(path, array.__getitem__)
    return jax.tree.map_with_path(lambda path, _: made[path_name(path)], abstract)


def cast(array: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Returns an array in another dtype; ValueError, which says its `name`, for NaN and infinity."""
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
    """Returns the tensors of a family that hold parameters of the model.

    Raises:
      ValueError: a parameter that no tensor of the family holds.
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
    folder: HubFolder, family: Family, entries: list[Entry], shapes: dict[str, tuple[int, ...]]
) -> dict[str, str]:
    """Returns the folder's name of each entry; ValueError for tensors that are missing, left over,
    or of another shape or dtype.
    """
    lacks_prefix = not any(name.startswith(family.prefix) for name in folder.names)
    names = {
        entry.theirs: entry.theirs.removeprefix(family.prefix) if lacks_prefix else entry.theirs
        for entry in entries
    }
    missing = sorted(set(names.values()) - folder.names)
    left = sorted(
        name
        for name in folder.names - set(names.values())
        if not re.fullmatch(family.buffers, name)
    )
    first = names[entries[0].theirs]
    if "lm_head.weight" in left and not missing:  # some files repeat the tied matrix
        if not np.array_equal(folder.read("lm_head.weight"), folder.read(first)):
            raise ValueError(
                f"{folder.path}: lm_head.weight differs from {first}, to which config.json ties it; set "
                "tie_word_embeddings to false there"
            )
        left.remove("lm_head.weight")
    found = {"lacks": missing, "has no place for": left}
    if missing == [names.get("lm_head.weight")]:
        raise ValueError(
            f"{folder.path} lacks lm_head.weight, and its config.json doesn't tie that to {first}; set "
            "tie_word_embeddings to true there if the model has one matrix for both"
        )
    if shown := [f"{words} {_counted(names)}" for words, names in found.items() if names]:
        raise ValueError(
            f"{folder.path} {' and '.join(shown)}: its config.json, its index or its files are of another model than "
            f"{family.architectures[0]} here"
        )
    for entry in entries:
        name, needed = names[entry.theirs], entry.shape(shapes)
        if folder.shape(name) != needed:
            raise ValueError(
                f"{folder.path}: tensor {name} has shape {list(folder.shape(name))}, and config.json "
                f"needs {list(needed)}"
            )
        if folder.dtype(name) not in FLOATS:
            raise ValueError(
                f"{folder.path}: tensor {name} has dtype {folder.dtype(name)}; only {', '.join(FLOATS)} can be read, "
                "so give the model before it was quantised"
            )
    return names


def _counted(names: list[str]) -> str:
    """Returns the number of tensors with the first three names."""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"


def _param_dtype(folder: HubFolder, family: Family, dtype: str) -> str:
    """Returns the dtype of the parameters, "keep" resolved."""
    if dtype != "keep":
        return dtype
    parameters = {name for name in folder.names if not re.fullmatch(family.buffers, name)}
    kept = {folder.dtype(name) for name in parameters} & {*FLOATS}
    return kept.pop() if kept in ({"bfloat16"}, {"float16"}) else "float32"


def _sha256(folder: HubFolder) -> str:
    """Returns the SHA-256 of config.json and of the files with weights, one after the other."""
    files = [folder.path / CONFIG, *folder.files]
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


def _keep(folder: HubFolder, path: Any) -> None:
    """Copies the small files beside the weights, for an export."""
    (path / HUB).mkdir()
    for file in folder.kept:
        (path / HUB / file.name).write_bytes(file.read_bytes())


def path_name(path: Any) -> str:
    """Returns the names on a path of a pytree, such as "layers_0/attention/query/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by the names on their path."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
