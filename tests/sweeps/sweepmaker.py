"""Sweeps of the quickstart, and the files of their finished runs, for tests."""

import pathlib

from alibi.data.tokenizers import ByteTokenizer
from alibi.runs import RunDirectory, config_hash
from alibi.sweeps.definition import make_sweep
from tests.reporting.rowmaker import make_row

PROJECT = pathlib.Path(__file__).resolve().parents[2]
QUICKSTART = PROJECT / "configs" / "sweeps" / "quickstart.py"


def sweep_of(**changed):
    definition = {
        "config": "configs/quickstart.py",
        "product": {"position": ["alibi", "t5"]},
        "multiples": [1, 2],
    }
    return make_sweep(definition | changed, title="test")


def finish(sweep, workdir, name, **status):
    """Writes the work directory of a finished run."""
    run = next(run for run in sweep.runs if run.name == name)
    directory = RunDirectory(workdir / "runs" / name)
    directory.check(run.config)
    directory.claim(run.config, ByteTokenizer())
    steps = run.config.train.steps
    status = {
        "state": "finished",
        "step": steps,
        "steps": steps,
        "tokens_per_second": 2048.0,
    } | status
    (directory.checkpoints / str(status["step"])).mkdir(parents=True)
    directory.write_status(**status)
    directory.release()


def result(sweep, position="alibi", length=128, perplexity=8.0, **changed):
    """Returns a row of this method's run."""
    run = next(run for run in sweep.runs if run.config.position == position)
    known = {"config_hash": config_hash(run.config), "step": run.config.train.steps}
    return make_row(position, length, perplexity, **(known | changed))
