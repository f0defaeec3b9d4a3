"""`python -m benchmarks data`: MB/s of making token files, beside plain loops of numpy, Python and
`tokenizers`.
"""

import argparse
import hashlib
import os
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from alibi.config import DataConfig
from benchmarks.processes import Process
from benchmarks.rounds import Column, Row, chosen_names, conditions, show, whole_numbers

TIMES = {"bytes": 4, "words": 1, "bpe": 1}  # as much text
BLOCK_BYTES = 1 << 20  # that the peers read at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        help="a file of UTF-8, repeated as often as need be; defaults to the embedded books",
    )
    parser.add_argument(
        "--megabytes",
        type=int,
        default=128,
        help="megabytes of text, 4 times as many for bytes; a shard has 67",
    )
    parser.add_argument("--workers", default="1,2", help="numbers of processes, comma-separated")
    parser.add_argument("--tokenizers", default="bytes,words,bpe", help="which, comma-separated")
    parser.set_defaults(command=compare_tokenizers)


def compare_tokenizers(arguments: argparse.Namespace) -> list[Row]:
    """Measures each tokenizer with each number of workers, and its peer, in turn, each in a fresh process."""
    workers = whole_numbers(arguments.workers, "workers")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in chosen_names(arguments.tokenizers, TIMES, "tokenizer"):
            size = TIMES[name] * arguments.megabytes
            path = _write_text(root / f"{name}.txt", arguments.text, size * 10**6)
            title, peer = PEERS[name]
            calls: dict[str, tuple] = {
                title: (_timed, peer, path, root),
                **{
                    f"{name}, {count} workers": (_timed, _prepare, path, root, count)
                    for count in workers
                },
            }
            in_process(_make_tokenizer, path, root)
            seconds: dict[str, list[tuple[float, float]]] = {contender: [] for contender in calls}
            for turn in range(arguments.rounds):
                for contender, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                    seconds[contender].append(in_process(*call))
            rows += [_row(one, size, seconds[one]) | conditions(arguments.rounds) for one in calls]
            path.unlink()
    columns = [Column("MB of text", "megabytes", ""), Column("MB/s", "mb_per_second", ".1f")]
    show(
        "text made into tokens",
        rows,
        [*columns, Column("MB a core-second", "mb_per_core_second", ".1f")],
    )
    return rows


def _row(contender: str, megabytes: int, seconds: list[tuple[float, float]]) -> Row:
    wall, cpu = zip(*seconds, strict=True)
    return {
        "benchmark": "data",
        "contender": contender,
        "megabytes": megabytes,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "mb_per_second": megabytes / statistics.median(wall),
        "mb_per_core_second": megabytes / statistics.median(cpu),
    }


def _write_text(path: pathlib.Path, source: str | None, size: int) -> pathlib.Path:
    """Writes a file of `size` bytes or a few less."""
    if source is None:
        from alibi.data.tokens import make_corpus

        text = b"".join(piece.utf8 for piece in make_corpus(DataConfig()).pieces("train"))
    else:
        text = pathlib.Path(source).read_bytes()
    with path.open("wb") as stream:
        for _ in range(size // len(text)):
            stream.write(text)
        stream.write(text[: size % len(text)].decode("utf-8", errors="ignore").encode())
    return path


def in_process(call: Callable, *arguments: Any) -> Any:
    """Returns the result of `call` in a fresh process, which inherits nothing from the turns
    before.
    """
    process = Process()
    try:
        return process.ask(call, *arguments)
    finally:
        process.stop()


def _timed(make: Callable[..., Callable[[], object]], *arguments: Any) -> tuple[float, float]:
    """Returns wall seconds and processor seconds, with child processes, for the function that `make`
    returns.
    """

    def processor() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    run = make(*arguments)
    start, before = time.perf_counter(), processor()
    run()
    return time.perf_counter() - start, processor() - before


def _config(path: pathlib.Path, cache: pathlib.Path) -> DataConfig:
    return DataConfig(
        corpus="text",
        train=str(path),
        valid="",
        tokenizer=path.stem,
        cache_dir=str(cache),
        bpe_vocab_size=8192,
        tokenizer_train_bytes=4 * 10**6 if path.stem == "bpe" else -1,
    )


def _make_tokenizer(path: pathlib.Path, root: pathlib.Path) -> None:
    from alibi.data.tokens import find_tokenizer, make_corpus

    data = _config(path, root)
    find_tokenizer(data, make_corpus(data)).save(root / path.stem)


def _prepare(path: pathlib.Path, root: pathlib.Path, workers: int) -> Callable[[], object]:
    from alibi.data.tokenizers import load_tokenizer
    from alibi.data.tokens import prepare

    tokenizer, cache = load_tokenizer(root / path.stem), pathlib.Path(tempfile.mkdtemp(dir=root))
    data = _config(path, cache)
    return lambda: prepare(data, "train", tokenizer, progress=False, workers=workers)


# The least that must be done, on one core or as the library does it: read, encode, hash and write.


def _plain_bytes(path: pathlib.Path, root: pathlib.Path) -> Callable[[], object]:
    def run() -> None:
        hasher = hashlib.sha256()
        with path.open("rb") as source, (root / "plain.bin").open("wb") as target:
            while block := source.read(BLOCK_BYTES):
                ids = np.frombuffer(block, np.uint8)
                hasher.update(ids)
                target.write(ids)
            os.fsync(target.fileno())

    return run


def _plain_words(path: pathlib.Path, root: pathlib.Path) -> Callable[[], object]:
    from alibi.data.tokenizers import read_dictionary

    ids = {word: i for i, word in enumerate(read_dictionary(root / "words" / "dict.txt"))}

    def run() -> None:
        with path.open(encoding="utf-8") as source, (root / "plain.bin").open("wb") as target:
            while lines := source.readlines(BLOCK_BYTES):
                line_ids = [ids.get(word, 3) for line in lines for word in [*line.split(), "</s>"]]
                target.write(np.array(line_ids, np.uint32))

    return run


def _library(path: pathlib.Path, root: pathlib.Path) -> Callable[[], object]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(root / "bpe" / "tokenizer.json"))

    def run() -> None:
        with path.open(encoding="utf-8") as source, (root / "plain.bin").open("wb") as target:
            while text := source.read(BLOCK_BYTES):
                parts = [text[start : start + (1 << 14)] for start in range(0, len(text), 1 << 14)]
                for encoding in tokenizer.encode_batch_fast(parts, add_special_tokens=False):
                    target.write(np.array(encoding.ids, np.uint16))

    return run


PEERS = {
    "bytes": ("numpy + SHA-256", _plain_bytes),
    "words": ("split + dict", _plain_words),
    "bpe": ("tokenizers", _library),
}
