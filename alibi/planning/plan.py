"""A plan for a training run on devices elsewhere (memory, operations, time, checkpoints), and its text."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh

from alibi.config import Config, DataConfig
from alibi.data.tokenizers import given_tokenizer
from alibi.devices.kinds import GIB, DeviceKind, known_device_kind
from alibi.model.decoder import build_model
from alibi.model.flops import model_flops
from alibi.optimizers import make_optimizer
from alibi.parallel.sharding import AXES, abstract_mesh, batch_parts, batch_sharding
from alibi.planning.memory import StepMemory, step_memory
from alibi.reporting.writers import aligned, format_duration
from alibi.training.setup import check_trainable, micro_batches
from alibi.training.step import abstract_state

UTILISATIONS = (0.3, 0.5, 1.0)  # shares of the peak. Accelerators reach the first two.
WIKITEXT103_WORDS = 267_744  # entries in its train text's dictionary, with the paper's rule


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The size of a run's vocabulary. `assumed` says why, if it depends on a text, which is not read
    here.
    """

    size: int
    assumed: str = ""

    @classmethod
    def of(cls, data: DataConfig) -> "Vocabulary":
        """Returns the vocabulary for the config section `data`. Raises ValueError if a tokenizer file
        can't be read.
        """
        if tokenizer := given_tokenizer(data):
            return cls(tokenizer.vocab_size)
        if data.tokenizer == "bpe":
            return cls(data.bpe_vocab_size)
        if (data.name, data.subset) == ("Salesforce/wikitext", "wikitext-103-v1"):
            return cls(WIKITEXT103_WORDS)
        return cls(
            WIKITEXT103_WORDS,
            "assumed, as of WikiText-103: the words of the train text are not counted here",
        )


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The costs of a training run.

    Attributes:
      mesh: devices along each axis.
      length: tokens in a training sequence. If values change over updates, this and the next two
        describe the largest updates.
      micro_batches: micro-batches in an update.
      memory: bytes on each device.
      parameters: learned numbers.
      flops_per_token: training operations, without the forward pass that remat repeats; the mean over
        the run.
      checkpoint_bytes: size of one checkpoint.
    """

    config: Config
    kind: DeviceKind
    devices: int
    vocabulary: Vocabulary
    mesh: Mapping[str, int]
    length: int
    micro_batches: int
    parameters: int
    memory: StepMemory
    flops_per_token: float
    checkpoint_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.kind.usable_memory

    @property
    def tokens(self) -> int:
        """Tokens in the whole run."""
        return self.config.train.steps * self.config.train.batch_tokens

    def hours(self, utilisation: float) -> float:
        """Returns the hours on all devices at this share of their peak."""
        peak = self.devices * self.kind.peak(self.config.model.dtype)
        return self.tokens * self.flops_per_token / (peak * utilisation) / 3600


def make_plan(
    config: Config, devices: int, device_kind: str, vocab_size: int | None = None
) -> TrainingPlan:
    """Returns the plan for a run on `devices` devices. Nothing is allocated, downloaded or written.

    Args:
      vocab_size: entries in the vocabulary. Defaults to `Vocabulary.of`.

    Raises:
      ValueError: an unknown kind of device, a mesh for another number of devices, or a config that
        training refuses.
    """
    kind = known_device_kind(device_kind)
    if devices < 1:
        raise ValueError(f"--devices={devices} must be at least 1")
    mesh = abstract_mesh(config.mesh, devices)
    check_trainable(config, devices)
    vocabulary = Vocabulary(vocab_size) if vocab_size else Vocabulary.of(config.data)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    starts, configs = zip(*config.stretches, strict=True)
    updates = [
        end - start for start, end in zip(starts, (*starts[1:], config.train.steps), strict=True)
    ]
    flops = [model_flops(each, vocabulary.size) for each in configs]
    state = abstract_state(
        build_model(config, vocabulary.size), optimizer, AbstractMesh((1, 1, 1), AXES)
    )
    saved = jax.tree.leaves((state.params, state.opt_state))
    memory, length, micro = max(
        (
            (
                step_memory(each, vocabulary.size, mesh, state),
                each.train_length,
                micro_batches(each, batch_parts(batch_sharding(mesh))),
            )
            for each in configs
        ),
        key=lambda sizes: sizes[0].total,
    )
    return TrainingPlan(
        config=config,
        kind=kind,
        devices=devices,
        vocabulary=vocabulary,
        mesh=dict(mesh.shape),
        length=length,
        micro_batches=micro,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        memory=memory,
        flops_per_token=float(np.average(flops, weights=updates)),
        checkpoint_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in saved),
    )


def describe(plan: TrainingPlan) -> str:
    """Returns the text that `train.py --plan` prints."""
    kind, model, train = plan.kind, plan.config.model, plan.config.train
    device_tokens = train.batch_tokens // (
        plan.mesh["data"] * plan.mesh["fsdp"] * plan.micro_batches
    )
    repeated = "; remat computes a third more" if model.remat else ""
    assumed = f" ({plan.vocabulary.assumed})" if plan.vocabulary.assumed else ""
    peak = f"{kind.bandwidth / 1e9:,.0f} GB/s, " if kind.bandwidth else ""
    peak += f"{kind.peak(model.dtype) / 1e12:,.4g} TFLOP/s in {model.dtype}"
    facts = {
        "devices": f"{plan.devices:,} x {kind.name}: {kind.memory / GIB:.4g} GiB, {peak}",
        "": kind.source,
        "mesh": ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
        "model": f"{plan.config.positions}, {plan.parameters:,} parameters, a vocabulary of "
        f"{plan.vocabulary.size:,}{assumed}",
        "step": f"{train.batch_tokens:,} tokens, {plan.flops_per_token * train.batch_tokens:.3g} FLOPs{repeated}; "
        f"{plan.micro_batches} x {train.batch_tokens // plan.length // plan.micro_batches:,} sequences of "
        f"{plan.length:,}, {device_tokens:,} tokens a device at a time",
        "run": f"{train.steps:,} steps, {plan.tokens:,} tokens, {plan.flops_per_token * plan.tokens:.3g} FLOPs",
    }
    lines = "".join(f"{name:<9}{text}\n" for name, text in facts.items())
    return "\n".join([lines, _memory_text(plan), _time_text(plan)])


def device_hours_text(device_hours: float) -> str:
    """Returns for example 0.123, 12.3 or 1,234."""
    return f"{device_hours:,.0f}" if device_hours >= 100 else f"{device_hours:.3g}"


def _memory_text(plan: TrainingPlan) -> str:
    """Returns a line for each part of the memory, and a line that says whether the run fits."""
    memory, model = plan.memory, plan.config.model
    texts = {"up": ", wide products", "attention": ", attention's results"}
    more = "".join(text for name, text in texts.items() if name in model.kept)
    kept = f"the inputs{more} of all layers, and one layer" if model.remat else "of all layers"
    twice = ", twice, since micro-batches add up" if plan.micro_batches > 1 else ""
    once = plan.config.mesh.gather == "update" and plan.mesh["fsdp"] > 1
    gathered = "all at once (mesh.gather=update)" if once else "as they are needed here"
    parts = [
        ("parameters", memory.parameters, "exact"),
        ("optimizer state", memory.optimizer, "exact"),
        ("gradients", memory.gradients, f"as large as the parameters{twice}"),
        ("activations", memory.activations, f"estimated by a formula: {kept}"),
        (
            "gathered",
            memory.gathered,
            f"estimated: parameters of other devices, {gathered}",
        ),
        (
            "logits",
            memory.logits,
            f"and their gradient, of up to {model.logits_chunk:,} tokens (model.logits_chunk), and the gradient of "
            "their matrix",
        ),
    ]
    rows = [["memory of a device", "GiB", ""]]
    rows += [[f"  {name}", f"{size / GIB:.2f}", note] for name, size, note in parts if size]
    peak = "at a time: the state, and the arrays of the loss or of the update"
    rows.append(["  at most", f"{memory.total / GIB:.2f}", peak])
    usable = f"{plan.kind.usable_memory / GIB:.2f} GiB for programs"
    verdict = f"of {usable}: fits"
    if not plan.fits:
        remedies = {
            "--config.mesh.gather=layer": once,
            "more --devices": True,
            "a larger --config.mesh.fsdp": plan.devices > plan.mesh["fsdp"],
            "--config.model.remat=True": not model.remat,
            "a smaller --config.train.max_device_tokens or model": True,
        }
        *first, last = (remedy for remedy, applies in remedies.items() if applies)
        verdict = f"does not fit: it needs {memory.total / GIB:.2f} GiB and has {usable}; use {', '.join(first)}"
        verdict += f", or {last}"
    return f"{aligned(rows, left=(0, 2))}{verdict}\n"


def _time_text(plan: TrainingPlan) -> str:
    """Returns a line for each share of the peak, and the checkpoints' size."""
    rows = [["training", "time", "device-hours", "tokens/s"]]
    for share in UTILISATIONS:
        hours = plan.hours(share)
        time = format_duration(3600 * hours), device_hours_text(plan.devices * hours)
        rows.append([f"  at {share:.0%} of the peak", *time, f"{plan.tokens / hours / 3600:,.0f}"])
    remat = "; with remat 75% can be reached at most" if plan.config.model.remat else ""
    each, steps, checkpoint = plan.checkpoint_bytes, plan.config.train.steps, plan.config.checkpoint
    kept = checkpoint.keep + 1  # the latest, and the best or a spare
    kept += steps // checkpoint.keep_every if checkpoint.keep_every else 0
    # each better validation adds a checkpoint
    written = -(-steps // checkpoint.every_steps) if checkpoint.every_steps else 1
    return (
        f"{aligned(rows, left=(0,))}"
        "the share counts products of layers and softmax, and attention to the visible keys, as mfu in metrics.jsonl\n"
        f"not counted: compiling, input, validations, saving{remat}\n\n"
        f"checkpoints  {each / 1e9:,.3g} GB each; {kept} are kept, and one more while it is written: "
        f"{(kept + 1) * each / 1e9:,.3g} GB; {written:,} or more are written, {written * each / 1e9:,.4g} GB\n"
    )
