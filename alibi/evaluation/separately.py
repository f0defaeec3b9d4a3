"""Documents scored separately: each begins a window, and padding fills its last window.

All windows have one length, so no document compiles anything anew.
"""

import json

import numpy as np
from jaxtyping import Float, Int32

from alibi.data.corpus import Corpus, limit_bytes
from alibi.data.tokenfile import TokenFile


def documents_of(text: TokenFile, corpus: Corpus) -> list[Int32[np.ndarray, " tokens"]]:
    """Returns each document's tokens, which hold the whole text together: a boundary belongs to the
    document before it.

    Raises:
      ValueError: the text spells the boundary (in a dictionary, or a Unigram vocabulary), so the
        documents' ends are not known.
    """
    manifest, boundaries, of_documents = text.manifest, 0, []
    for piece in limit_bytes(corpus.pieces(manifest.split), manifest.max_bytes):
        boundaries += (
            piece.ends_document
            if manifest.tokenizer == "bpe"
            else piece.utf8.count(b"\n") + piece.leaves_line_open
        )
        if piece.ends_document:
            of_documents.append(boundaries)
    tokens = np.asarray(text.tokens, np.int32)
    ends = np.flatnonzero(tokens == manifest.boundary_id) + 1
    if manifest.tokenizer == "bytes":  # none stands after the last line
        ends = np.append(ends, tokens.size)[:boundaries]
    if ends.size != boundaries:
        raise ValueError(
            f"{manifest.source} has {ends.size:,} tokens that end a line or a document (id {manifest.boundary_id}), "
            f"but {boundaries:,} ends, so the documents are not known: it spells that token, such as </s>; replace "
            "these words"
        )
    return np.split(tokens, ends[np.array(of_documents[:-1], int) - 1])


def padded(
    documents: list[Int32[np.ndarray, " tokens"]], length: int
) -> Int32[np.ndarray, " places"]:
    """Returns the documents, each with -1 behind it up to the end of its last window."""
    return np.concatenate(
        [np.pad(ids, (0, -ids.size % length), constant_values=-1) for ids in documents]
    )


def lines_of(
    documents: list[Int32[np.ndarray, " tokens"]], nll_nats: Float[np.ndarray, " tokens"]
) -> str:
    """Returns a JSON line for each document: its number, its tokens and their NLL."""
    ends = np.cumsum([ids.size for ids in documents])
    by_document = np.split(nll_nats.astype(np.float64), ends[:-1])
    lines = (
        {
            "document": index,
            "tokens": nats.size,
            "nll_nats": float(nats.sum()),
            "ids": documents[index].tolist(),
            "nats": nats.round(6).tolist(),
        }
        for index, nats in enumerate(by_document)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)
