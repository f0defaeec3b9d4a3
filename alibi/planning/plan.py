"""What a run takes on devices that need not be here: memory, operations, time, checkpoints; and what makes it fit."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import ml_collections
from jax.sharding import AbstractMesh

from alibi.data.tokenizers import given_tokenizer
from alibi.model.decoder import build_model
from alibi.model.flops import model_flops
from alibi.parallel.device_kinds import DeviceKind, known_device_kind
from alibi.parallel.sharding import AXES, abstract_mesh, batch_parts, batch_sharding
from alibi.planning.memory import StepMemory, state_shapes, step_memory
from alibi.runs import completed
from alibi.runs.checkpoint import TrainState
from alibi.training.optimizer import make_optimizer
from alibi.training.setup import check_config, micro_batches

MOST_DOUBLINGS = 6  # of devices that don't suffice
UTILISATIONS = (0.3, 0.5, 1.0)  # shares of the peak; well kept accelerators reach the first two
WIKITEXT103_WORDS = 267_744  # of the dictionary that the paper's rule makes of its train text


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens that a run will know; `assumed` says why where its text decides that and isn't read."""

    size: int
    assumed: str = ""

    @classmethod
    def of(cls, data: ml_collections.ConfigDict) -> "Vocabulary":
        """That of the config section `data`, without its text; ValueError for a tokenizer's file that can't be read."""
        if tokenizer := given_tokenizer(data):
            return cls(tokenizer.vocab_size)
        if data.tokenizer == "bpe":
            return cls(data.bpe_vocab_size)
        if (data.name, data.subset) == ("Salesforce/wikitext", "wikitext-103-v1"):
            return cls(WIKITEXT103_WORDS)
        return cls(WIKITEXT103_WORDS, "assumed, as of WikiText-103: the words of the train text are not counted here")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `make_plan` finds.

    Attributes:
      mesh: devices along each axis.
      parameters: numbers that the model learns.
      flops_per_token: of training, without what remat computes again.
      checkpoint_bytes: of one checkpoint.
      change: config keys that make it fit, on `devices_needed`; None where it fits, empty where none was found.
    """

    config: ml_collections.ConfigDict
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
        """Of the whole run."""
        return self.config.train.steps * self.config.train.batch_tokens

    @property
    def peak(self) -> float:
        """Operations a second of all devices, in the dtype of the products."""
        return self.devices * self.kind.peak(self.config.model.dtype)

    def hours(self, utilisation: float) -> float:
        """Of training, at this share of the peak."""
        return self.tokens * self.flops_per_token / (self.peak * utilisation) / 3600

    @property
    def checkpoints_kept(self) -> int:
        """At most, when none is being written: the latest, and the best or a spare."""
        return self.config.checkpoint.keep + 1

    @property
    def checkpoints_written(self) -> int:
        """At least: as often as the config says, and at the end; those of better validations come on top."""
        steps, every = self.config.train.steps, self.config.checkpoint.every_steps
        return -(-steps // every) if every else 1


def make_plan(config: ml_collections.ConfigDict, devices: int, device_kind: str, vocab_size: int | None = None) -> Plan:
    """The plan of a run on `devices` of a kind; nothing is allocated, downloaded or written.

    Args:
      vocab_size: tokens of the vocabulary where they are known; None: as `Vocabulary.of` tells.

    Raises:
      ValueError: an unknown kind of device, a mesh that isn't of so many devices, and whatever
        training refuses before it reads any text.
    """
    kind = known_device_kind(device_kind)
    if devices < 1:
        raise ValueError(f"--devices={devices} must be at least 1")
    config = completed(config)
    mesh = abstract_mesh(config.mesh, devices)
    check_config(config, mesh)
    make_optimizer(config.optimizer, config.train.steps)
    vocabulary = Vocabulary(vocab_size) if vocab_size else Vocabulary.of(config.data)
    model = build_model(config, vocabulary.size)
    model.position.check_length(config.train_length)
    state = state_shapes(config, vocabulary.size)
    memory = step_memory(config, vocabulary.size, mesh, kind.platform, state)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    held = (state.params, state.opt_state)
    plan = Plan(
        config=config,
        kind=kind,
        devices=devices,
        vocabulary=vocabulary,
        mesh={axis: mesh.shape[axis] for axis in AXES},
        micro_batches=micro_batches(config, batch_parts(batch_sharding(mesh))),
        parameters=sum(sizes),
        memory=memory,
        flops_per_token=model_flops(config, vocabulary.size),
        checkpoint_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held)),
        change=None,
        devices_needed=devices,
    )
    if plan.fits:
        return plan
    fitting = ((change, count) for change, count in _changes(plan, mesh) if _fits(plan, change, count, state))
    change, needed = next(fitting, ({}, devices))
    return dataclasses.replace(plan, change=change, devices_needed=needed)


def _fits(plan: Plan, change: Mapping[str, Any], devices: int, state: TrainState) -> bool:
    """Whether the run would fit on so many devices, its config changed."""
    config = ml_collections.ConfigDict(plan.config.to_dict())
    config.update_from_flattened_dict(dict(change))
    try:
        mesh = abstract_mesh(config.mesh, devices)
        check_config(config, mesh)
    except ValueError:  # heads or a batch that so many parts don't divide
        return False
    memory = step_memory(config, plan.vocabulary.size, mesh, plan.kind.platform, state)
    return memory.total <= plan.kind.usable_memory


def _changes(plan: Plan, mesh: AbstractMesh) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Config keys that take less memory, with the devices that they are for; these first, then ever more."""
    for change in _changes_here(plan, mesh):
        yield change, plan.devices
    smallest = {"train.max_device_tokens": plan.config.train_length, "mesh.data": 1, "mesh.fsdp": -1}
    smallest |= {} if plan.config.model.remat else {"model.remat": True}
    for doublings in range(1, MOST_DOUBLINGS + 1):
        yield smallest, plan.devices * 2**doublings


