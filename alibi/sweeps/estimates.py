"""What runs cost: tokens, operations and time, before they are made and from what others took."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from alibi.config import flatten
from alibi.model.flops import CPU_FLOPS_PER_SECOND, training_flops
from alibi.parallel.device_kinds import GIB, known_device_kind
from alibi.planning.plan import UTILISATIONS, TrainingPlan, Vocabulary, make_plan
from alibi.reporting.writers import aligned, format_duration
from alibi.sweeps.definition import Run
from alibi.sweeps.launchers import is_on_cpu
from alibi.sweeps.state import RunState

# Of one process, training or evaluation: imports and compilation, before the first token.
START_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the finished runs of a sweep took; None where none has shown it."""

    tokens_per_second: float | None
    evaluation_seconds: float | None  # of all of a run's results

    @classmethod
    def of(cls, states: Sequence[RunState]) -> "Speed":
        rates = [state.tokens_per_second for state in states if state.tokens_per_second]
        seconds = [state.seconds for state in states if state.seconds and not state.missing]
        return cls(*(statistics.median(values) if values else None for values in (rates, seconds)))

    def seconds_left(self, states: Sequence[RunState], jobs: int = 1, *, rough: bool = False) -> float | None:
        """An estimate for what is left of `states`, `jobs` at a time; None where the speed is not known.

        `rough`: a run whose speed is not known trains at `CPU_FLOPS_PER_SECOND`.
        """
        seconds, left = 0.0, 0
        for state in states:
            if not state.is_trained:
                rate = self.tokens_per_second or (rough_rate(state.run) if rough else None)
                if rate is None:
                    return None
                seconds += START_SECONDS + state.tokens_left / rate
            if state.missing:
                seconds += START_SECONDS + (self.evaluation_seconds or 0.0)
            left += bool(state.missing) or not state.is_trained
        return seconds / max(1, min(jobs, left))


def rough_rate(run: Run) -> float | None:
    """Tokens a second of its training on CPUs, from the operations of a token; None while the vocabulary is unknown."""
    vocab_size = _vocab_size(run)
    return CPU_FLOPS_PER_SECOND / training_flops(run.config, vocab_size) if vocab_size else None


def plan_table(states: Sequence[RunState], jobs: int = 1) -> str:
    """What --dry_run prints: each run's parameters, tokens to train on, estimated time left and state."""
    speed = Speed.of(states)
    # Accelerators differ a thousandfold.
    rough = speed.tokens_per_second is None and is_on_cpu()
    lines = [["run", "parameters", "tokens", "time left", "state"]]
    for state in states:
        train = state.run.config.train
        known = f"{count:,}" if (count := _known_parameters(state)) else "not known yet"
        seconds = speed.seconds_left([state], rough=rough)
        time = ("~" if rough and seconds else "") + format_duration(seconds)
        lines.append([state.run.name, known, f"{train.steps * train.batch_tokens:,}", time, state.describe()])
    total, until = speed.seconds_left(states, jobs, rough=rough), "until one run has shown the speed"
    if total is None:
        told = f"unknown {until}"
    elif rough:
        rate = f"{CPU_FLOPS_PER_SECOND / 1e9:.0f} GFLOP/s a run"
        told = f"~{format_duration(total)} (~: rough, training at {rate}, {until})"
    else:
        told = f"about {format_duration(total)}"
    return f"{aligned(lines, left=(0, 4))}\ntime left in all: {told}\n"


def device_table(runs: Sequence[Run], devices: int, device_kind: str, vocab_size: int | None = None) -> str:
    """What the training of each run takes on `devices` of a kind, one run after the other, in a line each.

    Raises:
      ValueError: as `alibi.planning.plan.make_plan`, with the run that it is about.
    """
    kind = known_device_kind(device_kind)
    made: dict[str, TrainingPlan] = {}  # by config without its seed
    plans = []
    for run in runs:
        same = str(sorted((key, value) for key, value in flatten(run.config).items() if key != "seed"))
        if same not in made:
            try:
                made[same] = make_plan(run.config, devices, device_kind, vocab_size)
            except ValueError as error:
                raise ValueError(f"run {run.name}: {error}") from None
        plans.append(made[same])
    shares = [f"at {share:.0%}" for share in UTILISATIONS]
    rows = [["run", "GiB a device", *shares, "device-hours at 50%", "fits, or would with"]]
    for run, plan in zip(runs, plans, strict=True):
        fits = "fits" if plan.fits else _listed(plan.change or {}) or "does not fit"
        rows.append([run.name, f"{plan.memory.total / GIB:.2f}", *_hours([plan], devices), fits])
    rows.append(["in all", "", *_hours(plans, devices), ""])
    note = (
        f"trained on {devices:,} x {kind.name}, at shares of the peak; {kind.usable_memory / GIB:.2f} GiB can be used"
    )
    return f"{note}\n{aligned(rows, left=(0, len(rows[0]) - 1))}"


def _hours(plans: Sequence[TrainingPlan], devices: int) -> list[str]:
    """Of all of them, at the shares of the peak, and in hours of a device at half of it."""
    hours = {share: sum(plan.hours(share) for plan in plans) for share in UTILISATIONS}
    return [*(format_duration(3600 * one) for one in hours.values()), f"{devices * hours[0.5]:,.3g}"]


def _listed(change: Mapping[str, Any]) -> str:
    """Config keys as sweep files and configs' arguments take them."""
    return ",".join(f"{key}={value}" for key, value in change.items())


def parameters(run: Run, vocab_size: int) -> int:
    """How many numbers the run's model learns; nothing is allocated."""
    from alibi.model.decoder import build_model, count_parameters

    return count_parameters(build_model(run.config, vocab_size))


def _known_parameters(state: RunState) -> int | None:
    """As the run recorded them, else counted; None while the vocabulary is not known."""
    try:
        return state.directory.provenance()["parameters"]
    except (ValueError, KeyError):
        vocab_size = _vocab_size(state.run)
    return None if vocab_size is None else parameters(state.run, vocab_size)


def _vocab_size(run: Run) -> int | None:
    """As far as the config alone tells."""
    vocabulary = Vocabulary.of(run.config.data)
    return None if vocabulary.assumed else vocabulary.size
