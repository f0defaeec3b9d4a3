"""Shards: several processes make them, and whole ones outlive a kill."""

import concurrent.futures.process
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from alibi.data.corpus import Corpus, Piece, Shard, make_bar, watched
from alibi.data.tokenfile import (
    FORMAT_VERSION,
    Manifest,
    TokenFile,
    hash_ids,
    load,
    shard_file,
    write_manifest,
)
from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.data.tokenizers.bpe import MOST_CHARS
from alibi.errors import UserError
from alibi.progress import Progress
from alibi.storage.cache import cache_root, claimed, content_key, find_or_make
from alibi.storage.files import made_whole, write_whole

_POLL_SECONDS = 0.3
# by code point; U+3000 is the last white space
_IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Making:
    """A split's token file, cut at `max_bytes` (-1 means whole), and the way to make it.

    A shard is a file with ids and, once these are whole, a JSON file with counts, in a folder beside
    `directory`. The content does not depend on the process.
    """

    corpus: Corpus
    split: str
    max_bytes: int
    tokenizer: Tokenizer
    shard_bytes: int
    cache_dir: str | os.PathLike

    @functools.cached_property
    def directory(self) -> pathlib.Path:
        """The token file's place in the cache, named after its content."""
        content = {
            "format": FORMAT_VERSION,
            "text": self.corpus.cached_as(self.split),
            "split": self.split,
            "max_bytes": self.max_bytes,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        if not self.tokenizer.cuts_documents:
            content["documents"] = f"whole, up to {MOST_CHARS:,} characters"
        return cache_root(self.cache_dir) / "tokens" / content_key(content)

    @property
    def folder(self) -> pathlib.Path:
        """The shards' folder until all are made."""
        return self.directory.with_name(f".{self.directory.name}.parts")

    def find_or_make(self, workers: int = 1, *, progress: bool) -> TokenFile:
        """Returns the token file. If it is missing, so many `workers` make it.

        Among all hosts that share the cache one process makes it, and the others wait. Whole shards are
        kept if it fails.
        """
        if self.directory.is_dir():
            return load(self.directory)
        with claimed(self.directory) as alone:
            if not self.directory.is_dir():
                find_or_make(self.folder / "tokenizer", self.tokenizer.save)
                self._assemble(self._make_shards(workers, progress))
        if not alone:  # of two processes the later one made the folder again
            shutil.rmtree(self.folder, ignore_errors=True)
        return load(self.directory, verify=False)  # hashed as it was made

    def _make_shards(self, workers: int, progress: bool) -> int:
        """Makes the missing shards. Returns how many there are in all."""
        with make_bar(self.corpus, self.split, self.max_bytes, progress=progress) as bar:
            if workers == 1:
                return self._work(0, 1, bar)

            def show() -> None:
                counts = [json.loads(file.read_text()) for file in self.folder.glob("*.json")]
                bar.update(sum(count["bytes"] for count in counts) - bar.done)

            calls = [functools.partial(self._work, first, workers) for first in range(workers)]
            return max(in_workers(calls, show))

    def _work(self, first: int, step: int, bar: Progress | None = None) -> int:
        """Makes each `step`-th shard from the `first` on, shown on `bar`. Returns the number of
        shards.
        """
        # another process has none
        tokenizer = load_tokenizer(self.folder / "tokenizer") if bar is None else self.tokenizer
        self.corpus.cuts_documents = tokenizer.cuts_documents
        shards = self.corpus.shards(self.split, self.max_bytes, self.shard_bytes)
        index = -1
        for index, shard in enumerate(shards):
            counts_file = self.folder / f"{index:05d}.json"
            if index % step == first and not counts_file.exists():
                if bar is not None:
                    shard = dataclasses.replace(shard, pieces=watched(shard.pieces, bar))
                counts = write_shard(self.folder / shard_file(index), shard, tokenizer)
                write_whole(counts_file, json.dumps(counts | {"revision": self.corpus.revision}))
        return index + 1

    def _assemble(self, total: int) -> None:
        """Makes the token file from `total` shards."""
        corpus, split, folder, tokenizer = self.corpus, self.split, self.folder, self.tokenizer
        files = [folder / f"{index:05d}.json" for index in range(total)]
        counts = [json.loads(file.read_text()) for file in files]
        if not sum(count["bytes"] for count in counts):
            shutil.rmtree(folder)
            raise ValueError(
                f"{corpus.source(split)} is empty: it has no text for tokens; check "
                f"{'--text_file' if split == 'file' else f'data.{split}'}"
            )
        revisions = sorted({count.pop("revision") for count in counts})
        if len(revisions) > 1:
            raise ValueError(
                f"{corpus.source(split)} changed while its tokens were made: {' and '.join(revisions)}; "
                f"set data.revision to one of them, delete {folder} and run again"
            )
        dtype = dtype_of(tokenizer)
        manifest = Manifest(
            corpus=corpus.name,
            split=split,
            source=corpus.source(split),
            max_bytes=self.max_bytes,
            dtype=dtype.str,
            sha256=hash_ids((folder / shard_file(index) for index in range(total)), dtype),
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint(),
            vocab_size=tokenizer.vocab_size,
            boundary_id=tokenizer.boundary_id,
            description=corpus.description(split),
            revision=revisions[0],
            **{name: sum(count[name] for count in counts) for name in counts[0]},
        )
        write_manifest(folder, manifest, [count["tokens"] for count in counts])
        folder.replace(self.directory)
        for path in (*self.directory.glob("[0-9]*.json"), *self.directory.glob(".*")):
            path.unlink()


def in_workers(
    calls: Sequence[Callable[[], Result]], poll: Callable[[], object] = lambda: None
) -> list[Result]:
    """Returns the results of `calls`, each from its own process. These end with their parent.

    Raises:
      UserError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        len(calls), context, _begin_worker, (len(calls),)
    ) as pool:
        futures = [pool.submit(call) for call in calls]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, _POLL_SECONDS, concurrent.futures.FIRST_EXCEPTION
                )
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
    """Leaves Ctrl-C to the parent, ends this process with the parent, and shares the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Returns the stored ids' dtype: 1, 2 or 4 bytes."""
    return next(
        dtype
        for dtype in map(np.dtype, ("|u1", "<u2", "<u4"))
        if tokenizer.vocab_size <= 256**dtype.itemsize
    )


def write_shard(path: pathlib.Path, shard: Shard, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes a shard's ids and returns its counts. Holds a few pieces in memory."""
    dtype = dtype_of(tokenizer)
    counts = dict.fromkeys(
        ("tokens", "unknown_words", "words", "bytes", "documents", "unk_in_text"), 0
    )

    def counted() -> Iterator[Piece]:
        word_is_open = False  # a word is longer than a piece
        for piece in shard.pieces:
            counts["words"] += count_words(b"x" * word_is_open + piece.utf8) - word_is_open
            last = piece.utf8[-4:].decode("utf-8", "ignore")[-1:]
            word_is_open = not (piece.ends_document or last.isspace())
            counts["bytes"] += len(piece.utf8)
            counts["documents"] += piece.ends_document
            # a single byte is found many times as fast
            if b"<" in piece.utf8 and b"<unk>" in piece.utf8:
                counts["unk_in_text"] += piece.text.split().count("<unk>")
            yield piece

    with made_whole(path) as temporary, temporary.open("wb") as stream:
        for ids in tokenizer.encode_stream(counted(), after_open_line=shard.after_open_line):
            stream.write(ids.astype(dtype, copy=False).data)
            counts["tokens"] += len(ids)
            if tokenizer.unknown_id is not None:
                counts["unknown_words"] += int(np.count_nonzero(ids == tokenizer.unknown_id))
        stream.flush()
        os.fsync(stream.fileno())
    return counts


def count_words(utf8: bytes) -> int:
    """Returns `len(utf8.decode().split())`, several times as fast for a long text."""
    text = utf8.decode()
    if len(text) < 500:
        return len(text.split())
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    space = _IS_SPACE.take(codes, mode="clip")
    return int(np.count_nonzero(space[:-1] > space[1:])) + int(not space[0])
