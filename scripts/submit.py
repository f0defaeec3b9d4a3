"""Fills a template of a job with a sweep or a single training, and gives it to the cluster: sbatch,
kubectl or bash.

    python scripts/submit.py --template=configs/launch/slurm.sh --sweep=configs/sweeps/quickstart.py --workdir=DIR \\
      --set=TIME=4:00:00 [--go]
    python scripts/submit.py --template=configs/launch/jobset.yaml --config=configs/cc100_1b3.py --workdir=gs://B/DIR \\
      --config.data.train=TRAIN --config.data.valid=VALID \\
      --set=IMAGE=IMAGE --set=QUEUE=QUEUE --set=TOPOLOGY=4x4 --set=HOSTS=4 [--go]

Without --go it prints the filled text. The templates in configs/launch/ list their needs; copy
a template and change it as your cluster needs. A sweep is split into --tasks, which defaults to a task for each
run: `sweep.py --task=I/N`. The cluster restarts a task that a signal stopped (exit code 75) or
killed, but no failed task. See docs/scaling.md. The state of the runs:
`python scripts/status.py DIR`.
"""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line

_TEMPLATE = flags.DEFINE_string("template", None, "job to fill, such as configs/launch/slurm.sh")
_SWEEP = flags.DEFINE_string(
    "sweep", None, "a sweep file, such as configs/sweeps/quickstart.py; give this or --config"
)
command_line.define_config_flag()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "place of the run or the sweep; may be gs://BUCKET/PATH"
)
_SET = flags.DEFINE_multi_string(
    "set", [], "NAME=VALUE: fills a placeholder of the template; several"
)
_GO = flags.DEFINE_bool("go", False, "submit it")
_TASKS = flags.DEFINE_integer(
    "tasks", None, "parts of the sweep; defaults to one for each run", lower_bound=1
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    "devices of each task, to check that the mesh and the batch fit them",
    lower_bound=1,
)
command_line.own_flags(__name__)


def main() -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # this process computes nothing
    from alibi.data.tokens import make_corpus
    from alibi.runs import RunDirectory
    from alibi.storage.files import is_address, resolve, write_whole
    from alibi.sweeps import templates
    from alibi.sweeps.definition import load_sweep
    from alibi.sweeps.state import record_sweep
    from alibi.sweeps.watch import SUBMITTED_FILE
    from alibi.training.setup import check_trainable

    if (_SWEEP.value is None) == (flags.FLAGS.config is None):
        raise ValueError(
            "give --sweep=FILE.py, or --config=FILE.py of one run; --help shows how the command is used"
        )
    workdir = str(RunDirectory(_WORKDIR.value))
    sweep = load_sweep(_SWEEP.value) if _SWEEP.value else None
    configs = (
        {f"run {run.name}: ": run.config for run in sweep.runs}
        if sweep
        else {"": flags.FLAGS.config}
    )
    for name, config in configs.items():
        try:
            check_trainable(config, _DEVICES.value)
            if make_corpus(config.data).splits_are_files and not config.data.train:
                raise ValueError(
                    f"data.train is empty, but data.corpus={config.data.corpus} reads files; set it"
                )
        except ValueError as error:
            raise ValueError(f"{name}{error}") from None
    template, runs = pathlib.Path(_TEMPLATE.value), len(sweep.runs) if sweep else 1
    try:
        text = template.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--template={template} can't be read ({error}); give a text such as configs/launch/slurm.sh"
        ) from None
    in_clone = "{{CLONE_COMMAND}}" in text
    if in_clone and not is_address(workdir):
        print(
            f"{template.name} starts jobs in clones of their own, which don't see {workdir}; give an address such as "
            "--workdir=gs://BUCKET/NAME, or mount the folder there",
            file=sys.stderr,
        )
    tasks = _TASKS.value or runs
    if tasks > runs:
        raise ValueError(f"--tasks={tasks}: there are {runs} runs; give at most as many tasks")
    command = templates.command_line(
        job_words(workdir, in_clone=in_clone), tasks if sweep else None
    )
    logs = "." if is_address(workdir) else f"{workdir}/{template.stem}"
    values = {
        "NAME": templates.job_name(pathlib.PurePath(workdir).name),
        "WORKDIR": workdir,
        "LOGS": logs.replace("%", "%%"),  # a pattern of Slurm
        "COMMAND": command,
        "CLONE_COMMAND": command,
    }
    if unnamed := [pair for pair in _SET.value if "=" not in pair]:
        raise ValueError(f"--set={unnamed[0]} has no value; write --set={unnamed[0]}=VALUE")
    values_given = dict(pair.partition("=")[::2] for pair in _SET.value)
    filled = templates.fill_tasks(text, values, values_given, tasks)
    if not _GO.value:
        print(filled, end="")
        print("nothing was submitted; --go does", file=sys.stderr)
        return 0
    submit = templates.submit_command(filled)
    if shutil.which(submit[0]) is None:
        raise ValueError(
            f"there is no {submit[0]} on this machine, which takes this template; submit elsewhere"
        )
    if sweep:
        record_sweep(resolve(workdir), sweep, replace=True)
    else:  # status.py shows it before it starts
        write_whole(f"{workdir}/{SUBMITTED_FILE}", json.dumps({"template": template.name}) + "\n")
    if "{{LOGS}}" in text:
        pathlib.Path(logs).mkdir(parents=True, exist_ok=True)
    print(filled, end="", flush=True)
    code = subprocess.run(submit, input=filled, text=True, check=False).returncode
    if code:
        raise ValueError(f"{submit[0]} ended with exit code {code}; its message stands above")
    print(f"look at it by: python scripts/status.py {shlex.quote(str(workdir))}", file=sys.stderr)
    return 0


def job_words(workdir: str, *, in_clone: bool) -> list[str]:
    """Returns the words of the command, with paths on this machine, or inside a clone if `in_clone`.

    Raises:
      ValueError: the sweep or config file lies outside the repository, so a clone lacks it.
    """
    from alibi.sweeps.definition import PROJECT, resolve

    named, *others = [f"--sweep={_SWEEP.value}"] if _SWEEP.value else command_line.config_words()
    flag, _, value = named.partition("=")
    name, colon, argument = value.partition(":")
    script = PROJECT / ("scripts/sweep.py" if _SWEEP.value else "train.py")
    file, python = resolve(os.path.expanduser(name)).absolute(), sys.executable
    if in_clone:
        if not file.is_relative_to(PROJECT):
            raise ValueError(
                f"{file} lies outside this repository, and so outside its clones; move it to configs/"
            )
        python, script, file = "python", script.relative_to(PROJECT), file.relative_to(PROJECT)
    return [
        python,
        str(script),
        f"{flag}={file}{colon}{argument}",
        *others,
        f"--workdir={workdir}",
    ]


if __name__ == "__main__":
    command_line.run(
        main, required=("template", "workdir"), addresses=("workdir",), resumes=command_line.RESUMES
    )
