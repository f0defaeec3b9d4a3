"""What happens before the first update: checks that cost nothing first, then the data and what validates on it."""

import math
import sys
from collections.abc import Callable

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from alibi.config import Config, DataConfig
from alibi.data.cache import check_paths
from alibi.data.tokens import TokenFile, check_sources, prepare
from alibi.evaluation.perplexity import Scorer, model_nll
from alibi.model.decoder import UNKNOWN_VOCABULARY, DecoderLM, build_model, evaluated
from alibi.parallel.hosts import on_first
from alibi.parallel.sharding import abstract_mesh, batch_parts, batch_sharding
from alibi.runs import RunDirectory
from alibi.training.optimizer import make_optimizer


def check_config(config: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError for numbers by which no model can be trained on `mesh`."""
    heads, tensor = config.model.num_heads, mesh.shape["tensor"]
    if heads % tensor:
        fitting = ", ".join(str(parts) for parts in range(1, heads + 1) if heads % parts == 0)
        raise ValueError(
            f"mesh.tensor={tensor} splits the heads and does not divide model.num_heads={heads}; use one of {fitting}"
        )
    sequences_per_update(config, batch_parts(batch_sharding(mesh)))


def check_trainable(config: Config, devices: int | None = None) -> None:
    """Raises ValueError for what training would refuse before it reads its text, on so many devices.

    Where their number isn't known (None), these are as few as the mesh asks for.
    """
    check_paths(config.data)
    fewest = math.prod(size for size in vars(config.mesh).values() if size != -1)
    check_config(config, abstract_mesh(config.mesh, devices or fewest))
    build_model(config, UNKNOWN_VOCABULARY).position.check_length(config.train_length)
    make_optimizer(config.optimizer, config.train.steps)


def check_imported(config: Config, run: RunDirectory) -> None:
    """Raises ValueError where the config says that its run was imported, and the directory holds none."""
    if config.imported_from and run.status()["state"] == "missing":
        raise ValueError(
            f"imported_from={config.imported_from!r} is the hash of a checkpoint that scripts/import_fairseq.py made a "
            f"run of, and {run} holds no run; leave it empty, or give the imported run's --workdir"
        )


def sequences_per_update(config: Config, shards: int) -> int:
    """train.batch_tokens in sequences of train_length.

    Raises:
      ValueError: batch_tokens that is no multiple of the length, or a batch that the
        micro-batches and the `shards` parts it is split into don't divide.
    """
    tokens, length, micro_batches = config.train.batch_tokens, config.train_length, config.train.accumulation
    unit = length * micro_batches * shards
    if tokens < 1 or tokens % unit:
        fits_alone = tokens > 0 and tokens % (length * micro_batches) == 0
        fewer = ", or a larger mesh.tensor, so that fewer devices split the batch" if shards > 1 and fits_alone else ""
        below, above = tokens // unit * unit, (tokens // unit + 1) * unit
        raise ValueError(
            f"train.batch_tokens={tokens} must be a multiple of {unit} (train_length={length} x "
            f"train.accumulation={micro_batches} x {shards} devices that split the batch); "
            f"use {f'{below} or ' if below > 0 else ''}{above}{fewer}"
        )
    return tokens // length


def micro_batches(config: Config, shards: int) -> int:
    """Micro-batches of an update: train.accumulation, or the next multiple that keeps to train.max_device_tokens.

    A micro-batch has at least one sequence for each of the `shards` parts.
    """
    sequences = sequences_per_update(config, shards) // shards
    limit, least = config.train.max_device_tokens, config.train.accumulation
    most = max(limit // config.train_length, 1) if limit else sequences
    return next(n for n in range(least, sequences + 1, least) if sequences % n == 0 and sequences // n <= most)


def prepare_files(data: DataConfig) -> dict[str, TokenFile]:
    """The token files of train and, if there is one, valid. Of many hosts the first goes ahead.

    Of a dataset that the config names without a revision it prints which one the tokens are of, and where that of
    train, of valid and of the text that the tokenizer was made from differ.
    """

    def files(progress: bool) -> dict[str, TokenFile]:
        check_sources(data, ("train", "valid"))
        made = {"train": prepare(data, "train", progress=progress)}
        if data.valid:
            made["valid"] = prepare(data, "valid", made["train"].tokenizer(), progress=progress)
        return made

    first = on_first(lambda: files(progress=True))
    if first is None:
        return files(progress=False)
    _print_revisions(first)
    return first


def _print_revisions(files: dict[str, TokenFile]) -> None:
    read = {split: file.manifest.revision for split, file in files.items() if file.manifest.revision}
    for split, revision in read.items():  # the host of the dataset may have a later one
        source = files[split].manifest.source
        print(f"{source}: tokens of revision {revision}; set data.revision={revision} to keep to it", file=sys.stderr)
    if read and (revision := files["train"].tokenizer().revision):
        read["tokenizer"] = revision
    if len(set(read.values())) > 1:
        what = ", ".join(f"{part} of {revision}" for part, revision in read.items())
        print(f"revisions differ: {what}; set data.revision to one of them to read all at it", file=sys.stderr)


def make_validator(config: Config, model: DecoderLM, text: TokenFile) -> Callable[[PyTree], float]:
    """Makes what gives of parameters the mean NLL, in nats, of `config.eval.max_tokens` tokens at training length."""
    limit = config.eval.max_tokens
    scorer = Scorer(
        model_nll(evaluated(model, config)),
        boundary_id=text.manifest.boundary_id,
        batch_tokens=config.eval.batch_tokens,
        sharding=model.sharding,
    )

    def validate(params: PyTree) -> float:
        score = scorer.score(params, text.tokens if limit < 0 else text.tokens[:limit], config.train_length)
        return score.total_nats / score.tokens

    return validate
