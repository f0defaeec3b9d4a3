"""Work directories as training leaves them, made without training, and the rows of their
evaluation.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax

from alibi.config import make_config
from alibi.data.tokens import find_tokenizer, make_corpus
from alibi.evaluation.context_use import ContextUse
from alibi.evaluation.evaluate import EvaluationOptions, evaluate_runs
from alibi.evaluation.output import Output
from alibi.evaluation.perplexity import Perplexity
from alibi.evaluation.subject import Subject
from alibi.model.decoder import build_model
from alibi.parallel.sharding import make_mesh
from alibi.reporting.rows import read_rows
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints
from alibi.training.step import initial_state

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 3 + "a last line, cut sho"
TRAINED_ON = "7ra1n"  # stands for the hash of the train tokens


@functools.cache
def made_state(model, mesh, seed):
    """Returns the initial state, which is saved and never changed."""
    return initial_state(model, optax.sgd(0.1), make_mesh(mesh, jax.devices()[:1]), seed)


def run_keys(position, folder, seed=0, text=None):
    """Returns the keys of a tiny run's config."""
    text = str(text or folder / "text.txt")
    return (
        f"position={position},length=16,model.num_layers=1,model.width=16,model.num_heads=2,model.feed_forward=16,"
        f"seed={seed},eval.batch_tokens=32,data.corpus=text,data.train={text},data.valid={text},"
        f"data.cache_dir={folder / 'cache'}"
    )


def make_run(folder, position, name, seed=0, steps=(3, 5), text=None, keys=""):
    """Returns a work directory as training leaves it: two checkpoints, of which the first is the
    better; `keys` of the config come last.
    """
    config = make_config(f"{run_keys(position, folder, seed, text)},{keys}")
    run = RunDirectory(folder / name)
    tokenizer = find_tokenizer(config.data, make_corpus(config.data))
    run.check(config)
    run.claim(config, tokenizer)
    state = made_state(build_model(config, tokenizer.vocab_size), config.mesh, seed)
    with Checkpoints(run.checkpoints) as checkpoints:
        for step in steps:
            checkpoints.save(state, step, {}, valid_nll=float(step))
    run.write("provenance.json", {"corpus": {"train": {"sha256": TRAINED_ON}}})
    run.write_status("finished", step=steps[-1], steps=steps[-1])
    run.release()
    return run.path


def rows_by_cell(directory):
    return {(row.run, row.length): row for row in read_rows(directory / "results.jsonl")}


def rows_of(runs, options):
    """Returns the rows after an evaluation, which succeeds."""
    assert evaluate_runs(runs, options) == []
    return read_rows(options.output_dir / "results.jsonl")


def options_of(output_dir, lengths=(), *, evaluator=Perplexity, context_windows=0, **given):
    """Returns the options of an evaluation, given together with those of its evaluator; with
    `context_windows` also by context use. Reports, whose figures take a second, must be asked for.
    """
    common = {field.name for field in dataclasses.fields(EvaluationOptions)}
    evaluators = [evaluator(**{key: given.pop(key) for key in given.keys() - common})]
    if context_windows:
        evaluators.append(ContextUse(context_windows=context_windows))
    given = {"report": False} | given
    return EvaluationOptions(output_dir, lengths, evaluators=tuple(evaluators), **given)


def nll_alone(run, rows, length):
    """Returns the NLL of each token in rows but of their first, by one full pass of a causal model, which
    doesn't see the zeros behind shorter rows.
    """
    padded = np.stack([np.pad(row, (0, length + 1 - len(row))) for row in rows])
    logs = jax.nn.log_softmax(jax.jit(run.model.apply)({"params": run.params}, padded[:, :-1]))
    return -np.take_along_axis(np.asarray(logs), padded[:, 1:, None], axis=-1)[..., 0]


def subject_of(run, options):
    """Returns a run under evaluation."""
    return Subject(options.trained(str(run)), Output(options.output_dir))
