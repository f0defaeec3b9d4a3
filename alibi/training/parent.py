"""A run that starts with the parameters of another one: what is taken of its checkpoint, what is new, what dropped."""

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
import ml_collections
import optax
from jax.sharding import Mesh

from alibi.data.tokenizers import given_tokenizer
from alibi.model.decoder import DecoderLM, build_model, param_shapes
from alibi.parallel import hosts
from alibi.parallel.sharding import laid_out
from alibi.runs import RunDirectory, config_hash
from alibi.training.checkpoint import Checkpoints
from alibi.training.state import TrainState, initial_state

# Keys of the model that shape what no position method owns.
SHAPING = ("width", "num_heads", "feed_forward", "embedding", "cutoffs", "adaptive_factor")


class Parent:
    """The run that another one, of a `config` and `model`, starts from; its latest parameters are read by `state`.

    A parameter is taken where both have it in one shape, and one of the position method where it also means the same.
    One of these may be new or dropped, and so may be what only one of the models has.

    Attributes:
      step: of the latest checkpoint, and once `state` is there of that which it was read from, the newest whole one.

    Raises:
      ValueError: no work directory or no checkpoint in it, another vocabulary, other shapes or numbers of layers, or a
        position method that takes the parent's training length for its own.
    """

    def __init__(self, config: ml_collections.ConfigDict, model: DecoderLM):
        self.run = RunDirectory(config.init_from)
        self.config = self.run.config()
        self.step = hosts.told(self._latest)
        self._tokenizer = self.run.tokenizer()
        if config.data.tokenizer != self._tokenizer.name:
            self.check_vocabulary("")
        if tokenizer := given_tokenizer(config.data):  # else it is known with the train text
            self.check_vocabulary(tokenizer.fingerprint())
        there = self.config.copy_and_resolve_references()
        there.model.scan_layers = model.config.scan_layers
        self._model = build_model(there, self._tokenizer.vocab_size)  # with its layers laid out as those of `model`
        self._check_layers(model)
        known = self._model.position.known_length
        model.position.check_known_length(known, f"init_from={self.run}", "position_options.original_length")
        self._check_shapes(model)

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

    def _check_layers(self, model: DecoderLM) -> None:
        there, here = self._model.config.num_layers, model.config.num_layers
        if there != here:
            raise ValueError(f"init_from={self.run} has {there} layers, not {here}; set model.num_layers={there}")

    def _check_shapes(self, model: DecoderLM) -> None:
        here, there = _shapes(model.with_vocabulary(self._tokenizer.vocab_size)), _shapes(self._model)
        own = [path for path in here.keys() & there.keys() if "position" not in path.split("/")]
        if wrong := sorted(path for path in own if here[path].shape != there[path].shape):
            both = {key: tuple(getattr(one.config, key) for one in (self._model, model)) for key in SHAPING}
            differing = ", ".join(f"model.{key} is {a} there and {b} here" for key, (a, b) in both.items() if a != b)
            raise ValueError(
                f"init_from={self.run} has parameters of other shapes: {differing} ({wrong[0]}: "
                f"{list(there[wrong[0]].shape)}, not {list(here[wrong[0]].shape)}); use the model keys of that run"
            )
        same = here.keys() & there.keys() if model.position.shares_parameters(self._model.position) else {*own}
        taken = {path for path in same if here[path].shape == there[path].shape}
        self._taken, self._new, self._dropped = taken, here.keys() - taken, there.keys() - taken
        self.parameters = sum(here[path].size for path in taken)

    def about(self) -> dict[str, Any]:
        """What the run's provenance says of it."""
        found: dict[str, Any] = {"workdir": str(self.run), "step": self.step, "config_hash": config_hash(self.config)}
        return found | {"taken": self.parameters, "new": _names(self._new), "dropped": _names(self._dropped)}

    def tell(self, doing: str = "starting") -> None:
        """Prints what is taken, new and dropped."""
        new, dropped = (", ".join(_names(paths)) or "none" for paths in (self._new, self._dropped))
        taken = f"{self.parameters:,} parameters taken; new: {new}; dropped: {dropped}"
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


def _shapes(model: DecoderLM) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(_leaves(param_shapes(model)))


def _leaves(tree: Any) -> Iterable[tuple[str, Any]]:
    return ((_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree))


_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def _names(paths: Iterable[str]) -> list[str]:
    """Each name once, whatever the layer."""
    return sorted({re.sub(r"^layers_\d+/", "layers/", path) for path in paths})
