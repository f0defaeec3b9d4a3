"""A progress bar over the text of a split, for whatever reads all of it."""

from collections.abc import Iterator
from typing import Any

import tqdm

from alibi.data.pieces import Corpus, Piece

DELAY = 0.5  # seconds before a bar appears: what is quick, or fails at once, shows none


def byte_bar(title: str, size: int | None, max_bytes: int, *, visible: bool) -> tqdm.tqdm:
    """A bar on stderr that counts bytes of text, up to `size` (None: not known) or `max_bytes` (-1: no limit)."""
    total = size if max_bytes < 0 else min(max_bytes, size or max_bytes)
    return tqdm.tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=DELAY, leave=False, disable=not visible)


class WatchedCorpus(Corpus):
    """`corpus`, with a bar while its pieces are read; `purpose` says what for, and `max_bytes` how many are wanted."""

    def __init__(self, corpus: Corpus, purpose: str, max_bytes: int):
        self._corpus, self._purpose, self._max_bytes = corpus, purpose, max_bytes
        self.name = corpus.name

    def pieces(self, split: str) -> Iterator[Piece]:
        """The corpus's own."""
        title = f"{self.name} {split}, {self._purpose}"
        with byte_bar(title, self._corpus.size(split), self._max_bytes, visible=True) as bar:
            for piece in self._corpus.pieces(split):
                yield piece
                bar.update(len(piece.text.encode("utf-8")))

    def description(self, split: str) -> dict[str, Any]:
        """The corpus's own."""
        return self._corpus.description(split)
