"""A start from another run: its parameters, or with `init_step` its whole state."""

import dataclasses
import functools
import re
from typing import Any

import jax
from jax.sharding import Mesh

from alibi.config import Config, replaced
from alibi.config.fields import ADAPTIVE, CHANGED, COMPUTED, TRAINED, as_text
from alibi.config.tree import role_of
from alibi.data.tokenizers import given_tokenizer
from alibi.model.decoder import DecoderLM, build_model, param_shapes
from alibi.objectives import make_objective
from alibi.optimizers import OPTIMIZER_NAMES, first_other_rate
from alibi.parallel import hosts
from alibi.parallel.axes import by_path, path_name
from alibi.parallel.sharding import laid_out
from alibi.positions import changed_options
from alibi.runs import RunDirectory, config_hash, method_files
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.runs.identity import differing


class Parent:
    """The run whose latest parameters a run of `config` and `model` starts from.

    A position method's parameters are taken if they have the same shape and meaning in both runs.
    Others are new, or dropped. All other parameters are taken. The method's options may differ, such
    as T5's buckets or rotary's base. With `init_step` the run goes on from the whole state after that
    update, as if it had been its own.

    Attributes:
      step: the latest checkpoint, or after `replace_in` the whole one that was read.

    Raises:
      ValueError: no work directory or checkpoint, another objective, vocabulary or model, a position
        method that would take the parent's training length for its own, or with `init_step` another
        config or learning rates before it.
    """

    def __init__(self, config: Config, model: DecoderLM):
        self.run, self._child = RunDirectory(config.init_from), config
        self.config = self.run.config()
        theirs_and_ours = [make_objective(each) for each in (self.config, config)]
        kinds = {(one.causal, one.both_sides, one.added_tokens) for one in theirs_and_ours}
        if len(kinds) > 1:
            there, here = (each.objective.name for each in (self.config, config))
            raise ValueError(
                f"init_from={self.run} was trained for objective={there}, and this run is for objective={here}, which "
                "sees other tokens or has others; start from a run of the same objective, or train from the start"
            )
        self.step = hosts.broadcast(self._latest)
        if config.init_step > 0:
            self._check_fork(config)
        self.config = self.config.at(self.step)
        self._tokenizer = self.run.tokenizer()
        tokenizer = given_tokenizer(config.data)  # None if it is known only with the train text
        if tokenizer or config.data.tokenizer != self._tokenizer.name:
            self.check_vocabulary(tokenizer.fingerprint() if tokenizer else "")
        self.run.tell_changed_files(method_files(self.config))
        laid_out_alike = replaced(self.config, {"model.scan_layers": model.config.scan_layers})
        self._model = build_model(laid_out_alike, self._tokenizer.vocab_size)
        self._check_model(model)
        ours = by_path(param_shapes(build_model(config, self._tokenizer.vocab_size)))
        theirs = by_path(param_shapes(self._model))
        same = set()
        for path in ours.keys() & theirs.keys():
            now, before = (each.method_of(path.split("/")) for each in (model, self._model))
            alike = now is None or before is None or now.shares_parameters(before)
            if alike and ours[path].shape == theirs[path].shape:
                same.add(path)
        new = {model.method_of(path.split("/")) for path in ours.keys() - same}
        for method, trained in model.method_pairs(self._model):
            if method not in new:
                method.check_meaning(trained, f"init_from={self.run}", "position_options.")
        self._taken, self.parameters = same, sum(ours[path].size for path in same)
        self._new, self._dropped = (  # each name once, whatever the layer
            sorted({re.sub(r"^layers_\d+/", "layers/", path) for path in paths - same})
            for paths in (ours.keys(), theirs.keys())
        )

    def _latest(self) -> int:
        self.run.check_checkpoints()
        if not (steps := self.run.saved_steps()):
            raise ValueError(
                f"init_from={self.run} has no checkpoint to start from; train it first"
            )
        return steps[-1]

    def _check_fork(self, config: Config) -> None:
        """Raises ValueError if a run of `config` can't go on from the parent's state after `init_step`."""
        at, steps = config.init_step, self.run.saved_steps()
        if at not in steps or at >= config.train.steps:
            raise ValueError(
                f"init_step={at} must be a checkpoint of init_from={self.run} below train.steps={config.train.steps}; "
                f"there are: {', '.join(map(str, steps))} (checkpoint.keep and keep_every say which are kept)"
            )
        free = "init_from", "init_step", "train.steps", "optimizer."
        differ = [key for key in differing(self.config, config) if not key.startswith(free)]
        sections = [each.optimizer for each in (self.config, config)]
        kinds = [(OPTIMIZER_NAMES.make(it.name, it.options, it), it.clip_norm) for it in sections]
        if differ or kinds[0] != kinds[1]:
            keys = ", ".join(differ) or "another optimizer"
            raise ValueError(
                f"init_step={at} goes on from the state of init_from={self.run}, whose config differs in more than "
                f"train.steps and the schedule: {keys}; set these as there, or leave init_step out"
            )
        one, other = ((each.optimizer, each.train.steps) for each in (self.config, config))
        if (apart := first_other_rate(one, other, at)) is not None:
            raise ValueError(
                f"init_step={at} is after update {apart}, from which the learning rates of init_from={self.run} are "
                "others; start from an earlier checkpoint, or with the same schedule up to there"
            )
        self.step = at

    def check_same(self, manifests: dict[str, dict[str, Any]]) -> None:
        """Raises ValueError if the run goes on from `init_step` with other tokens, code or random numbers
        than the parent's.

        Args:
          manifests: each split's manifest.
        """
        if self._child.init_step > 0:
            self.run.check_same(manifests, method_files(self._child), "leave init_step out")

    def check_vocabulary(self, fingerprint: str) -> None:
        """Raises ValueError if `fingerprint` is not the parent's tokenizer's."""
        if fingerprint != self._tokenizer.fingerprint():
            wanted = self._tokenizer
            file = (
                f" and data.tokenizer_file={self.run}/tokenizer/{wanted.file}"
                if wanted.file
                else ""
            )
            raise ValueError(
                f"init_from={self.run} has another vocabulary, of {wanted.vocab_size:,} tokens ({wanted.name}), for "
                f"its embeddings; set data.tokenizer={wanted.name}{file}"
            )

    def _check_model(self, model: DecoderLM) -> None:
        theirs, ours = self._model.config, model.config
        free = {COMPUTED, TRAINED, CHANGED} | (
            {ADAPTIVE} if theirs.embedding != "adaptive" else set()
        )
        keys = [key for key in vars(ours) if role_of(f"model.{key}") not in free]
        values = [
            (f"model.{key}", as_text(getattr(theirs, key)), as_text(getattr(ours, key)))
            for key in keys
        ]
        if differing := [entry for entry in values if entry[1] != entry[2]]:
            shown = ", ".join(
                f"{key} is {their} there and {our} here" for key, their, our in differing
            )
            flags = " ".join(f"--config.{key}={their}" for key, their, _ in differing)
            raise ValueError(
                f"init_from={self.run} has the parameters of another model: {shown}; set {flags}"
            )

    def about(self) -> dict[str, Any]:
        """Returns the entry `parent` of the run's provenance."""
        record = self.run.provenance()
        origin = record.get("imported_from") or record.get("parent") or {}
        of_hub = ("family", "lengths", "set_aside")  # for exports
        return {
            "workdir": str(self.run),
            "step": self.step,
            "config_hash": config_hash(self.config),
            "taken": self.parameters,
            "new": self._new,
            "dropped": self._dropped,
            **{key: origin[key] for key in of_hub if key in origin},
        }

    def describe(self) -> str:
        """Returns a line: parameters taken, new and dropped, and differing position options."""
        new, dropped = (", ".join(names) or "none" for names in (self._new, self._dropped))
        ours, theirs, options = self._child, self.config, ""
        if ours.position == theirs.position:
            changed = changed_options(ours.position, theirs.position_options, ours.position_options)
            options = ", ".join(
                f"{name}={our!r} ({their!r} there)" for name, (their, our) in changed.items()
            )
        return (
            f"from {self.run} after {self.step:,} updates: {self.parameters:,} parameters taken; "
            f"new: {new}; dropped: {dropped}"
            + f"; position options: {options}" * bool(options)
            + "; the optimizer's state and the order of text go on" * (ours.init_step > 0)
        )

    def replace_in(self, state: TrainState, mesh: Mesh) -> TrainState:
        """Returns `state` with parameters from the newest whole checkpoint, or the state after `init_step`.
        Raises ValueError without one.
        """
        if self._child.init_step > 0:
            with Checkpoints(self.run.checkpoints, read_only=True) as checkpoints:
                return checkpoints.restore(self.step, state)
        abstract = laid_out(param_shapes(self._model), mesh)
        with Checkpoints(self.run.checkpoints, read_only=True) as checkpoints:
            read = functools.partial(checkpoints.restore_params, abstract_params=abstract)
            self.step, params, _ = checkpoints.first_whole(read)
        taken = {path: leaf for path, leaf in by_path(params).items() if path in self._taken}
        params = jax.tree.map_with_path(
            lambda path, leaf: (
                taken[name].astype(leaf.dtype) if (name := path_name(path)) in taken else leaf
            ),
            state.params,
        )
        return dataclasses.replace(state, params=params)
