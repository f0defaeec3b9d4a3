"""A start from the parameters of another run: which of them are taken, new and dropped."""

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from alibi.config import Config, replaced
from alibi.data.tokenizers import given_tokenizer
from alibi.model.decoder import DecoderLM, build_model, param_shapes
from alibi.parallel import hosts
from alibi.parallel.sharding import laid_out
from alibi.positions import changed_options
from alibi.positions.rotary_stretched import check_known_length
from alibi.runs import RunDirectory, config_hash
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training.step import initial_state

# Keys of the model that shape the parameters of no position method, and keys that change their computation.
OF_ADAPTIVE = ("cutoffs", "adaptive_factor")
SHAPING = ("num_layers", "width", "num_heads", "feed_forward", "embedding", *OF_ADAPTIVE)
COMPUTING = ("activation", "final_norm", "norm_epsilon")


class Parent:
    """The run whose latest parameters a run of `config` and `model` starts from; `state` reads them.

    All parameters are taken but some of the position method's: only parameters with the same shape and meaning in both
    methods are. Others are new, or dropped. The method's options may differ, such as T5's buckets or rotary's base.

    Attributes:
      step: the latest checkpoint; after `state` the newest whole checkpoint, which was read.

    Raises:
      ValueError: no work directory or no checkpoint in it; another vocabulary; a model whose parameters have other
        shapes or compute something else; a position method that would use the parent's training length as its own.
    """

    def __init__(self, config: Config, model: DecoderLM):
        self.run = RunDirectory(config.init_from)
        self.config = self.run.config()
        self.step = hosts.broadcast(self._latest)
        self._tokenizer = self.run.tokenizer()
        if config.data.tokenizer != self._tokenizer.name:
            self.check_vocabulary("")
        if tokenizer := given_tokenizer(config.data):  # else it is known with the train text
            self.check_vocabulary(tokenizer.fingerprint())
        theirs = replaced(self.config, {"model.scan_layers": model.config.scan_layers})
        self._model = build_model(theirs, self._tokenizer.vocab_size)  # its layers are laid out as those of `model`
        self._check_model(model)
        named, option = f"init_from={self.run}", "position_options.original_length"
        check_known_length(model.position, self._model.position, named, option)
        self._divide(model)
        self._options = ""
        if config.position == self.config.position:
            changed = changed_options(config.position, self.config.position_options, config.position_options).items()
            if shown := ", ".join(f"{name}={ours!r} ({their!r} there)" for name, (their, ours) in changed):
                self._options = f"; position options: {shown}"

    def _latest(self) -> int:
        self.run.check_checkpoints()
        if not (steps := self.run.saved_steps()):
            raise ValueError(f"init_from={self.run} has no checkpoint to start from; train it first")
        return steps[-1]

    def check_vocabulary(self, fingerprint: str) -> None:
        """Raises ValueError if `fingerprint` is not the parent's tokenizer's."""
        if fingerprint != self._tokenizer.fingerprint():
            own, folder = self._tokenizer, f"{self.run}/tokenizer"
            file = f" and data.tokenizer_file={folder}/{own.file}" if own.file else ""
            raise ValueError(
                f"init_from={self.run} has another vocabulary, of {own.vocab_size:,} tokens ({own.name}), for its "
                f"embeddings; set data.tokenizer={own.name}{file}"
            )

    def _check_model(self, model: DecoderLM) -> None:
        theirs, ours = self._model.config, model.config
        ignored = () if theirs.embedding == "adaptive" else OF_ADAPTIVE
        keys = [key for key in (*SHAPING, *COMPUTING) if key not in ignored]
        values = [(f"model.{key}", _as_flag(getattr(theirs, key)), _as_flag(getattr(ours, key))) for key in keys]
        if differing := [entry for entry in values if entry[1] != entry[2]]:
            shown = ", ".join(f"{key} is {their} there and {our} here" for key, their, our in differing)
            flags = " ".join(f"--config.{key}={their}" for key, their, _ in differing)
            raise ValueError(f"init_from={self.run} has the parameters of another model: {shown}; set {flags}")

    def _divide(self, model: DecoderLM) -> None:
        """Sets the paths of parameters that are taken, new and dropped."""
        ours = _by_path(param_shapes(model.with_vocabulary(self._tokenizer.vocab_size)))
        theirs = _by_path(param_shapes(self._model))
        same = ours.keys() & theirs.keys()
        if not model.position.shares_parameters(self._model.position):
            same = {path for path in same if "position" not in path.split("/")}
        self._taken = {path for path in same if ours[path].shape == theirs[path].shape}
        self._new, self._dropped = (_any_layer(shapes.keys() - self._taken) for shapes in (ours, theirs))
        self.parameters = sum(ours[path].size for path in self._taken)

    def about(self) -> dict[str, Any]:
        """Returns the entry `parent` of the run's provenance."""
        found: dict[str, Any] = {"workdir": str(self.run), "step": self.step, "config_hash": config_hash(self.config)}
        return found | {"taken": self.parameters, "new": self._new, "dropped": self._dropped}

    def describe(self) -> str:
        """Returns a line with the taken, new and dropped parameters, and the position options that differ."""
        new, dropped = (", ".join(names) or "none" for names in (self._new, self._dropped))
        taken = f"{self.parameters:,} parameters taken; new: {new}; dropped: {dropped}{self._options}"
        return f"from {self.run} after {self.step:,} updates: {taken}"

    def state(self, model: DecoderLM, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
        """Returns the state before the first update; the optimizer's state is new.

        Raises:
          ValueError: no checkpoint is whole; damaged later checkpoints are printed.
        """
        abstract = laid_out(param_shapes(self._model), mesh)
        with Checkpoints(self.run.checkpoints, read_only=True) as checkpoints:
            read = functools.partial(checkpoints.restore_params, abstract_params=abstract)
            self.step, params, damaged = checkpoints.first_whole(read)
        if hosts.is_primary():
            for damage in damaged.values():
                print(f"{damage}; the run starts from that of {self.step}", file=sys.stderr)
        theirs, state = _by_path(params), initial_state(model, optimizer, mesh, seed)

        def start(path: Any, leaf: jax.Array) -> jax.Array:
            return theirs[_name(path)] if _name(path) in self._taken else leaf

        return dataclasses.replace(state, params=jax.tree.map_with_path(start, state.params))


def _as_flag(value: Any) -> str:
    """Returns a key's value as its flag takes it."""
    return ":".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)


_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _any_layer(paths: Iterable[str]) -> list[str]:
    """Returns each name once, whatever the layer."""
    return sorted({re.sub(r"^layers_\d+/", "layers/", path) for path in paths})
