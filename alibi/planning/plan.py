"""The cost of a training run on devices elsewhere: memory, operations, time, checkpoints."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from alibi.config import Config, DataConfig, replaced
from alibi.data.tokenizers import given_tokenizer
from alibi.model.decoder import build_model
from alibi.model.flops import model_flops
from alibi.parallel.device_kinds import DeviceKind, known_device_kind
from alibi.parallel.sharding import AXES, abstract_mesh, batch_parts, batch_sharding
from alibi.planning.hours import Processor
from alibi.planning.memory import StepMemory, step_memory
from alibi.runs.checkpoint import TrainState
from alibi.training.optimizer import make_optimizer
from alibi.training.setup import check_trainable, micro_batches
from alibi.training.step import abstract_state

MOST_DOUBLINGS = 6  # of the number of devices, if they do not suffice
UTILISATIONS = (0.3, 0.5, 1.0)  # shares of the peak; well used accelerators reach the first two
WIKITEXT103_WORDS = 267_744  # entries of the dictionary that the paper's rule makes of its train text


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The size of a run's vocabulary; `assumed` says why, if the size depends on a text, which is not read here."""

    size: int
    assumed: str = ""

    @classmethod
    def of(cls, data: DataConfig) -> "Vocabulary":
        """Returns the vocabulary of the config section `data`; ValueError for an unreadable tokenizer file."""
        if tokenizer := given_tokenizer(data):
            return cls(tokenizer.vocab_size)
        if data.tokenizer == "bpe":
            return cls(data.bpe_vocab_size)
        if (data.name, data.subset) == ("Salesforce/wikitext", "wikitext-103-v1"):
            return cls(WIKITEXT103_WORDS)
        return cls(WIKITEXT103_WORDS, "assumed, as of WikiText-103: the words of the train text are not counted here")


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The cost of one training run.

    Attributes:
      mesh: devices along each axis.
      parameters: learned numbers.
      flops_per_token: of training, without the operations repeated by remat.
      checkpoint_bytes: of one checkpoint.
      change: config keys with which the run fits, on `devices_needed`; None if it fits, empty if none was found.
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
        return Processor(peak, utilisation).hours(self.tokens * self.flops_per_token)

    @property
    def checkpoints_written(self) -> int:
        """The fewest checkpoints of the run; each better validation adds one."""
        steps, every = self.config.train.steps, self.config.checkpoint.every_steps
        return -(-steps // every) if every else 1


def make_plan(config: Config, devices: int, device_kind: str, vocab_size: int | None = None) -> TrainingPlan:
    """Returns the plan of a run on `devices` devices of a kind; nothing is allocated, downloaded or written.

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
    state = abstract_state(build_model(config, vocabulary.size), optimizer, AbstractMesh((1, 1, 1), AXES))
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
    fitting = ((change, count) for change, count in _changes(plan) if _fits(plan, change, count, state))
    change, needed = next(fitting, ({}, devices))
    return dataclasses.replace(plan, change=change, devices_needed=needed)


def _fits(plan: TrainingPlan, change: Mapping[str, Any], devices: int, state: TrainState) -> bool:
    """Whether the run would fit on `devices` devices with `change` in its config."""
    try:
        config = replaced(plan.config, change)
        check_trainable(config, devices)
    except ValueError:  # heads or a batch that the parts do not divide
        return False
    memory = step_memory(config, plan.vocabulary.size, abstract_mesh(config.mesh, devices), state)
    return memory.total <= plan.kind.usable_memory


def _changes(plan: TrainingPlan) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields config keys for less memory, the cheapest first, each with a number of devices.

    First alone: smaller micro-batches, which cost nothing; parameters split by fsdp, which are then sent around;
    remat, which takes a third more time. Then these together; then bfloat16, which changes the numbers, and heads
    and features split by tensor; last more devices.
    """
    config, length, heads = plan.config, plan.config.train_length, plan.config.model.num_heads
    shards = plan.mesh["data"] * plan.mesh["fsdp"]
    tokens = config.train.batch_tokens // shards // plan.micro_batches
    smaller = [{"train.max_device_tokens": tokens // 2**n} for n in range(1, 12) if tokens // 2**n >= length]
    parts = [n for n in range(plan.mesh["fsdp"] + 1, shards + 1) if shards % n == 0]
    split = [{"mesh.data": -1, "mesh.fsdp": n} for n in parts]
    again: dict[str, Any] = {} if config.model.remat else {"model.remat": True}
    rounded: dict[str, Any] = {} if config.model.dtype == "bfloat16" else {"model.dtype": "bfloat16"}
    whole: dict[str, Any] = split[-1] if split else {}
    least: dict[str, Any] = smaller[-1] if smaller else {}
    changes: list[dict[str, Any]] = [*smaller, *split, again]
    changes += [{**one, **others} for others in (whole, again, {**whole, **again}) for one in ({}, *smaller)]
    changes += [rounded, {**least, **whole, **again, **rounded}]
    for n in range(plan.mesh["tensor"] + 1, heads + 1):
        if heads % n == 0 and plan.devices % n == 0:
            changes.append({**least, **again, **rounded, "mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": n})
    yield from ((change, plan.devices) for change in changes)
    for doublings in range(1, MOST_DOUBLINGS + 1):
        smallest = {"train.max_device_tokens": length, "mesh.data": 1, "mesh.fsdp": -1, **again}
        yield smallest, plan.devices * 2**doublings
