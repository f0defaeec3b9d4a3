"""The plan of a training run on devices elsewhere (memory, operations, time, checkpoints), and its
text.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from alibi.config import Config, DataConfig, replaced
from alibi.data.tokenizers import given_tokenizer
from alibi.model.decoder import build_model
from alibi.model.flops import model_flops
from alibi.parallel.device_kinds import GIB, DeviceKind, known_device_kind
from alibi.parallel.sharding import AXES, abstract_mesh, batch_parts, batch_sharding
from alibi.planning.memory import StepMemory, step_memory
from alibi.reporting.writers import aligned, format_duration
from alibi.runs.checkpoint import TrainState
from alibi.training.optimizer import make_optimizer
from alibi.training.setup import check_trainable, micro_batches
from alibi.training.step import abstract_state

MOST_DOUBLINGS = 6  # of the number of devices, if they do not suffice
UTILISATIONS = (0.3, 0.5, 1.0)  # shares of the peak; well used accelerators reach the first two
WIKITEXT103_WORDS = 267_744  # entries of the dictionary of its train text, by the paper's rule


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The size of a run's vocabulary; `assumed` says why, if the size depends on a text, which is
    not read here.
    """

    size: int
    assumed: str = ""

    @classmethod
    def of(cls, data: DataConfig) -> "Vocabulary":
        """Returns the vocabulary of the config section `data`; ValueError for an unreadable
        tokenizer file.
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
    """The cost of a training run.

    Attributes:
      mesh: devices along each axis.
      parameters: learned numbers.
      flops_per_token: of training, without the operations repeated by remat.
      checkpoint_bytes: of a single checkpoint.
      change: config keys with which the run fits, on `devices_needed`; None if it fits, empty if
        none was found.
    """

    config: Config
    kind: DeviceKind
    devices: int
    vocabulary: Vocabulary
    mesh: Mapping[str, int]
    micro_batches: int
    parameters: int
    memory: StepMemory
    flops_per_token: float
    checkpoint_bytes: int
    change: Mapping[str, Any] | None
    devices_needed: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.kind.usable_memory

    @property
    def tokens(self) -> int:
        """The tokens of the whole run."""
        return self.config.train.steps * self.config.train.batch_tokens

    def hours(self, utilisation: float) -> float:
        """Returns the hours of training on all devices at this share of their peak."""
        peak = self.devices * self.kind.peak(self.config.model.dtype)
        return self.tokens * self.flops_per_token / (peak * utilisation) / 3600


def make_plan(
    config: Config, devices: int, device_kind: str, vocab_size: int | None = None
) -> TrainingPlan:
    """Returns the plan of a run on `devices` devices of a kind; nothing is allocated, downloaded or
    written.

    Args:
      vocab_size: entries of the vocabulary, if known; None: by `Vocabulary.of`.

    Raises:
      ValueError: an unknown kind of device, a mesh of another number of devices, or a config
        refused by training.
    """
    kind = known_device_kind(device_kind)
    if devices < 1:
        raise ValueError(f"--devices={devices} must be at least 1")
    mesh = abstract_mesh(config.mesh, devices)
    check_trainable(config, devices)
    vocabulary = Vocabulary(vocab_size) if vocab_size else Vocabulary.of(config.data)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    state = abstract_state(
        build_model(config, vocabulary.size), optimizer, AbstractMesh((1, 1, 1), AXES)
    )
    saved = jax.tree.leaves((state.params, state.opt_state))
    plan = TrainingPlan(
        config=config,
        kind=kind,
        devices=devices,
        vocabulary=vocabulary,
        mesh=dict(mesh.shape),
        micro_batches=micro_batches(config, batch_parts(batch_sharding(mesh))),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        memory=step_memory(config, vocabulary.size, mesh, state),
        flops_per_token=model_flops(config, vocabulary.size),
        checkpoint_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in saved),
        change=None,
        devices_needed=devices,
    )
    if plan.fits:
        return plan
    fitting = (
        (change, count) for change, count in _changes(plan) if _fits(plan, change, count, state)
    )
    change, needed = next(fitting, ({}, devices))
    return dataclasses.replace(plan, change=change, devices_needed=needed)


def _fits(plan: TrainingPlan, change: Mapping[str, Any], devices: int, state: TrainState) -> bool:
    """Returns whether the run would fit on `devices` devices with `change` in its config."""
    try:
        config = replaced(plan.config, change)
        check_trainable(config, devices)
    except ValueError:  # the parts do not divide the heads or the batch
        return False
    memory = step_memory(config, plan.vocabulary.size, abstract_mesh(config.mesh, devices), state)
    return memory.total <= plan.kind.usable_memory


def _changes(plan: TrainingPlan) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields config keys for less memory, the cheapest first, each with a number of devices.

    First alone: smaller micro-batches, which cost nothing; parameters split by fsdp, which are then
    sent around; remat, which takes a third more time. Then these together; then bfloat16, which
    changes the numbers, and heads and features split by tensor; last more devices.
    """
    config, length, heads = plan.config, plan.config.train_length, plan.config.model.num_heads
    shards = plan.mesh["data"] * plan.mesh["fsdp"]
    tokens = config.train.batch_tokens // shards // plan.micro_batches
    smaller = [
        {"train.max_device_tokens": tokens // 2**n}
        for n in range(1, 12)
        if tokens // 2**n >= length
    ]
    parts = [n for n in range(plan.mesh["fsdp"] + 1, shards + 1) if shards % n == 0]
    split = [{"mesh.data": -1, "mesh.fsdp": n} for n in parts]
    again: dict[str, Any] = {} if config.model.remat else {"model.remat": True}
    rounded: dict[str, Any] = (
        {} if config.model.dtype == "bfloat16" else {"model.dtype": "bfloat16"}
    )
    whole: dict[str, Any] = split[-1] if split else {}
    least: dict[str, Any] = smaller[-1] if smaller else {}
    changes: list[dict[str, Any]] = [*smaller, *split, again]
    changes += [
        {**batch, **others}
        for others in (whole, again, {**whole, **again})
        for batch in ({}, *smaller)
    ]
    changes += [rounded, {**least, **whole, **again, **rounded}]
    for n in range(plan.mesh["tensor"] + 1, heads + 1):
        if heads % n == 0 and plan.devices % n == 0:
            changes.append(
                {**least, **again, **rounded, "mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": n}
            )
    yield from ((change, plan.devices) for change in changes)
    for doublings in range(1, MOST_DOUBLINGS + 1):
        smallest = {"train.max_device_tokens": length, "mesh.data": 1, "mesh.fsdp": -1, **again}
        yield smallest, plan.devices * 2**doublings


def describe(plan: TrainingPlan) -> str:
    """Returns the text of `train.py --plan`."""
    kind, model, train, length = (
        plan.kind,
        plan.config.model,
        plan.config.train,
        plan.config.train_length,
    )
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
        "model": f"{plan.config.position}, {plan.parameters:,} parameters, a vocabulary of "
        f"{plan.vocabulary.size:,}{assumed}",
        "step": f"{train.batch_tokens:,} tokens, {plan.flops_per_token * train.batch_tokens:.3g} FLOPs{repeated}; "
        f"{plan.micro_batches} x {train.batch_tokens // length // plan.micro_batches:,} sequences of {length:,}, "
        f"{device_tokens:,} tokens a device at a time",
        "run": f"{train.steps:,} steps, {plan.tokens:,} tokens, {plan.flops_per_token * plan.tokens:.3g} FLOPs",
    }
    lines = "".join(f"{name:<9}{text}\n" for name, text in facts.items())
    return "\n".join([lines, _memory_text(plan), _time_text(plan)])


