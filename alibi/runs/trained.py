"""A trained run loaded for use: tokenizer, model and parameters on this machine's devices."""

import functools
import logging
import os

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from alibi.config import MeshConfig
from alibi.config.override import Override
from alibi.data.corpus import REGISTRY
from alibi.data.tokenizers import Tokenizer
from alibi.devices.memory import check_memory
from alibi.model.decoder import DecoderLM, build_model, evaluated, param_shapes
from alibi.parallel import hosts
from alibi.parallel.sharding import batch_sharding, laid_out, make_mesh
from alibi.runs import RunDirectory, method_files, process_facts
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.overrides import effective, overridden

_log = logging.getLogger(__name__)


class TrainedRun:
    """A run at one checkpoint. Tokenizer, model and parameters are loaded at first use.

    Args:
      workdir: the run's work directory.
      checkpoint: "latest", "best" (by validation NLL) or a step.
      batch_tokens: inputs on a device at a time. Defaults to the run's eval.batch_tokens.
      override: changes the config for `model`, while `config` stays as in training.

    Attributes:
      step: updates before the checkpoint.
      config: the run's, with the values of the last of these updates.

    Raises:
      ValueError: no work directory, no such checkpoint, or an override with other parameters, or when
        parameters are first used, a damaged checkpoint.
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
        config = self.directory.config()
        self.step = hosts.broadcast(lambda: find_steps(self.directory, checkpoint))[0]
        self.config = config.at(self.step)
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
        """The name, and then the override."""
        return self.name if self.override is None else f"{self.name} {self.override}"

    @functools.cached_property
    def trained_on(self) -> str | None:
        """The hash of the train tokens, if text files were trained on, which the config only names;
        None for other corpora and imported runs.
        """
        if not REGISTRY.load(self.config.data.corpus).splits_are_files:
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
        now = method_files(self._tested)
        if self._tested.position == self.config.position:
            self.directory.tell_changed_files(method_files(self.config))
        model = build_model(
            self._tested, self.tokenizer.vocab_size, sharding=batch_sharding(self.mesh)
        )
        hosts.check_alike({**process_facts(self._tested), **now})  # its methods are loaded now
        return evaluated(model, self.config)

    def undefined(self, length: int) -> str:
        """Returns why the position method has no result at `length` tokens, or "" if it has one."""
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
        """The parameters, sharded as in training.

        If the latest or best checkpoint is gone or damaged, the next whole one takes its place: a
        line says so, and `step` changes.
        """
        abstract = laid_out(self._shapes, self.mesh)
        check_memory(
            f"{self}, with {self.num_parameters:,} parameters,",
            abstract,
            "use devices with more, or import the model by --dtype=bfloat16",
        )
        # Others are looked for only if this one is lost: that reads files of all checkpoints.
        with (
            Checkpoints(self.directory.checkpoints, read_only=True) as checkpoints,
            jax.ensure_compile_time_eval(),  # first read in a function that JAX traces
        ):
            self.step, params, _ = checkpoints.first_whole(
                lambda step: checkpoints.restore_params(step, abstract),
                lambda lost: find_steps(self.directory, self._checkpoint) if lost else [self.step],
            )
        if self.config.at(self.step) != self.config:
            raise ValueError(
                f"{self} has lost its checkpoint, and that of update {self.step:,} was trained with other values; "
                f"give --checkpoint={self.step}"
            )
        return params


def from_run(
    workdir: str | os.PathLike[str], checkpoint: str = "latest"
) -> tuple[DecoderLM, PyTree]:
    """Returns a trained or imported run's model and its parameters.

    Args:
      workdir: the run's work directory.
      checkpoint: "latest", "best" (by validation NLL) or an update.

    Raises:
      ValueError: no work directory, no such checkpoint, or all checkpoints are damaged.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model, params = from_run("workdirs/alibi")  # doctest: +SKIP
      >>> tokens = jnp.arange(8)[None]
      >>> logits = model.apply({"params": params}, tokens)  # doctest: +SKIP
      >>> module = nnx.bridge.lazy_init(nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)), tokens)  # doctest: +SKIP
      >>> nnx.update(module, params)  # doctest: +SKIP
      >>> logits = module(tokens)  # the same, from a module of NNX  # doctest: +SKIP
    """
    run = TrainedRun(workdir, checkpoint)
    return run.model, run.params


def fitting_mesh(mesh: MeshConfig) -> Mesh:
    """Returns the mesh of training, or with another number of devices all along `data`."""
    try:
        return make_mesh(mesh)
    except ValueError as error:
        _log.warning(
            "%s; evaluating with mesh.data=-1 on the %d devices here", error, jax.device_count()
        )
        return make_mesh(MeshConfig())


def check_checkpoint(checkpoint: str) -> None:
    """Raises ValueError for a word that names no checkpoint."""
    if checkpoint not in ("latest", "best") and not checkpoint.isdecimal():
        raise ValueError(f"checkpoint={checkpoint} must be latest, best or a step, such as 600")


def find_steps(directory: RunDirectory, checkpoint: str) -> list[int]:
    """Returns the steps for "latest", "best" or a number, in the order to try them."""
    check_checkpoint(checkpoint)
    directory.check_checkpoints()
    status, steps = directory.status(), directory.saved_steps()
    if not steps:
        state = ": ".join(filter(None, (status["state"], status["reason"])))
        raise ValueError(
            f"{directory} has no checkpoint (its training: {state}); train it first with the same --workdir"
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
