"""A run that starts with the parameters of another one: what is taken of its checkpoint, what is new, what dropped."""

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
from alibi.runs import RunDirectory, config_hash
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training.state import initial_state

# Keys of the model that shape the parameters that no position method owns, and keys that change what these compute.
OF_ADAPTIVE = ("cutoffs", "adaptive_factor")
SHAPING = ("num_layers", "width", "num_heads", "feed_forward", "embedding", *OF_ADAPTIVE)
COMPUTING = ("activation", "final_norm", "norm_epsilon")


class Parent:
    """The run that another one, of a `config` and `model`, starts from; its latest parameters are read by `state`.

    All parameters are taken but some of the position method's: of those it takes what both have in one shape, where the
    two methods mean the same by it. Others are new, or dropped. The method's options may be others, as those of T5's
    buckets or rotary's base, to go on with what was learned in another place.

    Attributes:
      step: of the latest checkpoint, and once `state` is there of that which it was read from, the newest whole one.

    Raises:
      ValueError: no work directory or no checkpoint in it, another vocabulary, a model whose parameters have other
        shapes or compute something else, or a position method that takes the parent's training length for its own.
    """

    def __init__(self, config: Config, model: DecoderLM):
        self.run = RunDirectory(config.init_from)
        self.config = self.run.config()
        self.step = hosts.told(self._latest)
        self._tokenizer = self.run.tokenizer()
        if config.data.tokenizer != self._tokenizer.name:
            self.check_vocabulary("")
        if tokenizer := given_tokenizer(config.data):  # else it is known with the train text
            self.check_vocabulary(tokenizer.fingerprint())
        there = replaced(self.config, {"model.scan_layers": model.config.scan_layers})
        self._model = build_model(there, self._tokenizer.vocab_size)  # with its layers laid out as those of `model`
        self._check_model(model)
        known = self._model.position.known_length
        model.position.check_known_length(known, f"init_from={self.run}", "position_options.original_length")
        self._divide(model)
        self._options = _changed_options(self.config, config)

    def _latest(self) -> int:
        self.run.check_checkpoints()
        if not (steps := self.run.saved_steps()):
            raise ValueError(f"init_from={self.run} has no checkpoint to start from; train it first")
        return steps[-1]

    def check_vocabulary(self, fingerprint: str) -> None:
        """Raises ValueError where this is not the fingerprint of the parent's tokenizer."""
        if fingerprint != self._tokenizer.fingerprint():
            own, folder = self._tokenizer, f"{self.run}/tokenizer"
            file = f" and data.tokenizer_file={folder}/{own.file}" if own.file else ""
            raise ValueError(
                f"init_from={self.run} has another vocabulary, of {own.vocab_size:,} tokens ({own.name}), which its "
                f"embeddings are of; set data.tokenizer={own.name}{file}"
            )

    def _check_model(self, model: DecoderLM) -> None:
        there, here = self._model.config, model.config
        ignored = () if there.embedding == "adaptive" else OF_ADAPTIVE
        keys = [key for key in (*SHAPING, *COMPUTING) if key not in ignored]
        values = [(f"model.{key}", _told(getattr(there, key)), _told(getattr(here, key))) for key in keys]
        if other := [one for one in values if one[1] != one[2]]:
            differing = ", ".join(f"{key} is {theirs} there and {ours} here" for key, theirs, ours in other)
            flags = " ".join(f"--config.{key}={theirs}" for key, theirs, _ in other)
            raise ValueError(f"init_from={self.run} has the parameters of another model: {differing}; set {flags}")

    def _divide(self, model: DecoderLM) -> None:
        """Finds out what is taken, new and dropped."""
        here, there = _shapes(model.with_vocabulary(self._tokenizer.vocab_size)), _shapes(self._model)
        same = here.keys() & there.keys()
        if not model.position.shares_parameters(self._model.position):
            same = {path for path in same if "position" not in path.split("/")}
        taken = {path for path in same if here[path].shape == there[path].shape}
        self._taken, self._new, self._dropped = taken, here.keys() - taken, there.keys() - taken
        self.parameters = sum(here[path].size for path in taken)

    def about(self) -> dict[str, Any]:
        """What the run's provenance says of it."""
        found: dict[str, Any] = {"workdir": str(self.run), "step": self.step, "config_hash": config_hash(self.config)}
        return found | {"taken": self.parameters, "new": _names(self._new), "dropped": _names(self._dropped)}

    def tell(self, doing: str = "starting") -> None:
        """Prints what is taken, new and dropped, and which options of the position method are others."""
        new, dropped = (", ".join(_names(paths)) or "none" for paths in (self._new, self._dropped))
        taken = f"{self.parameters:,} parameters taken; new: {new}; dropped: {dropped}{self._options}"
        print(f"{doing} from {self.run} after {self.step:,} updates: {taken}", file=sys.stderr)

    def state(self, model: DecoderLM, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
        """The state before the first update: the optimizer's is new, as are parameters that are not taken."""
        abstract = laid_out(param_shapes(self._model), mesh)
        with Checkpoints(self.run.checkpoints, read_only=True) as checkpoints:
            self.step, params = checkpoints.newest_params(abstract)
        # Older versions kept parameters beyond their limits, which they heeded when they used them.
        there = dict(_leaves(self._model.position.within_limits(params)))
        state = initial_state(model, optimizer, mesh, seed)

        def start(path: Any, leaf: jax.Array) -> jax.Array:
            return there[_name(path)] if _name(path) in self._taken else leaf

        return dataclasses.replace(state, params=jax.tree.map_with_path(start, state.params))


def _changed_options(there: Config, here: Config) -> str:
    """What is told of the options that are not those of `there`, of the same position method."""
    if there.position != here.position:
        return ""
    options = changed_options(here.position, *(config.position_options for config in (there, here)))
    told = ", ".join(f"{name}={now!r} ({before!r} there)" for name, (before, now) in options.items())
    return told and f"; position options: {told}"


def _told(value: Any) -> str:
    """A key's value as its flag takes it."""
    return ":".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)


def _shapes(model: DecoderLM) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(_leaves(param_shapes(model)))


def _leaves(tree: Any) -> Iterable[tuple[str, Any]]:
    return ((_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree))


_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def _names(paths: Iterable[str]) -> list[str]:
    """Each name once, whatever the layer."""
    return sorted({re.sub(r"^layers_\d+/", "layers/", path) for path in paths})
