"""A plan as text."""

from collections.abc import Mapping
from typing import Any

from alibi.parallel.device_kinds import GIB
from alibi.planning.plan import UTILISATIONS, TrainingPlan
from alibi.reporting.writers import aligned, format_duration


def describe(plan: TrainingPlan) -> str:
    """Returns the text of `train.py --plan`."""
    return "\n".join([_facts(plan), _memory(plan), _time(plan), _checkpoints(plan)])


def config_flags(change: Mapping[str, Any]) -> str:
    """Returns config keys as flags."""
    return " ".join(f"--config.{key}={value}" for key, value in change.items())


def _facts(plan: TrainingPlan) -> str:
    kind, model, train, length = plan.kind, plan.config.model, plan.config.train, plan.config.train_length
    device_tokens = train.batch_tokens // (plan.mesh["data"] * plan.mesh["fsdp"] * plan.micro_batches)
    repeated = "; remat computes a third more" if model.remat else ""
    assumed = f" ({plan.vocabulary.assumed})" if plan.vocabulary.assumed else ""
    peak = f"{kind.bandwidth / 1e9:,.0f} GB/s, {kind.peak(model.dtype) / 1e12:,.4g} TFLOP/s in {model.dtype}"
    facts = {
        "devices": f"{plan.devices:,} x {kind.name}: {kind.memory / GIB:g} GiB, {peak}",
        "": kind.source,
        "mesh": ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
        "model": f"{plan.config.position}, {plan.parameters:,} parameters, a vocabulary of "
        f"{plan.vocabulary.size:,}{assumed}",
        "step": f"{train.batch_tokens:,} tokens, {plan.flops_per_token * train.batch_tokens:.3g} FLOPs{repeated}; "
        f"{plan.micro_batches} x {train.batch_tokens // length // plan.micro_batches:,} sequences of {length:,}, "
        f"{device_tokens:,} tokens a device at a time",
        "run": f"{train.steps:,} steps, {plan.tokens:,} tokens, {plan.flops_per_token * plan.tokens:.3g} FLOPs",
    }
    return "".join(f"{name:<9}{text}\n" for name, text in facts.items())


def _memory(plan: TrainingPlan) -> str:
    memory, model = plan.memory, plan.config.model
    kept = "the inputs of all layers, and one layer" if model.remat else "of all layers"
    twice = ", twice, since micro-batches add up" if plan.micro_batches > 1 else ""
    parts = [
        ("parameters", memory.parameters, "exact"),
        ("optimizer state", memory.optimizer, "exact"),
        ("gradients", memory.gradients, f"as large as the parameters{twice}"),
        ("activations", memory.activations, f"estimated by a formula: {kept}"),
        ("gathered", memory.gathered, "estimated: parameters of other devices, as they are needed here"),
        ("logits", memory.logits, f"and their gradient, of up to {model.logits_chunk:,} tokens (model.logits_chunk)"),
    ]
    rows = [["memory of a device", "GiB", ""]]
    rows += [[f"  {name}", f"{size / GIB:.2f}", note] for name, size, note in parts if size]
    peak = "at one time: the state, and what the loss or the update needs"
    rows.append(["  at most", f"{memory.total / GIB:.2f}", peak])
    usable = f"of {plan.kind.usable_memory / GIB:.2f} GiB that a program can use: "
    return aligned(rows, left=(0, 2)) + usable + _verdict(plan) + "\n"


def _verdict(plan: TrainingPlan) -> str:
    if plan.fits:
        return "fits"
    if not plan.change:
        return "does not fit, nor on more devices; use some with more memory, or a smaller model"
    if plan.devices_needed == plan.devices:
        return f"does not fit; it would with {config_flags(plan.change)}"
    needed = f"it would on {plan.devices_needed:,} with {config_flags(plan.change)}"
    return f"does not fit on {plan.devices:,} in any way; {needed}"


def _time(plan: TrainingPlan) -> str:
    rows = [["training", "time", "device-hours", "tokens/s"]]
    for share in UTILISATIONS:
        hours = plan.hours(share)
        device_hours = plan.devices * hours
        counted = f"{device_hours:,.0f}" if device_hours >= 100 else f"{device_hours:.3g}"
        speed = f"{plan.tokens / hours / 3600:,.0f}"
        rows.append([f"  at {share:.0%} of the peak", format_duration(3600 * hours), counted, speed])
    remat = "; with remat 75% can be reached at most" if plan.config.model.remat else ""
    note = (
        "the share is mfu in metrics.jsonl: products of layers and softmax, and attention to the keys that are seen\n"
        f"not counted: compiling, input, validations, saving{remat}\n"
    )
    return aligned(rows, left=(0,)) + note


def _checkpoints(plan: TrainingPlan) -> str:
    each = plan.checkpoint_bytes
    kept = plan.config.checkpoint.keep + 1  # the latest, and the best or a spare
    return (
        f"checkpoints  {each / 1e9:,.3g} GB each; {kept} are kept, and one more while it is written: "
        f"{(kept + 1) * each / 1e9:,.3g} GB; {plan.checkpoints_written:,} or more are written, "
        f"{plan.checkpoints_written * each / 1e9:,.4g} GB\n"
    )
