"""Corpora for tests."""

import io

import pytest

from alibi.config import DataConfig
from alibi.data.tokens import make_corpus

PLACES = {"train": "train", "valid": "validation", "test": ""}


def text_corpus(place):
    return make_corpus(DataConfig(corpus="text", train=str(place)))


def hub(folder, **options):
    return make_corpus(DataConfig(**(PLACES | {"corpus": "hub", "name": str(folder)} | options)))


def documents_in(pieces):
    """Returns the text of each whole document."""
    found = [""]
    for piece in pieces:
        found[-1] += piece.text
        if piece.ends_document:
            found.append("")
    assert found.pop() == "", "the last document was left open"
    return found


def sentencepiece_model(lines, **options):
    """Returns the content of a .model file; skips where the library is absent."""
    content = io.BytesIO()
    pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=content, minloglevel=2, **options
    )
    return content.getvalue()


def documents(corpus, split):
    return documents_in(corpus.pieces(split))
