"""Trains, evaluates and reports every run of a sweep file, and goes on where it was stopped.

    python scripts/sweep.py --sweep=configs/sweeps/quickstart.py --workdir=workdirs/quickstart [--dry_run] [--jobs=0]

Writes results.jsonl, report.md and extrapolation.png to --workdir, and each run to
runs/NAME in it. --dry_run shows each run's state, size and estimated time instead, and with
--device_kind and --devices what its training takes there. On several hosts start it on
each, with a shared --workdir and train.py's flags for that.
"""

import os
import pathlib
import sys

from absl import flags

# A clone works without being installed: python scripts/sweep.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from alibi import command_line

_SWEEP = flags.DEFINE_string("sweep", None, "FILE.py with get_sweep()")
_WORKDIR = flags.DEFINE_string("workdir", None, "place of the runs, results and report; may be gs://BUCKET/PATH")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "show what would be done, and do nothing")
_JOBS = command_line.define_jobs_flag()
_DEVICES, _DEVICE_KIND = command_line.define_device_flags()
command_line.define_host_flags()  # given on to train.py and eval_extrapolation.py


def main() -> int:
    import jax

    # This process computes nothing: accelerators belong to the runs that it starts.
    jax.config.update("jax_platforms", "cpu")
    from alibi.runs.lease import is_held
    from alibi.runs.store import open_store
    from alibi.sweeps.definition import load_sweep
    from alibi.sweeps.estimates import device_table, plan_table
    from alibi.sweeps.execute import Sweeper, is_primary, run_sweeper
    from alibi.sweeps.state import survey

    workdir = open_store(_WORKDIR.value)
    sweep = load_sweep(_SWEEP.value)
    primary = is_primary(flags.FLAGS.process_id, flags.FLAGS.multihost, os.environ)
    sweeper = Sweeper(sweep, workdir, flags=command_line.host_flags(), primary=primary, jobs=_JOBS.value)
    if _DEVICE_KIND.value and not _DRY_RUN.value:
        raise ValueError("--device_kind is of the plan that --dry_run shows; a sweep runs on what is here")
    if _DRY_RUN.value:
        told = device_table(sweep.runs, _DEVICES.value, _DEVICE_KIND.value) if _DEVICE_KIND.value else ""
        print(plan_table(survey(sweep, workdir, in_progress=is_held(workdir)), sweeper.jobs), end="")
        print(f"\n{told}" if told else "", end="")
        return 0
    return run_sweeper(sweeper)


if __name__ == "__main__":
    command_line.run(main, required=("sweep", "workdir"), addresses=("workdir",), resumes=command_line.RESUMES)
