"""Words between white space, under the paper's dictionary rule."""

import hashlib
import itertools
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath

from alibi.data.corpus import Piece
from alibi.data.tokenizers.base import Ids, Tokenizer

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")  # of fairseq's dictionaries


class WordTokenizer(Tokenizer):
    """Words between white space from a fixed dictionary, `</s>` after every line (arXiv 2108.12409,
    fairseq).
    """

    name = "words"
    file = "dict.txt"
    boundary_id = SPECIALS.index("</s>")
    unknown_id = SPECIALS.index("<unk>")

    def __init__(self, counts: dict[str, int]):
        """`counts`: each symbol's count in the order of ids, specials first."""
        self.counts, self.symbols, self.vocab_size = counts, list(counts), len(counts)
        self._ids = {symbol: i for i, symbol in enumerate(counts)}

    def encode_stream(
        self, pieces: Iterable[Piece], *, after_open_line: bool = False
    ) -> Iterator[Ids]:
        """Yields each line's words, then `</s>`, also for blank lines and an open last line."""
        for piece in with_whole_words(pieces):
            text = piece.text.replace("\n", " </s> ")
            if piece.leaves_line_open:
                text += " </s>"
            yield np.array(
                list(map(self._ids.get, text.split(), itertools.repeat(self.unknown_id))), np.int32
            )

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the words with a space between them, and a line end for each `</s>`."""
        symbols = (self.symbols[i] for i in ids if i < self.vocab_size)
        text = " ".join("\n" if symbol == "</s>" else symbol for symbol in symbols)
        return text.replace(" \n", "\n").replace("\n ", "\n")

    def fingerprint(self) -> str:
        """Returns the SHA-256 over the symbols in their order."""
        return hashlib.sha256("\n".join(["words", *self.symbols]).encode("utf-8")).hexdigest()

    def _write(self, folder: pathlib.Path) -> dict[str, Any]:
        # As fairseq reads it: without the specials, with the padding.
        lines = [f"{symbol} {count}\n" for symbol, count in self.counts.items()][len(SPECIALS) :]
        (folder / self.file).write_bytes("".join(lines).encode("utf-8"))
        return {}


def with_whole_words(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces. A word that a piece's end cuts moves to the next piece."""
    parts: list[bytes] = []
    for piece in pieces:
        text, word = piece.utf8, b""
        if text and not piece.ends_document and not text[-1:].isspace():
            word = text.rsplit(None, 1)[-1]
            text = text[: len(text) - len(word)]
        if text or piece.ends_document:
            yield Piece(b"".join([*parts, text]), piece.ends_document)
            parts = []
        parts.append(word)
    if any(parts):
        yield Piece(b"".join(parts), ends_document=False)


def make_dictionary(pieces: Iterable[Piece]) -> dict[str, int]:
    """Returns each symbol's count: specials, then words with falling counts, equal ones in order,
    padded as fairseq does.

    A special's name in the text counts for the special. Raises ValueError if there is no word.
    """
    counter: Counter[str] = Counter()
    for piece in with_whole_words(pieces):
        counter.update(piece.text.split())
    if not counter:
        raise ValueError("the train split has no word for a dictionary; check data.train")
    words = sorted(counter.keys() - set(SPECIALS), key=lambda word: (-counter[word], word))
    return _padded({symbol: counter[symbol] for symbol in (*SPECIALS, *words)})


def read_dictionary(path: str | os.PathLike) -> dict[str, int]:
    """Returns the counts in a dict.txt, which has a "symbol count" per line without the specials, and
    may have padding.

    Raises ValueError, with the line, for another file.
    """
    try:
        # Only "\n" ends a line: words may hold other characters that Python calls line breaks.
        content = epath.Path(path).expanduser().read_bytes().decode("utf-8-sig")
        lines = [line.removesuffix("\r") for line in content.rstrip("\r\n").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the dictionary {path} can't be read in UTF-8: {error}") from error
    counts = dict.fromkeys(SPECIALS, 0)
    for index, line in enumerate(lines, start=1):
        symbol, _, count = line.rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(
                f'{path}, line {index}: {line[:60]!r} is not "symbol count" as in fairseq\'s dict.txt'
            )
        if symbol in counts:
            raise ValueError(
                f"{path} holds {symbol!r} twice, or it is one of {', '.join(SPECIALS)}; remove that line"
            )
        counts[symbol] = int(count)
    return _padded(counts)


def _padded(counts: dict[str, int]) -> dict[str, int]:
    """Returns the dictionary filled up to a multiple of 8 with fairseq's made-up words."""
    made_up = (f"madeupword{index:04d}" for index in itertools.count())
    while len(counts) % 8:
        counts.setdefault(next(made_up), 0)
    return counts
