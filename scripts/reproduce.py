"""Plans and reproduces the paper's 15 tables: their costs, and our numbers beside the paper's.

    python scripts/reproduce.py --list [--scale=small]
    python scripts/reproduce.py --table=5 --scale=paper
    python scripts/reproduce.py --table=2 --scale=small --run

--list shows all tables with the progress in --workdir.
Without --run it prints the plan: every command, with parameters, tokens and FLOPs of each training
and the time left here, and with --device_kind and --devices the memory and hours there.
With --run, missing runs are trained and evaluated. After a stop, the same command continues.
Then WORKDIR/SCALE/SETTING/tables/ holds the table as Markdown, CSV and LaTeX, and a figure if
the paper has any; SETTING is the paper's text, such as wikitext103, or wikitext103-stand-in. Tables
share their runs. Other --overrides or files have a directory of their own.

The small scale divides lengths by 16 and uses the books inside this repository, or the
text of --train_file, --valid_file and --test_file, such as WikiText-2's: a minute or two a
run on two cores. The medium scale divides them by 4 and reads bytes of long books from the
hub (PG-19), or of such files: ten minutes a run. The paper scale takes WikiText-103 from
the hub, unless files are given, and needs files for its books and CC100.
"""

import pathlib

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line
from alibi.paper.settings import SCALES

_TABLE = flags.DEFINE_integer(
    "table", None, "number of the paper's table, 1 to 15", lower_bound=1, upper_bound=15
)
_SCALE = flags.DEFINE_enum(
    "scale",
    "small",
    SCALES,
    "the paper's, or medium or small: the same protocol on two cores",
)
_RUN = flags.DEFINE_bool("run", False, "train and evaluate the missing runs, and write the table")
_LIST = flags.DEFINE_bool("list", False, "show all tables of --scale with their state")
_WORKDIR = flags.DEFINE_string(
    "workdir",
    "workdirs/reproduce",
    "place of the runs and tables, of all scales; may be gs://BUCKET/PATH",
)
_OVERRIDES = flags.DEFINE_string(
    "overrides",
    "",
    "KEY=VALUE,...: config keys for all runs, such as train.steps=100 (the schedule ends with them)",
)
_FILES = {
    split: flags.DEFINE_string(
        f"{split}_file", None, f"text to take as the {split} split: a file or glob"
    )
    for split in ("train", "valid", "test")
}
_JOBS = command_line.define_jobs_flag()
command_line.define_device_flags()
command_line.define_host_flags()  # given on to train.py and eval_extrapolation.py
command_line.own_flags(__name__)


def main() -> int:
    import jax

    # This process computes nothing: accelerators belong to the runs that it starts.
    jax.config.update("jax_platforms", "cpu")
    from alibi.paper.definitions import TABLES
    from alibi.paper.plan import describe_plan, overview, vocab_size
    from alibi.sweeps.estimates import device_table

    planned = _TABLE.value is not None and not (_LIST.value or _RUN.value)
    devices = command_line.planned_devices(planned, "--table=N without --run")
    if _LIST.value:
        print(overview([_reproduction(number) for number in TABLES]), end="")
        return 0
    if _TABLE.value is None:
        raise ValueError("give --table=N, 1 to 15, or --list")
    reproduction = _reproduction(_TABLE.value)
    if _RUN.value:
        return _run(reproduction)
    print(describe_plan(reproduction), end="")
    if devices:
        table = device_table(reproduction.sweep.runs, *devices, vocab_size(reproduction))
        print(f"\n{table}", end="")
    return 0


def _run(reproduction) -> int:
    import functools

    from alibi.extras import needs
    from alibi.paper.results import write_table
    from alibi.sweeps.execute import Sweeper, is_primary, run_sweeper

    reproduction.setting.check_files(reproduction.files)
    sweeper = Sweeper(
        reproduction.sweep,
        reproduction.directory,
        flags=command_line.host_flags(),
        primary=is_primary(flags.FLAGS.process_id, flags.FLAGS.multihost),
        jobs=_JOBS.value,
        report=functools.partial(write_table, reproduction),
    )
    needs("the report of the tables", "vl_convert")
    return run_sweeper(sweeper)


def _reproduction(number: int):
    from alibi.paper.reproduction import Reproduction

    files = {
        split: str(pathlib.Path(flag.value).absolute())
        for split, flag in _FILES.items()
        if flag.value
    }
    return Reproduction(
        number, _SCALE.value, _WORKDIR.value, files=files, overrides=_OVERRIDES.value
    )


if __name__ == "__main__":
    command_line.run(main, addresses=("workdir",), resumes=command_line.RESUMES)
