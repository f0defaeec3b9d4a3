"""The work before the first update: cheap checks, the text, and a job to train."""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from alibi.config import Config, DataConfig
from alibi.config.fields import as_text
from alibi.data.batches import TrainBatches
from alibi.data.tokens import TokenFile, check_paths, check_sources, make_corpus, prepare
from alibi.evaluation.scorer import Score, Scorer, model_nll
from alibi.evaluation.windows import Windows, spread_windows
from alibi.generation import Sampling, generate
from alibi.generation.decoding import decode_answer
from alibi.model.decoder import UNKNOWN_VOCABULARY, DecoderLM, build_model, evaluated
from alibi.model.loss import training_loss
from alibi.objectives import Objective, make_objective
from alibi.optimizers import make_optimizer
from alibi.parallel import hosts
from alibi.parallel.sharding import AXES, abstract_mesh, batch_parts, batch_sharding
from alibi.positions.base import PositionMethod
from alibi.runs import RunDirectory, method_files
from alibi.runs.code import own_files
from alibi.runs.overrides import position_parameters
from alibi.testing import check_few_tokens, check_finite
from alibi.training.metric_writers import check_writers
from alibi.training.parent import Parent


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The updates of a run from `first` on, until values over updates change.

    Attributes:
      config: the run's, with the values of these updates.
      sampler: from `make_sampler`, or None without eval.sample_prompt.
    """

    first: int
    config: Config
    model: DecoderLM
    batches: TrainBatches
    sampler: Callable[[PyTree], str] | None


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to train: checked, with nothing written yet.

    Attributes:
      parent: the run that this run's parameters come from, or None without init_from or after the
        first checkpoint.
      files, corpus: each split's tokens and manifest.
      stretches: in order, one without values over updates. They share parameters and optimizer state.
    """

    config: Config
    run: RunDirectory
    mesh: Mesh
    parent: Parent | None
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    files: Mapping[str, TokenFile]
    corpus: dict[str, Any]
    stretches: tuple[Stretch, ...]

    @property
    def model(self) -> DecoderLM:
        """The model of the first updates."""
        return self.stretches[0].model


def make_job(
    config: Config, run: RunDirectory, mesh: Mesh, files: Mapping[str, TokenFile] | None = None
) -> Job:
    """Checks a run and prepares its text, unless its `files` are given. Raises ValueError for a refused
    config, corpus or directory.
    """
    sharding = batch_sharding(mesh)
    first, *_ = check_stretches(config, mesh)
    hosts.check_alike({**own_files(), **method_files(config)})  # loaded now
    hosts.broadcast(lambda: check_writers(config))
    optimizer, schedule = make_optimizer(config.optimizer, config.train.steps)
    state, begun = hosts.broadcast(lambda: (run.status()["state"], bool(run.saved_steps())))
    if config.imported_from and state == "missing":
        raise ValueError(
            f"imported_from={config.imported_from!r} is the hash of a model that scripts/import_hf.py or "
            f"import_fairseq.py made a run of, and {run} holds no run; leave it empty, or give the imported run's "
            "--workdir"
        )
    parent = Parent(config.at(1), first) if config.init_from and not begun else None
    hosts.broadcast(lambda: run.check(config))

    files = files or prepare_files(config.data)
    text = files["train"].manifest
    if config.data.isolate_documents and text.documents < 2:
        raise ValueError(
            f"data.isolate_documents={config.data.isolate_documents} needs several documents, and the train text "
            f"{text.source} is one; leave it empty, or see data.document_end"
        )
    if parent:
        parent.check_vocabulary(text.tokenizer_fingerprint)
    corpus = {split: dataclasses.asdict(file.manifest) for split, file in files.items()}
    hosts.check_alike(
        {key: value for file in files.values() for key, value in file.manifest.identity.items()}
    )
    if parent:
        hosts.broadcast(lambda: parent.check_same(corpus))
    hosts.broadcast(lambda: run.check_same(corpus, method_files(config)))
    stretches = tuple(
        make_stretch(first, each, files["train"], sharding) for first, each in config.stretches
    )
    return Job(config, run, mesh, parent, optimizer, schedule, files, corpus, stretches)


def make_stretch(first: int, config: Config, text: TokenFile, sharding: NamedSharding) -> Stretch:
    """Returns the updates after the `first` ones, which have `config`. Raises ValueError for a text
    too short.
    """
    batches = TrainBatches(
        text.tokens,
        length=config.train_length,
        batch_size=sequences_per_update(config, batch_parts(sharding)),
        seed=config.seed,
        objective=objective_of(config, text),
        echoes=config.data.echoes,
        split=config.longest // config.train_length,
    )
    model = build_model(config, text.manifest.vocab_size, sharding=sharding)
    sampler = make_sampler(config, model, text) if config.eval.sample_prompt else None
    return Stretch(first, config, model, batches, sampler)


