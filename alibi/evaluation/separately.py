"""Documents scored each on its own: packed into windows in which they don't see each other.

Windows of one length hold documents of every length, so nothing is compiled anew for a document.
"""

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from alibi.data.corpus import Corpus, limit_bytes
from alibi.data.tokenfile import TokenFile
from alibi.objectives import IsolatedDocuments, NextToken, Objective, Sequences


@dataclasses.dataclass(frozen=True)
class Packed(IsolatedDocuments):
    """The objective of packed documents: next tokens, whose documents begin at known places.

    Attributes:
      begins: whether a document begins at each place of the packed tokens.
      is_token: whether the place holds a token; else it is padding.
    """

    begins: Bool[np.ndarray, " places"]
    is_token: Bool[np.ndarray, " places"]

    def predicted(self, start: int, stop: int) -> Bool[np.ndarray, " tokens"]:
        return self.is_token[start:stop]

    def _numbers(self, sequences: Sequences) -> Int32[np.ndarray, "rows length"]:
        places = sequences.first[:, None] + np.arange(sequences.tokens.shape[1] - 1)
        return np.cumsum(self.begins.take(places, mode="clip"), axis=1, dtype=np.int32)


class SeparateDocuments:
    """The documents of a text as ranges of its tokens, which hold the whole text together.

    A boundary after a document belongs to it.

    Attributes:
      ends: the place after the last token of each document.
    """

    def __init__(self, text: TokenFile, corpus: Corpus):
        """Raises ValueError if the text spells the boundary, so its ends are not known."""
        manifest, boundaries, of_documents = text.manifest, 0, []
        for piece in limit_bytes(corpus.pieces(manifest.split), manifest.max_bytes):
            if manifest.tokenizer == "bpe":
                boundaries += piece.ends_document
            else:
                boundaries += piece.utf8.count(b"\n") + piece.leaves_line_open
            if piece.ends_document:
                of_documents.append(boundaries)
        self._tokens = np.asarray(text.tokens, np.int32)
        self._vocabulary = manifest.vocab_size, manifest.boundary_id
        ends = np.flatnonzero(self._tokens == manifest.boundary_id) + 1
        if manifest.tokenizer == "bytes":  # none stands after the last line
            ends = np.append(ends, self._tokens.size)[:boundaries]
        if ends.size != boundaries:
            raise ValueError(
                f"{manifest.source} spells the end of a line, </s>, in {ends.size - boundaries:,} places, so the ends "
                "of its documents are not known; replace these words"
            )
        self.ends: Int[np.ndarray, " documents"] = ends[np.array(of_documents) - 1]

    @property
    def _begins(self) -> Int[np.ndarray, " documents"]:
        return np.append(0, self.ends[:-1])

    def pack(self, length: int) -> tuple[Objective, Int32[np.ndarray, " places"]]:
        """Returns the tokens in windows of `length`, padded by -1, and their objective.

        A document lies within a window; a longer one begins with a window and fills the next.
        """
        begins, place = [], 0
        for size in (self.ends - self._begins).tolist():
            room = -place % length
            place += room if size > room else 0
            begins.append(place)
            place += size
        places = np.arange(self._tokens.size) + np.repeat(
            np.array(begins) - self._begins, self.ends - self._begins
        )
        packed = np.full(place + -place % length, -1, np.int32)
        packed[places] = self._tokens
        is_first = np.zeros(packed.size, bool)
        is_first[[begin for begin in begins if begin < packed.size]] = True  # the last may be empty
        next_token = NextToken(*self._vocabulary)
        return Packed(
            *self._vocabulary, next_token, restart=True, begins=is_first, is_token=packed >= 0
        ), packed

    def mean_context(self, length: int) -> float:
        """Returns the mean number of inputs that the prediction of a token sees in windows of
        `length`.
        """
        places = np.arange(self._tokens.size) - np.repeat(self._begins, self.ends - self._begins)
        return float((places % length + 1).mean())

    def lines(self, nll_nats: Float[np.ndarray, " tokens"]) -> Iterator[str]:
        """Yields a JSON line for each document: its number, its tokens and their NLL."""
        for number, (begin, end) in enumerate(zip(self._begins, self.ends, strict=True)):
            nats = nll_nats[begin:end].astype(np.float64)
            of_tokens = {"ids": self._tokens[begin:end].tolist(), "nats": nats.round(6).tolist()}
            counts = {"document": number, "tokens": nats.size, "nll_nats": float(nats.sum())}
            yield json.dumps(counts | of_tokens) + "\n"