def _changes_here(plan: Plan, mesh: AbstractMesh) -> Iterator[Mapping[str, Any]]:
    """Those that need no further devices, from what costs least on.

    One alone: smaller micro-batches, which cost no operations; parameters split by fsdp, which are then sent around;
    remat, which takes a third more time. Then two and three of them, with fsdp as far as it goes; and last also with
    products of bfloat16, which change what the run computes, and with heads and features split by tensor.
    """
    config, length, heads = plan.config, plan.config.train_length, plan.config.model.num_heads
    shards, tensor = batch_parts(batch_sharding(mesh)), mesh.shape["tensor"]
    tokens = config.train.batch_tokens // shards // plan.micro_batches
    smaller = [{"train.max_device_tokens": tokens // 2**n} for n in range(1, 12) if tokens // 2**n >= length]
    parts = [n for n in range(mesh.shape["fsdp"] + 1, shards + 1) if shards % n == 0]
    split = [{"mesh.data": -1, "mesh.fsdp": n} for n in parts]
    again = [] if config.model.remat else [{"model.remat": True}]
    yield from (*smaller, *split, *again)
    whole = split[-1:]  # parameters split over all that also split the batch
    pairs: list[list[dict[str, Any]]] = [whole, again, [*whole, *again]]
    for others in pairs:
        if len(others) == 2:
            yield _joined(others)
        yield from (_joined([one, *others]) for one in smaller if others)
    furthest = [*smaller[-1:], *whole, *again]
    rounded = [] if config.model.dtype == "bfloat16" else [{"model.dtype": "bfloat16"}]
    yield from rounded
    yield _joined([*furthest, *rounded])
    for n in range(tensor + 1, heads + 1):
        if heads % n == 0 and plan.devices % n == 0:
            yield _joined([*furthest, *rounded, {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": n}])


def _joined(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.items()}
