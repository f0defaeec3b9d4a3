"""The answers of a task that are counted are those that greedy decoding gets right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import make_config
from alibi.data.tasks import TASKS
from alibi.evaluation.perplexity import Perplexity
from alibi.evaluation.task import ANSWERS, TaskAccuracy, TaskGaps
from alibi.reporting.panels import caption
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, options_of, rows_of
from tests.refusals import assert_refused
from tests.reporting.rowmaker import panels

KEYS = (
    "data.corpus=tasks,data.task=reverse,data.task_length=16,data.train=train,data.valid=valid,data.max_train_bytes=160,"
    "data.max_valid_bytes=160,data.isolate_documents=restart"
)


@pytest.fixture(scope="module", params=["answers", "next_token"])
def a_run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    return make_run(folder, "alibi", "a-run", keys=f"{KEYS},objective.name={request.param}")


def test_accuracy_is_that_of_the_likeliest_tokens(a_run, tmp_path):
    options = options_of(tmp_path / "out", (2, 16), evaluator=TaskAccuracy, examples=30)
    both = dataclasses.replace(options, evaluators=(*options.evaluators, TaskGaps(30)))
    rows = rows_of([a_run], both)
    assert [row.error for row in rows if row.length == 2] == [
        "the shortest example of reverse has 4 tokens"
    ] * 2
    run = TrainedRun(a_run)
    by_evaluator = {row.evaluator: row.results for row in rows if row.length == 16}
    random = np.random.default_rng([16, *b"reverse"])
    made = [TASKS["reverse"].example(random, 16) for _ in range(30)]
    tokens, gaps = (np.stack(side) for side in zip(*made, strict=True))
    inputs = np.concatenate([np.full((30, 1), 10), tokens[:, :-1]], axis=1)
    logits = jax.jit(run.model.apply)({"params": run.params}, jnp.asarray(inputs, jnp.int32))
    right = np.argmax(logits, axis=-1) == tokens
    results = by_evaluator["task"]
    assert results["answers"] == pytest.approx(right[gaps > 0].mean())
    assert results["exact"] == pytest.approx((right | (gaps == 0)).all(axis=1).mean())
    for last, share, examples in by_evaluator["task_gaps"]["by_gap"]:
        here = (gaps > last / 2) & (gaps <= last)
        assert examples == here.any(axis=1).sum()
        assert share == pytest.approx(right[here].mean())
    panel = panels(rows, ANSWERS)[0]
    assert "digits, and the same from the last to the first" in caption(panel)
    told = "Effective length, up to which at least 90% are right: a-run none."
    assert panel.measure.explanation(panel) == told


def test_perplexity_is_of_the_answers_alone(a_run, tmp_path):
    (row,) = rows_of([a_run], options_of(tmp_path / "out", (16,), evaluator=Perplexity))
    if row.objective is None:
        assert row.results["tokens"] == 160
    else:
        assert row.objective == {"name": "answers"}
        assert 30 < row.results["tokens"] < 80, "nearly half of the tokens are answers"


def test_a_run_without_a_task_is_refused():
    assert_refused(
        r"data\.corpus=text.* configs/task\.py",
        lambda: TaskAccuracy().check(make_config("data.corpus=text"), (16,)),
    )
