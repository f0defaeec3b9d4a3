"""Training: from a config and a work directory to checkpoints and metrics."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from alibi.config import Config, flatten
from alibi.data.batches import TrainBatches
from alibi.data.tokenfile import TokenFile
from alibi.errors import FAILED, REQUEUE, disk_errors_named, is_watched
from alibi.model.decoder import UNKNOWN_VOCABULARY, DecoderLM, build_model
from alibi.parallel import hosts, peers
from alibi.parallel.sharding import batch_parts, batch_sharding, make_mesh
from alibi.parallel.signals import Interrupted, answered
from alibi.runs import RunDirectory, code_hash, make_provenance, versions
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.storage.store import LostError
from alibi.training.feed import Feed
from alibi.training.interrupt import Interrupt
from alibi.training.metric_writers import check_writers
from alibi.training.optimizer import make_optimizer
from alibi.training.parent import Parent
from alibi.training.record import NonFiniteLossError, Record, peak_tokens_per_second
from alibi.training.setup import (
    check_config,
    check_imported,
    make_validator,
    micro_batches,
    prepare_files,
    sequences_per_update,
)
from alibi.training.state import abstract_state, initial_state
from alibi.training.step import TrainStep, make_train_step
from alibi.training.updates import Updates

__all__ = ["Interrupted", "NonFiniteLossError", "train"]

SAME_TEXT = ("sha256", "tokenizer_fingerprint", "tokens")


def train(config: Config, workdir: str) -> dict[str, Any]:
    """Trains the run that `config` describes in `workdir`, from its latest checkpoint if it has one.

    Where it has no checkpoint, it starts with the parameters of the run `config.init_from`, if that names one.

    Returns:
      The run's final status (see `RunDirectory.status`). A finished run is left as it is, unless
      its last checkpoint was lost: then it goes on from the one before.

    Raises:
      ValueError: a config, corpus or work directory that can't be used, or whose checkpoints were
        all lost; before any work.
      NonFiniteLossError: see there.
      UserError: no space left.
      Interrupted: one of SIGNALS arrived; from the first update on a checkpoint was saved.
    """
    interrupt = Interrupt()
    with answered(interrupt.request):
        return _train(config, workdir, interrupt)


def _train(config: Config, workdir: str, interrupt: Interrupt) -> dict[str, Any]:
    job = _checked(config, workdir)
    run = job.run
    if hosts.told(lambda: _is_finished(run)):
        return run.status()
    with disk_errors_named(run):
        run.started = hosts.told(lambda: run.claim(job.config, job.files["train"].tokenizer()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(peers.when_lost(functools.partial(_record_lost, run)))
        if hosts.is_primary():
            stack.callback(run.release)
            stack.enter_context(_failure_recorded(run, job.config.train.steps))
        stack.enter_context(disk_errors_named(run))
        _started(job, interrupt, stack).finish()
        if hosts.is_primary() and not is_watched():
            print(f"finished; {_next_command(run)}", file=sys.stderr)
        return run.status()


@dataclasses.dataclass(frozen=True)
class _Job:
    """A run that can be trained: all that it is made of has been checked, and nothing of it is written yet.

    Attributes:
      config: with every key.
      parent: the run whose parameters this one starts with; None where it names none, or has a checkpoint already.
      model: for the vocabulary of the text.
      files: the tokens of each split.
      corpus: what the tokens of each split were made of, as provenance tells it.
    """

    config: Config
    run: RunDirectory
    mesh: Mesh
    parent: Parent | None
    model: DecoderLM
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    files: Mapping[str, TokenFile]
    corpus: dict[str, Any]
    batches: TrainBatches


def _checked(config: Config, workdir: str) -> _Job:
    if config.init_from:
        config = dataclasses.replace(
            config, init_from=str(RunDirectory(config.init_from))
        )  # wherever the same command is given again
    hosts.check_alike(_facts(config, workdir))
    run, mesh = RunDirectory(workdir), make_mesh(config.mesh)
    sharding = batch_sharding(mesh)
    check_config(config, mesh)
    hosts.on_first(lambda: check_writers(config))
    model = build_model(config, UNKNOWN_VOCABULARY, sharding=sharding)
    model.position.check_length(config.train_length)
    optimizer, schedule = make_optimizer(config.optimizer, config.train.steps)
    begun = hosts.told(lambda: bool(run.saved_steps()))
    parent = Parent(config, model) if config.init_from and not begun else None
    hosts.on_first(lambda: run.check(config))
    hosts.on_first(lambda: check_imported(config, run))

    files = prepare_files(config.data)
    text = files["train"].manifest
    if parent:
        parent.check_vocabulary(text.tokenizer_fingerprint)
    batches = TrainBatches(
        files["train"].tokens,
        length=config.train_length,
        batch_size=sequences_per_update(config, batch_parts(sharding)),
        seed=config.seed,
        boundary_id=text.boundary_id,
    )
    corpus = {split: dataclasses.asdict(file.manifest) for split, file in files.items()}
    hosts.check_alike({f"{split}'s {key}": corpus[split][key] for split in corpus for key in SAME_TEXT})
    hosts.on_first(lambda: run.check_corpus(corpus))
    model = model.with_vocabulary(text.vocab_size)
    return _Job(config, run, mesh, parent, model, optimizer, schedule, files, corpus, batches)


def _started(job: _Job, interrupt: Interrupt, stack: contextlib.ExitStack) -> Updates:
    """The run with its step compiled, at its newest whole checkpoint or at its start; `stack` closes what it opened."""
    config, run, model, mesh = job.config, job.run, job.model, job.mesh
    checkpoints = stack.enter_context(Checkpoints(run.checkpoints, keep=config.checkpoint.keep))
    latest = hosts.told(lambda: checkpoints.latest) or 0
    parent = None if latest else job.parent  # another start of the run may have saved since it was checked
    vocab_size = job.files["train"].manifest.vocab_size
    abstract = abstract_state(model, job.optimizer, mesh)
    about = _about(config, abstract, vocab_size, job.corpus)
    if config.init_from and not parent:
        about["parent"] = hosts.told(lambda: run.provenance().get("parent"))
    if hosts.is_primary():
        run.write("provenance.json", about)
    micro = micro_batches(config, batch_parts(batch_sharding(mesh)))
    feed = stack.enter_context(contextlib.closing(Feed(job.batches, mesh, micro)))
    validator = make_validator(config, model, job.files["valid"]) if "valid" in job.files else None
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    update = make_train_step(model, job.optimizer, config.seed, schedule=job.schedule, state_shardings=shardings)
    if latest:
        start = functools.partial(checkpoints.restore_newest, abstract)
    else:
        start = functools.partial(parent.state if parent else initial_state, model, job.optimizer, mesh, config.seed)
    if hosts.is_primary() and not is_watched():
        print(_first_lines(config, run, mesh, about), file=sys.stderr)
    train_step, state = _compile_beside(start, update, abstract, feed, latest)
    if parent:  # which knows only now which of its checkpoints it was read from
        about["parent"] = parent.about()
        hosts.on_first(lambda: run.write("provenance.json", about))
        hosts.on_first(parent.tell)
    peak = peak_tokens_per_second(config, vocab_size, mesh)
    step = int(state.step)  # an earlier one than the latest, where that is damaged
    record = stack.enter_context(contextlib.closing(Record(config, run, checkpoints, step, peak)))
    return Updates(config, run, about, interrupt, feed, train_step, validator, checkpoints, record, state)


def _facts(config: Config, workdir: str) -> dict[str, Any]:
    """What must be the same on all hosts, or they train what nobody asked for, or wait for each other for ever."""
    keys = {key: value for key, value in flatten(config).items() if key != "data.cache_dir"}
    return {**keys, "workdir": workdir, "code": code_hash(), **versions()}


def _is_finished(run: RunDirectory) -> bool:
    """Whether nothing is left to do, which is said; also that the last checkpoint of a finished run was lost."""
    status, finished = run.status(), run.is_finished()
    if finished:
        said = f"with {status['steps']} updates; {_next_command(run)}"
    else:
        said = f"but its checkpoint of update {status['step']} was lost since"
    if status["state"] == "finished":
        print(f"{run} was finished before, {said}", file=sys.stderr)
    return finished


def _next_command(run: RunDirectory) -> str:
    return f"evaluate it by\n  python eval_extrapolation.py --workdirs={run} --multiples=1,2,4,8"


def _first_lines(config: Config, run: RunDirectory, mesh: Mesh, about: dict[str, Any]) -> str:
    """What is about to be trained, where, on what, and where it is saved."""
    kinds = " and ".join(about["devices"])
    hosted = f" of {count} processes" if (count := about["process_count"]) > 1 else ""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    steps, batch = config.train.steps, config.train.batch_tokens
    texts = (
        f"{split} {one['tokens']:,} tokens of {textwrap.shorten(one['source'], 60, placeholder=' ...')}"
        for split, one in about["corpus"].items()
    )
    lines = [
        f"devices: {mesh.size} x {kinds}{hosted}, mesh {axes}",
        f"model: {config.position}, {about['parameters']:,} parameters; "
        f"{batch:,} tokens a step, {steps * batch:,} in {steps:,} steps",
        f"corpus ({config.data.tokenizer}): {'; '.join(texts)}",
        f"saved in: {run}",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _failure_recorded(run: RunDirectory, steps: int) -> Iterator[None]:
    """Writes why a run ended to its status, with the traceback beside it, as far as the disk allows."""
    try:
        yield
    except LostError:
        raise  # the status is another's to write
    except Interrupted:
        _record_lost(run, "stopped by a signal", REQUEUE)  # unless it stands there with the update
        raise
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = "stopped by a signal" if state == "interrupted" else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, ValueError, LostError):
            before = run.status()
            figures = ("train_nll", "tokens_per_second", "peak_memory_bytes", "best")
            kept = {key: before[key] for key in figures if key in before}
            run.write_status(state, step=before["step"], steps=steps, reason=reason, **kept)
            run.store.write("error.txt", traceback.format_exc())
        raise


def _record_lost(run: RunDirectory, reason: str, code: int) -> None:
    """Writes to the status of a run that it was interrupted, or failed, on whichever host is left.

    What the first one writes asks its claim. The others, which have none, leave the status of a start that came since.
    """
    status = run.status()
    if status["state"] == "running" and (hosts.is_primary() or status.get("started") == run.started):
        kept = {key: value for key, value in status.items() if key not in ("updated", "saved")}
        run.write_status(**kept | {"state": "failed" if code == FAILED else "interrupted", "reason": reason})


def _about(config: Config, state: TrainState, vocab_size: int, corpus: dict[str, Any]) -> dict[str, Any]:
    """What stands in provenance.json and in each checkpoint: the config, and what the run is made of and by."""
    return {
        "config": dataclasses.asdict(config),
        **make_provenance(
            devices=sorted({device.device_kind for device in jax.devices()}),
            device_count=jax.device_count(),
            process_count=jax.process_count(),
            parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            vocab_size=vocab_size,
            corpus=corpus,
        ),
    }


def _compile_beside(
    start: functools.partial[TrainState], update: jax.stages.Wrapped, abstract: TrainState, feed: Feed, step: int
) -> tuple[TrainStep, TrainState]:
    """The compiled step and what `start` gives, made at the same time: compiling leaves a core and Python idle."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        state = pool.submit(start)
        lowered = update.lower(abstract, *feed.abstract)
        feed.read_ahead(step)
        return lowered.compile(), state.result()
    finally:
        pool.shutdown(wait=False)  # a signal is answered at once, not when a large checkpoint has been read
