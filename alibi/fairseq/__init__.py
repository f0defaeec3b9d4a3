"""Checkpoints and dictionaries of fairseq, the library that the paper's code is a fork of."""
