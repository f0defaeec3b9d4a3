"""Datasets of others."""

from alibi.data.pieces import Corpus


class Hub(Corpus):
    pass


class Tfds(Corpus):
    pass
