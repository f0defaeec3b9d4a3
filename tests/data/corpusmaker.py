"""Corpora for tests."""

from alibi.config import DataConfig
from alibi.data.tokens import make_corpus

PLACES = {"train": "train", "valid": "validation", "test": ""}


def data_config(**keys):
    return DataConfig(**keys)


def text_corpus(place):
    return make_corpus(data_config(corpus="text", train=str(place)))


def hub(folder, **options):
    return make_corpus(data_config(**(PLACES | {"corpus": "hub", "name": str(folder)} | options)))


def documents(corpus, split):
    """Returns the text of each whole document."""
    parts, found = [], []
    for piece in corpus.pieces(split):
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last document was left open"
    return found
