"""A trained run, loaded for use: its tokenizer, model and parameters from a work directory, on the devices here."""

import functools
import logging
import os

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from alibi.config import MeshConfig
from alibi.config.override import Override
from alibi.data.tokenizers import Tokenizer
from alibi.model.decoder import DecoderLM, build_model, evaluated, param_shapes
from alibi.parallel import hosts
from alibi.parallel.sharding import batch_sharding, laid_out, make_mesh
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.overrides import effective, overridden

_log = logging.getLogger(__name__)


class TrainedRun:
    """One checkpoint of a run. What is costly, such as the parameters, is loaded when it is first used.

    Args:
      workdir: the run's work directory.
      checkpoint: "latest", "best" (by validation NLL) or a step.
      batch_tokens: inputs a device holds at one time; None: the run's eval.batch_tokens.
      override: what `model` has in the place of what the run was trained with; `config` is that of training.

    Raises:
      ValueError: no work directory, or no such checkpoint in it, or an override that the run can't have; later, when
        the parameters are used, a damaged one.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        checkpoint: str = "latest",
        *,
        batch_tokens: int | None = None,
        override: Override | None = None,
    ):
        self.directory = RunDirectory(workdir)
        self.config = self.directory.config()
        self.override = None if override is None else effective(override, self.config)
        self._tested = overridden(self.config, self.override)
        self._checkpoint = checkpoint
        self.batch_tokens = self.config.eval.batch_tokens if batch_tokens is None else batch_tokens
        self.step = hosts.broadcast(lambda: _find_steps(self.directory, checkpoint))[0]

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def title(self) -> str:
        """The name, and what the run is tested as."""
        return self.name if self.override is None else f"{self.name} {self.override}"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return self.directory.tokenizer()

    @functools.cached_property
    def mesh(self) -> Mesh:
        return fitting_mesh(self.config.mesh)

    @functools.cached_property
    def model(self) -> DecoderLM:
        model = build_model(self._tested, self.tokenizer.vocab_size, sharding=batch_sharding(self.mesh))
        return evaluated(model, self.config)

    def undefined(self, length: int) -> str:
        """Why the position method has no result at `length` tokens; empty: it has one."""
        try:
            self.model.check_length(length)
        except ValueError as error:
            return str(error)
        return ""

    @functools.cached_property
    def _shapes(self) -> PyTree:
        """Of the parameters; the model is traced once for all who ask."""
        return param_shapes(self.model)

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._shapes))

    @functools.cached_property
    def params(self) -> PyTree:
        """The parameters, split over the mesh as in training.

        Where training has replaced the latest or best checkpoint by a newer one since, they and `step` are of that;
        where it is damaged, of the next latest or best one that is whole. Either is said in a line.
        """
        abstract = laid_out(self._shapes, self.mesh)
        failed: dict[int, ValueError] = {}
        while True:
            try:
                with Checkpoints(self.directory.checkpoints, read_only=True) as checkpoints:
                    # Older versions kept parameters beyond their limits, which they heeded when they used them.
                    return self.model.position.within_limits(checkpoints.restore_params(self.step, abstract))
            except ValueError as error:
                failed[self.step] = error
            there = hosts.broadcast(lambda: _find_steps(self.directory, self._checkpoint))
            left = [step for step in there if step not in failed]
            if not left:
                raise next(iter(failed.values()))
            damage = str(failed[self.step]).partition(";")[0] if self.step in there else ""
            if hosts.is_primary():
                why = damage or f"{self}: the checkpoint of step {self.step} was replaced since"
                _log.warning("%s; that of step %d is taken in its place", why, left[0])
            self.step = left[0]


def fitting_mesh(mesh: MeshConfig) -> Mesh:
    """The mesh that the run was trained on, or all devices along `data` where there are more or fewer of them."""
    try:
        return make_mesh(mesh)
    except ValueError as error:
        _log.warning("%s; evaluating with mesh.data=-1 on the %d devices here", error, jax.device_count())
        return make_mesh(MeshConfig())


def _find_steps(directory: RunDirectory, checkpoint: str) -> list[int]:
    """The step that "latest", "best" or a number names, then those that stand in for it where it is damaged."""
    directory.check_checkpoints()
    status, steps = directory.status(), directory.saved_steps()
    if not steps:
        known = ": ".join(filter(None, (status["state"], status["reason"])))
        raise ValueError(
            f"{directory} has no checkpoint (its training: {known}); train it first with the same --workdir"
        )
    if checkpoint != "best":
        return steps[::-1] if checkpoint == "latest" else [int(checkpoint)]
    with Checkpoints(directory.checkpoints, read_only=True) as checkpoints:
        ranked = checkpoints.ranked
    if not ranked:
        raise ValueError(f"{directory} has no best checkpoint: none was validated; use --checkpoint=latest")
    return [step for step, _ in ranked]
