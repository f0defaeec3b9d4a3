"""Shards of token files: made by several processes on several hosts, and kept when one of them is killed."""

import concurrent.futures.process
import dataclasses
import functools
import itertools
import json
import multiprocessing
import operator
import os
import pathlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash

from alibi.data.counting import Counts
from alibi.data.dictionary import count_words
from alibi.data.pieces import Corpus, Shard, make_bar, watched
from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.errors import UserError
from alibi.progress import Progress
from alibi.storage.atomic import made_whole, write_whole

_POLL_SECONDS = 0.3

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Makers:
    """Who makes token files: `workers` processes on each of `hosts`, of which this one has the number `host` from 0."""

    workers: int = 1
    host: int = 0
    hosts: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers} must be at least 1")
        if not 0 <= self.host < self.hosts:
            raise ValueError(f"host {self.host} of {self.hosts}: hosts are numbered from 0, and there is at least one")


ALONE = Makers()


@dataclasses.dataclass(frozen=True)
class Making:
    """The text of a split that becomes token files in `folder`, which holds its tokenizer already.

    Shard number n is a file of ids and, when that is whole, one that tells what is in it. Which process made it can't
    be seen of it.
    """

    corpus: Corpus
    split: str
    max_bytes: int
    shard_bytes: int
    folder: pathlib.Path

    def run(self, makers: Makers, tokenizer: Tokenizer, *, progress: bool) -> int:
        """Makes the shards of this host that aren't there yet; returns how many all hosts have to make."""
        with make_bar(self.corpus, self.split, self.max_bytes, progress=progress) as bar:
            if makers.workers == 1:
                return self.make(tokenizer, makers.host, makers.hosts, bar)

            def show() -> None:
                bar.update(sum(_read(path)["bytes"] for path in self.folder.glob("*.json")) - bar.done)

            step = makers.workers * makers.hosts
            firsts = [makers.host * makers.workers + worker for worker in range(makers.workers)]
            return max(in_workers([functools.partial(self._work, first, step) for first in firsts], show))

    def make(self, tokenizer: Tokenizer, first: int, step: int, bar: Progress | None = None) -> int:
        """Makes each `step`-th shard from the `first` on, shown on `bar`; returns how many shards there are."""
        total = 0
        for number, shard in enumerate(self.corpus.shards(self.split, self.max_bytes, self.shard_bytes)):
            total = number + 1
            if number % step == first and not self.about(number).exists():
                pieces = shard.pieces if bar is None else watched(shard.pieces, bar)
                about = write_shard(self.folder / shard_file(number), Shard(pieces, shard.after_open_line), tokenizer)
                write_whole(self.about(number), json.dumps(about | {"revision": self.corpus.revision}))
        return total

    def about(self, number: int) -> pathlib.Path:
        """The file that tells what is in shard `number`."""
        return self.folder / f"{number:05d}.json"

    def _work(self, first: int, step: int) -> int:
        return self.make(load_tokenizer(self.folder / "tokenizer"), first, step)


def count_in_workers(corpus: Corpus, split: str, max_bytes: int, workers: int) -> Counter[str]:
    """`count_words` of a split, by several processes."""
    calls = [functools.partial(_count_shards, corpus, split, max_bytes, first, workers) for first in range(workers)]
    counters, revisions = zip(*in_workers(calls), strict=True)
    corpus.revision = next(filter(None, revisions), "")  # as if it had been read here
    return functools.reduce(operator.iadd, counters)


def _count_shards(corpus: Corpus, split: str, max_bytes: int, first: int, step: int) -> tuple[Counter[str], str]:
    shards = itertools.islice(corpus.shards(split, max_bytes), first, None, step)
    return count_words(piece for shard in shards for piece in shard.pieces), corpus.revision


def in_workers(calls: Sequence[Callable[[], Result]], poll: Callable[[], object] = lambda: None) -> list[Result]:
    """What the `calls` return, each made in a process of its own, all of which end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(calls), context, _begin, (len(calls),)) as pool:
        futures = [pool.submit(call) for call in calls]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, _POLL_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                for future in done:
                    future.result()
                poll()
        except BaseException as error:
            for process in multiprocessing.active_children():
                process.terminate()
            if isinstance(error, concurrent.futures.process.BrokenProcessPool):
                raise UserError(
                    "a worker was killed: was there too little memory? Use fewer --workers; whole shards are kept"
                ) from None
            raise
    return [future.result() for future in futures]


def shard_file(number: int) -> str:
    """The name of a shard; the first one's is that which the whole file had in older versions."""
    return f"tokens-{number:05d}.bin" if number else "tokens.bin"


def write_shard(path: pathlib.Path, shard: Shard, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes the ids and returns what is to be told of them; memory is bounded by a few pieces."""
    dtype, hasher, counts = dtype_of(tokenizer), xxhash.xxh3_128(), Counts()
    tokens = unknown = 0

    def counted():
        for piece in shard.pieces:
            counts.add(piece)
            yield piece

    with made_whole(path) as temporary, temporary.open("wb") as stream:
        for ids in tokenizer.encode_stream(counted(), after_open_line=shard.after_open_line):
            block = ids.astype(dtype, copy=False)
            hasher.update(block.data)
            stream.write(block.data)
            tokens += len(block)
            if tokenizer.unknown_id is not None:
                unknown += int(np.count_nonzero(ids == tokenizer.unknown_id))
        stream.flush()
        os.fsync(stream.fileno())
    return {"tokens": tokens, "unknown_words": unknown, "xxh3": hasher.hexdigest()} | dataclasses.asdict(counts)


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """What the ids are stored as: one, two or four bytes."""
    return next(dtype for dtype in map(np.dtype, ("|u1", "<u2", "<u4")) if tokenizer.vocab_size <= 256**dtype.itemsize)


def read_abouts(making: Making, total: int) -> list[dict[str, Any]] | None:
    """What is in each shard, in their order; None as long as one is missing. ValueError where they don't fit."""
    paths = [making.about(number) for number in range(total)]
    if not all(path.exists() for path in paths):
        return None
    abouts = [_read(path) for path in paths]
    for number, (path, about) in enumerate(zip(paths, abouts, strict=True)):
        file = making.folder / shard_file(number)
        if _xxh3(file) != about["xxh3"]:  # it may have lain there since another process was killed
            path.unlink()
            raise ValueError(f"{file} was damaged since it was made; run again: only this shard is made anew")
    revisions = sorted({about["revision"] for about in abouts})
    if len(revisions) > 1:
        raise ValueError(
            f"{making.corpus.source(making.split)} changed while its tokens were made: {' and '.join(revisions)}; "
            f"set data.revision to one of them, delete {making.folder} and run again"
        )
    return abouts


def _xxh3(path: pathlib.Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _begin(workers: int) -> None:
    """Begins a worker: Ctrl-C is the parent's to handle, with whom it ends; the workers share the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
