"""Shards of token files, made by several processes on several hosts, and kept if a process is killed."""

import concurrent.futures.process
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from alibi.data.corpus import Corpus, Piece, Shard, make_bar, watched
from alibi.data.tokenfile import shard_file
from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.errors import UserError
from alibi.progress import Progress
from alibi.storage.files import made_whole, write_whole

_POLL_SECONDS = 0.3
_IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # U+3000 is the last white space

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Makers:
    """The makers of token files: `workers` processes on each of `hosts`; this host has the number `host`."""

    workers: int = 1
    host: int = 0
    hosts: int = 1


ALONE = Makers()


@dataclasses.dataclass(frozen=True)
class Making:
    """The text of a split, and the folder in which its shards are made; the folder holds the tokenizer already.

    Shard number n is a file of ids and, when the ids are whole, a JSON file of counts. The content does not depend on
    the process.
    """

    corpus: Corpus
    split: str
    max_bytes: int
    shard_bytes: int
    folder: pathlib.Path

    def run(self, makers: Makers, tokenizer: Tokenizer, *, progress: bool) -> int:
        """Makes the missing shards of this host; returns the number of shards of all hosts."""
        with make_bar(self.corpus, self.split, self.max_bytes, progress=progress) as bar:
            if makers.workers == 1:
                return self._make(tokenizer, makers.host, makers.hosts, bar)

            def show() -> None:
                bar.update(sum(json.loads(path.read_text())["bytes"] for path in self.folder.glob("*.json")) - bar.done)

            step = makers.workers * makers.hosts
            firsts = range(makers.host * makers.workers, (makers.host + 1) * makers.workers)
            return max(in_workers([functools.partial(self._work, first, step) for first in firsts], show))

    def counts_file(self, number: int) -> pathlib.Path:
        """Returns the file with the counts of shard `number`."""
        return self.folder / f"{number:05d}.json"

    def _make(self, tokenizer: Tokenizer, first: int, step: int, bar: Progress | None = None) -> int:
        """Makes each `step`-th shard from the `first` on, shown on `bar`; returns the number of shards."""
        total = 0
        for number, shard in enumerate(self.corpus.shards(self.split, self.max_bytes, self.shard_bytes)):
            total = number + 1
            if number % step == first and not self.counts_file(number).exists():
                pieces = shard.pieces if bar is None else watched(shard.pieces, bar)
                shard = Shard(pieces, shard.after_open_line)
                counts = write_shard(self.folder / shard_file(number), shard, tokenizer)
                counted = json.dumps(counts | {"revision": self.corpus.revision})
                # The folder was renamed if another process has made all shards.
                write_whole(self.counts_file(number), counted, parents=False)
        return total

    def _work(self, first: int, step: int) -> int:
        return self._make(load_tokenizer(self.folder / "tokenizer"), first, step)


def in_workers(calls: Sequence[Callable[[], Result]], poll: Callable[[], object] = lambda: None) -> list[Result]:
    """Returns the results of `calls`, each made in its own process; the processes end with this one.

    Raises:
      UserError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(calls), context, _begin_worker, (len(calls),)) as pool:
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
                    "a worker was killed, perhaps for lack of memory; use fewer --workers; whole shards are kept"
                ) from None
            raise
    return [future.result() for future in futures]


def _begin_worker(workers: int) -> None:
    """Leaves Ctrl-C to the parent, ends this process with the parent, and shares the cores among the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Returns the type of stored ids: 1, 2 or 4 bytes."""
    return next(dtype for dtype in map(np.dtype, ("|u1", "<u2", "<u4")) if tokenizer.vocab_size <= 256**dtype.itemsize)


def write_shard(path: pathlib.Path, shard: Shard, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes the ids of a shard and returns its counts; holds a few pieces in memory."""
    dtype = dtype_of(tokenizer)
    counts = dict.fromkeys(("tokens", "unknown_words", "words", "bytes", "documents", "unk_in_text"), 0)

    def counted() -> Iterator[Piece]:
        for piece in shard.pieces:
            counts["words"] += count_words(piece.text)
            counts["bytes"] += len(piece.utf8)
            counts["documents"] += piece.ends_document
            if b"<unk>" in piece.utf8:
                counts["unk_in_text"] += piece.text.split().count("<unk>")
            yield piece

    with made_whole(path, parents=False) as temporary, temporary.open("wb") as stream:
        for ids in tokenizer.encode_stream(counted(), after_open_line=shard.after_open_line):
            stream.write(ids.astype(dtype, copy=False).data)
            counts["tokens"] += len(ids)
            if tokenizer.unknown_id is not None:
                counts["unknown_words"] += int(np.count_nonzero(ids == tokenizer.unknown_id))
        stream.flush()
        os.fsync(stream.fileno())
    return counts


def count_words(text: str) -> int:
    """Returns `len(text.split())`, several times as fast."""
    space = _IS_SPACE.take(np.frombuffer(text.encode("utf-32-le"), np.uint32), mode="clip")
    return int(np.count_nonzero(space[:-1] > space[1:])) + int(not space[:1].all())