def _memory_text(plan: TrainingPlan) -> str:
    """Returns a line for each part of the memory, and whether the run fits, or the change with
    which it would.
    """
    memory, model = plan.memory, plan.config.model
    kept = "the inputs of all layers, and one layer" if model.remat else "of all layers"
    twice = ", twice, since micro-batches add up" if plan.micro_batches > 1 else ""
    parts = [
        ("parameters", memory.parameters, "exact"),
        ("optimizer state", memory.optimizer, "exact"),
        ("gradients", memory.gradients, f"as large as the parameters{twice}"),
        ("activations", memory.activations, f"estimated by a formula: {kept}"),
        (
            "gathered",
            memory.gathered,
            "estimated: parameters of other devices, as they are needed here",
        ),
        (
            "logits",
            memory.logits,
            f"and their gradient, of up to {model.logits_chunk:,} tokens (model.logits_chunk)",
        ),
    ]
    rows = [["memory of a device", "GiB", ""]]
    rows += [[f"  {name}", f"{size / GIB:.2f}", note] for name, size, note in parts if size]
    peak = "at a time: the state, and the arrays of the loss or of the update"
    rows.append(["  at most", f"{memory.total / GIB:.2f}", peak])
    flags = " ".join(f"--config.{key}={value}" for key, value in (plan.change or {}).items())
    if plan.fits:
        verdict = "fits"
    elif not flags:
        verdict = "does not fit, nor on more devices; use some with more memory, or a smaller model"
    elif plan.devices_needed == plan.devices:
        verdict = f"does not fit; it would with {flags}"
    else:
        verdict = f"does not fit on {plan.devices:,} in any way; it would on {plan.devices_needed:,} with {flags}"
    usable = f"of {plan.kind.usable_memory / GIB:.2f} GiB for programs"
    return f"{aligned(rows, left=(0, 2))}{usable}: {verdict}\n"


def _time_text(plan: TrainingPlan) -> str:
    """Returns a line for each share of the peak, and the size of the checkpoints."""
    rows = [["training", "time", "device-hours", "tokens/s"]]
    for share in UTILISATIONS:
        hours = plan.hours(share)
        device_hours = plan.devices * hours
        counted = f"{device_hours:,.0f}" if device_hours >= 100 else f"{device_hours:.3g}"
        speed = f"{plan.tokens / hours / 3600:,.0f}"
        rows.append(
            [f"  at {share:.0%} of the peak", format_duration(3600 * hours), counted, speed]
        )
    remat = "; with remat 75% can be reached at most" if plan.config.model.remat else ""
    each, every = plan.checkpoint_bytes, plan.config.checkpoint.every_steps
    kept = plan.config.checkpoint.keep + 1  # the latest, and the best or a spare
    # each better validation adds a checkpoint
    written = -(-plan.config.train.steps // every) if every else 1
    return (
        f"{aligned(rows, left=(0,))}"
        "the share counts products of layers and softmax, and attention to the visible keys, as mfu in metrics.jsonl\n"
        f"not counted: compiling, input, validations, saving{remat}\n\n"
        f"checkpoints  {each / 1e9:,.3g} GB each; {kept} are kept, and one more while it is written: "
        f"{(kept + 1) * each / 1e9:,.3g} GB; {written:,} or more are written, {written * each / 1e9:,.4g} GB\n"
    )
