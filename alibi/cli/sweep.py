"""Trains, evaluates and reports every run of a sweep file, and continues unfinished runs.

    python scripts/sweep.py --sweep=configs/sweeps/quickstart.py --workdir=workdirs/quickstart [--dry_run] [--jobs=0]
    python scripts/sweep.py --sweep=... --workdir=... --task=0/3    # and 1/3 and 2/3, where and when you like

Writes results.jsonl, report.md and extrapolation.png to --workdir, and each run to
runs/NAME in it. --dry_run shows each run's state, size and estimated time instead, and with
--device_kind and --devices the plan of its training there. On several hosts start it on
each, with a shared --workdir and train.py's flags for several hosts.

--task=I/N, or a run's name, does only these runs. Tasks may run at the same time: a run held by
another process is left to it (exit code 75), and finished work is not repeated. The last task to
end reports. Without --task the command does all runs, and reports too. scripts/submit.py submits
tasks to a cluster.
"""

from absl import flags

from alibi.cli import command_line
from alibi.extras import needs

flags.DEFINE_string("sweep", None, "a sweep file, such as configs/sweeps/quickstart.py")
flags.DEFINE_string(
    "workdir", None, "place of the runs, results and report; may be gs://BUCKET/PATH"
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "show the state and the plan of each run, and do nothing"
)
_TASK = flags.DEFINE_string(
    "task", None, "part of the runs: I/N, the I-th of N parts, from 0; or a run's name"
)
_REPORT = flags.DEFINE_bool(
    "report", True, "write the report and its figures, for which vl-convert-python is needed"
)
_SEEDS_TOGETHER = flags.DEFINE_bool(
    "seeds_together",
    False,
    "train runs that differ in their seed only in one program, on one device: for small models on an accelerator",
)
_JOBS = command_line.define_jobs_flag()
command_line.define_device_flags()
command_line.define_host_flags()  # given on to train.py and eval_extrapolation.py
command_line.own_flags(__name__)


def main() -> int:
    import jax

    # This process computes nothing: accelerators belong to the runs that it starts.
    jax.config.update("jax_platforms", "cpu")
    from alibi.data.textfiles import TextFiles
    from alibi.storage.files import resolve
    from alibi.sweeps.definition import load_sweep
    from alibi.sweeps.estimates import device_table, plan_table
    from alibi.sweeps.execute import Sweeper, is_primary, run_sweeper
    from alibi.sweeps.state import survey

    devices = command_line.planned_devices(_DRY_RUN.value, "--dry_run")
    workdir = resolve(flags.FLAGS.workdir)
    sweep = load_sweep(flags.FLAGS.sweep)
    share = None if _TASK.value is None else sweep.share(_TASK.value)
    sweeper = Sweeper(
        sweep,
        workdir,
        flags=command_line.host_flags(),
        primary=is_primary(flags.FLAGS.process_id, flags.FLAGS.multihost),
        jobs=_JOBS.value,
        report=None if _REPORT.value else lambda failures: "the rows have no report",
        share=share,
        seeds_together=_SEEDS_TOGETHER.value,
    )
    if _DRY_RUN.value:
        runs = sweep.runs if share is None else share
        plan = f"\n{device_table(runs, *devices)}" if devices else ""
        print(plan_table(survey(runs, workdir), sweeper.jobs), end=plan)
        return 0
    missing = [one for run in survey(share or sweep.runs, workdir) for one in run.missing]
    texts = (getattr(each, "text_file", "") for one in missing for each in one.evaluators)
    for text in dict.fromkeys(filter(None, texts)):  # an error now, and not after the training
        TextFiles({"file": text}).files("file")
    if _REPORT.value:
        needs("the report, which --noreport leaves out,", "vl_convert")
    return run_sweeper(sweeper)


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(
        main,
        required=("sweep", "workdir"),
        addresses=("workdir",),
        resumes=command_line.RESUMES,
        absent={"plan": "--dry_run shows the state and the plan of each run"},
    )


if __name__ == "__main__":
    run()