def check_stretches(config: Config, mesh: Mesh | AbstractMesh) -> list[DecoderLM]:
    """Returns the models of a run, one for each stretch of updates. Raises ValueError for a run that
    can't be trained on `mesh`, or whose position parameters change over its updates.
    """
    for _, each in config.stretches:
        check_config(each, mesh)
    models = [build_model(each, UNKNOWN_VOCABULARY) for _, each in config.stretches]
    for (first, each), model in zip(config.stretches, models, strict=True):
        check_model(model, each.train_length)
        if not first:
            continue
        has, needs = map(position_parameters, (models[0], model))
        pairs = model.method_pairs(models[0])
        if has != needs or not all(now.shares_parameters(before) for now, before in pairs):
            named = [f"{key}={as_text(value)}" for key, value in config.over_updates.items()]
            raise ValueError(
                f"{', '.join(named)}: after update {first:,} the position parameters are {needs or 'none'}, and "
                f"before {has or 'none'}{', of another meaning' * (has == needs)}; they must stay the same over the "
                "updates: give other values, or train a second run by --init_from"
            )
    return models


def check_config(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError for numbers with which no model can be trained on `mesh`."""
    heads, tensor = config.model.kv_heads, mesh.shape["tensor"]
    if heads % tensor:
        fitting = ", ".join(str(parts) for parts in range(1, heads + 1) if heads % parts == 0)
        key = "num_kv_heads" if config.model.num_kv_heads else "num_heads"
        raise ValueError(
            f"mesh.tensor={tensor} splits the heads and does not divide model.{key}={heads}; use one of {fitting}"
        )
    if config.model.param_dtype != "float32":
        raise ValueError(
            f"model.param_dtype={config.model.param_dtype} is for imported runs: training needs float32 parameters; "
            "leave it out"
        )
    if config.model.kept and not config.model.remat:
        raise ValueError(
            f"model.remat_keeps={config.model.remat_keeps} says what model.remat keeps, and that is off; set "
            "model.remat=True, or model.remat_keeps=nothing"
        )
    training_loss(config)
    sequences_per_update(config, batch_parts(batch_sharding(mesh)))


def check_model(model: DecoderLM, length: int) -> None:
    """Raises ValueError if the model is not defined for `length` tokens, or if a position method of
    the user's own computes what no training mends: a few tokens tell.
    """
    model.check_length(length)
    # the tests check this library's methods
    for method in (of for of in model.methods if not type(of).__module__.startswith("alibi.")):
        _look_at(method)


@functools.cache  # a second each, in the many cells of a sweep alike
def _look_at(method: PositionMethod) -> None:
    check_finite(method, moved=0.0)
    check_few_tokens(method)


def check_trainable(config: Config, devices: int | None = None) -> None:
    """Raises ValueError for a config as training does before it reads the text.

    Args:
      devices: number of devices. None, if unknown, takes as few as the mesh asks for.
    """
    check_paths(config.data)
    fewest = math.prod(size for axis in AXES if (size := config.mesh[axis]) != -1)
    check_stretches(config, abstract_mesh(config.mesh, devices or fewest))
    make_optimizer(config.optimizer, config.train.steps)
    make_corpus(config.data)


def sequences_per_update(config: Config, shards: int) -> int:
    """Returns train.batch_tokens in sequences of train_length.

    Raises:
      ValueError: batch_tokens is no multiple of the length, or the micro-batches and the `shards`
        parts of a batch don't divide it.
    """
    tokens, length, micro_batches = (
        config.train.batch_tokens,
        config.train_length,
        config.train.accumulation,
    )
    unit = length * micro_batches * shards
    if tokens % unit:
        fits_alone = tokens % (length * micro_batches) == 0
        fewer = (
            ", or a larger mesh.tensor, so that fewer devices split the batch"
            if shards > 1 and fits_alone
            else ""
        )
        below, above = tokens // unit * unit, (tokens // unit + 1) * unit
        raise ValueError(
            f"train.batch_tokens={tokens} must be a multiple of {unit} (train_length={length} x "
            f"train.accumulation={micro_batches} x {shards} devices that split the batch); "
            f"use {f'{below} or ' if below > 0 else ''}{above}{fewer}"
        )
    return tokens // length


def micro_batches(config: Config, shards: int) -> int:
    """Returns how many micro-batches an update has: train.accumulation, or its first multiple that
    keeps to train.max_device_tokens. Each has at least one sequence for each shard.
    """
    sequences = sequences_per_update(config, shards) // shards
    limit, least = config.train.max_device_tokens, config.train.accumulation
    most = max(limit // config.train_length, 1) if limit else sequences
    return next(
        n
        for n in range(least, sequences + 1, least)
        if sequences % n == 0 and sequences // n <= most
    )


def prepare_files(data: DataConfig) -> dict[str, TokenFile]:
    """Returns the token files of train and, if set, valid. Process 0 makes its own first.

    Prints the revision of a dataset's tokens.
    """
    files: dict[str, TokenFile] = {}

    def make(progress: bool) -> None:
        check_sources(data, ("train", "valid"))
        files["train"] = prepare(data, "train", progress=progress)
        if data.valid:
            files["valid"] = prepare(data, "valid", files["train"].tokenizer(), progress=progress)

    hosts.broadcast(lambda: make(progress=True))
    if not hosts.is_primary():
        make(progress=False)
        return files
    if "valid" in files and (shared := shared_text(*files.values())):
        print(
            f"{shared} of data.valid is in data.train too: the validation is of text seen in training",
            file=sys.stderr,
        )
    for manifest in (file.manifest for file in files.values()):
        if revision := manifest.revision:  # the host of the dataset may have a later one
            print(
                f"{manifest.source}: tokens of revision {revision}; set data.revision={revision} to keep to it",
                file=sys.stderr,
            )
    return files


def shared_text(train: TokenFile, valid: TokenFile) -> str:
    """Returns how much validation text is in the train text too, with hashes and split names, or ""."""
    one, other = valid.manifest.description, train.manifest.description
    ours, theirs = ([json.dumps(each) for each in text.get("files", [])] for text in (one, other))
    split, *_ = one.get("split", "").partition("[")  # a slice of the train split is in it
    if (
        valid.manifest.sha256 == train.manifest.sha256
        or (ours and set(ours) <= set(theirs))
        or one | {"split": split} == {"split": ""} | other
    ):
        return "all"
    files = len(set(ours) & set(theirs))
    return f"{files} of {len(ours)} files" if files else ""


def objective_of(config: Config, text: TokenFile) -> Objective:
    """Returns the objective of a run for a text."""
    manifest = text.manifest
    return make_objective(config, vocab_size=manifest.vocab_size, boundary_id=manifest.boundary_id)


def validation_windows(config: Config, num_tokens: int) -> Windows:
    """Returns windows of the training length that score eval.max_tokens tokens, spread evenly."""
    return spread_windows(
        num_tokens,
        config.train_length,
        config.eval.max_tokens,
        causal=make_objective(config).causal,
    )


def make_validator(config: Config, model: DecoderLM, text: TokenFile) -> Callable[[PyTree], Score]:
    """Returns a function from parameters to the score of `validation_windows`. Raises ValueError if
    the objective predicts none of their tokens.
    """
    scorer = Scorer(
        model_nll(evaluated(model, config)),
        objective=objective_of(config, text),
        batch_tokens=config.eval.batch_tokens,
        sharding=model.sharding,
    )
    windows = validation_windows(config, len(text.tokens))
    scorer.check(text.tokens, windows)
    return lambda params: scorer.score_windows(params, text.tokens, windows)


def make_sampler(config: Config, model: DecoderLM, text: TokenFile) -> Callable[[PyTree], str]:
    """Returns a function from parameters to a continuation of `config.eval.sample_prompt`, always
    with the same key.

    Raises:
      ValueError: the model fills in tokens, or can't have so many.
    """
    if not make_objective(config).causal:
        raise ValueError(
            f"eval.sample_prompt needs objective=next_token; objective={config.objective.name} fills in tokens; leave "
            "it empty"
        )
    tokenizer, count = text.tokenizer(), config.eval.sample_tokens
    prompt = tokenizer.encode_beginning(config.eval.sample_prompt)
    try:
        model.check_length(len(prompt) + count)
    except ValueError as error:
        raise ValueError(
            f"eval.sample_prompt has {len(prompt)} tokens and eval.sample_tokens={count}: {error}"
        ) from None
    evaluating = evaluated(model, config)

    def sample(params: PyTree) -> str:
        made = generate(evaluating, params, [prompt], count, sample=Sampling())
        tokens = multihost_utils.process_allgather(made, tiled=True)[0].tolist()
        return decode_answer(tokenizer, prompt, tokens)

    return sample
