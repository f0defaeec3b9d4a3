"""A trained run, loaded for use: tokenizer, model and parameters of a work directory, on this
machine's devices.
"""

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
from alibi.parallel.memory import check_memory
from alibi.parallel.sharding import batch_sharding, laid_out, make_mesh
from alibi.runs import RunDirectory, method_files, process_facts
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.overrides import effective, overridden

_log = logging.getLogger(__name__)


class TrainedRun:
    """One checkpoint of a run, whose tokenizer, model and parameters are loaded at their first use.

    Args:
      workdir: the run's work directory.
      checkpoint: "latest", "best" (by validation NLL) or a step.
      batch_tokens: inputs on a device at a time; None: the run's eval.batch_tokens.
      override: changes of the config for `model`; `config` stays as in training.

    Attributes:
      step: the number of updates before the checkpoint.

    Raises:
      ValueError: no work directory, no such checkpoint, or an override with other parameters;
        later, at the first use of the parameters, a damaged checkpoint.
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
        self.step = hosts.broadcast(lambda: _find_steps(self.directory, checkpoint))[0]
        self.override = None if override is None else effective(override, self.config)
        self._tested = overridden(self.config, self.override)
        self._checkpoint = checkpoint
        self.batch_tokens = self.config.eval.batch_tokens if batch_tokens is None else batch_tokens

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def title(self) -> str:
        """The name, followed by the override."""
        return self.name if self.override is None else f"{self.name} {self.override}"

    @functools.cached_property
    def trained_on(self) -> str | None:
        """The hash of the train tokens of text files, which the config only names; None of another
        corpus, and of an imported run.
        """
        if self.config.data.corpus != "text":
            return None
        return self.directory.provenance()["corpus"].get("train", {}).get("sha256")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return self.directory.tokenizer()

    @functools.cached_property
    def mesh(self) -> Mesh:
        return fitting_mesh(self.config.mesh)

    @functools.cached_property
    def model(self) -> DecoderLM:
        now = method_files(self._tested.position)
        if self._tested.position == self.config.position:
            self.directory.tell_changed_files(now)
        model = build_model(
            self._tested, self.tokenizer.vocab_size, sharding=batch_sharding(self.mesh)
        )
        hosts.check_alike({**process_facts(self._tested), **now})  # its methods are loaded now
        return evaluated(model, self.config)

    def undefined(self, length: int) -> str:
        """Returns the reason why the position method has no result at `length` tokens; "" if there
        is a result.
        """
        try:
            self.model.check_length(length)
        except ValueError as error:
            return str(error)
        return ""

    @functools.cached_property
    def _shapes(self) -> PyTree:
        return param_shapes(self.model)

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._shapes))

    @functools.cached_property
    def params(self) -> PyTree:
        """The parameters, sharded over the mesh as in training.

        If the latest or best checkpoint was replaced since, or is damaged, the next whole
        checkpoint takes its place: a line is logged, and `step` changes.
        """
        abstract = laid_out(self._shapes, self.mesh)
        check_memory(
            f"{self}, with {self.num_parameters:,} parameters,",
            abstract,
            "use devices with more, or import the model by --dtype=bfloat16",
        )
        failed: dict[int, ValueError] = {}
        while True:
            try:
                with Checkpoints(self.directory.checkpoints, read_only=True) as checkpoints:
                    return checkpoints.restore_params(self.step, abstract)
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
    """Returns the mesh of training, or all devices along `data` if there are more or fewer devices
    here.
    """
    try:
        return make_mesh(mesh)
    except ValueError as error:
        _log.warning(
            "%s; evaluating with mesh.data=-1 on the %d devices here", error, jax.device_count()
        )
        return make_mesh(MeshConfig())


def _find_steps(directory: RunDirectory, checkpoint: str) -> list[int]:
    """Returns the step named by "latest", "best" or a number, then the steps to use if it is
    damaged.
    """
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
        raise ValueError(
            f"{directory} has no best checkpoint: none was validated; use --checkpoint=latest"
        )
    return [step for step, _ in ranked]
