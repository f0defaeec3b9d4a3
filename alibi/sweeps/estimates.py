"""A sweep's remaining time, from the speed that runs have shown, and plans on other devices."""

import statistics
from collections.abc import Sequence

from alibi.config import replaced
from alibi.devices.kinds import GIB, known_device_kind
from alibi.model.decoder import build_model, count_parameters
from alibi.model.flops import CPU_FLOPS_PER_SECOND, training_flops
from alibi.planning.plan import UTILISATIONS, TrainingPlan, Vocabulary, device_hours_text, make_plan
from alibi.reporting.writers import aligned, format_duration
from alibi.runs import usable_cores
from alibi.sweeps.definition import Run
from alibi.sweeps.processes import is_on_cpu
from alibi.sweeps.state import SweptRun

START_SECONDS = 15.0  # before a process reads its first token: imports and compilation


def seconds_left(
    states: Sequence[SweptRun],
    measured: Sequence[SweptRun],
    jobs: int = 1,
    *,
    rough: bool = False,
    vocab_size: int | None = None,
) -> float | None:
    """Returns the remaining time with `jobs` runs at a time, or None if the speed is not known.

    Args:
      measured: their median speed counts, of those that have one.
      rough: use `CPU_FLOPS_PER_SECOND` if no run has shown a speed.
      vocab_size: defaults to the size that each config decides.
    """
    rates = [state.tokens_per_second for state in measured if state.tokens_per_second]
    evaluations = [state.seconds for state in measured if state.seconds and not state.missing]
    seconds, left = 0.0, 0
    for state in states:
        if not state.is_trained:
            size = vocab_size or _vocab_size(state.run)
            if rates:
                rate = statistics.median(rates)
            elif rough and size:
                rate = CPU_FLOPS_PER_SECOND / training_flops(state.run.config, size)
            else:
                return None
            seconds += START_SECONDS + state.tokens_left / rate
        if state.missing:
            seconds += START_SECONDS + (statistics.median(evaluations) if evaluations else 0.0)
        left += not state.is_done
    return seconds / max(1, min(jobs, left))


def plan_table(states: Sequence[SweptRun], jobs: int = 1) -> str:
    """Returns the table for --dry_run: each run's parameters, tokens, time left and state, and the time
    left for all with `jobs` runs at a time on this machine.
    """
    # Only on CPUs: accelerators differ a thousandfold.
    rough = not any(state.tokens_per_second for state in states) and is_on_cpu()
    lines = [["run", "parameters", "tokens", "time left", "state"]]
    for state in states:
        train, parameters = state.run.config.train, "not known yet"
        try:
            parameters = f"{state.directory.provenance()['parameters']:,}"
        except (ValueError, KeyError):  # not started
            if vocab_size := _vocab_size(state.run):
                parameters = f"{count_parameters(build_model(state.run.config, vocab_size)):,}"
        seconds = seconds_left([state], states, rough=rough)
        time = ("~" if rough and seconds else "") + format_duration(seconds)
        lines.append(
            [
                state.run.name,
                parameters,
                f"{train.steps * train.batch_tokens:,}",
                time,
                state.describe(),
            ]
        )
    until = "until one run has shown the speed"
    total = seconds_left(states, states, jobs, rough=rough)
    left = f"about {format_duration(total)} with --jobs={jobs} on this machine of {usable_cores()} cores"
    if total is None:
        left = f"unknown {until}"
    elif rough:
        left += f" (~: rough, training at {CPU_FLOPS_PER_SECOND / 1e9:.0f} GFLOP/s a run, {until})"
    return f"{aligned(lines, left=(0, 4))}\ntime left in all: {left}\n"


def device_table(
    runs: Sequence[Run], devices: int, device_kind: str, vocab_size: int | None = None
) -> str:
    """Returns a line for each run with the plan of its training on `devices`, without other runs.

    Raises:
      ValueError: as `alibi.planning.plan.make_plan`, with the run's name.
    """
    kind = known_device_kind(device_kind)
    shares = [f"at {share:.0%}" for share in UTILISATIONS]
    rows = [["run", "GiB a device", *shares, "device-hours at 50%", "fits"]]
    by_config: dict[str, TrainingPlan] = {}  # without the seed
    plans = []
    for run in runs:
        key = str(replaced(run.config, {"seed": 0}))
        try:
            plan = by_config.get(key) or make_plan(run.config, devices, device_kind, vocab_size)
        except ValueError as error:
            raise ValueError(f"run {run.name}: {error}") from None
        by_config[key] = plan
        plans.append(plan)
        fits = "yes" if plan.fits else "no"
        rows.append([run.name, f"{plan.memory.total / GIB:.2f}", *_hours([plan], devices), fits])
    rows.append(["in all", "", *_hours(plans, devices), ""])
    usable = f"{kind.usable_memory / GIB:.2f} GiB can be used"
    note = f"trained on {devices:,} x {kind.name}, at shares of the peak; {usable}"
    return f"{note}\n{aligned(rows, left=(0, len(rows[0]) - 1))}"


def _hours(plans: Sequence[TrainingPlan], devices: int) -> list[str]:
    """Returns the hours for all plans at each share of the peak, and the device-hours at half of it."""
    hours = {share: sum(plan.hours(share) for plan in plans) for share in UTILISATIONS}
    return [
        *(format_duration(3600 * value) for value in hours.values()),
        device_hours_text(devices * hours[0.5]),
    ]


def _vocab_size(run: Run) -> int | None:
    """Returns the size of the vocabulary, if the config alone decides it."""
    vocabulary = Vocabulary.of(run.config.data)
    return None if vocabulary.assumed else vocabulary.size
