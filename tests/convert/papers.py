"""Models of the paper's code made of arrays."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from alibi.convert.families.fairseq import sizes
from alibi.convert.tensors import Model, Tensor

SETTINGS = {
    "arch": "transformer_lm",
    "decoder_attention_heads": 6,
    "tokens_per_sample": 16,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
    "seed": 7,
}


def as_model(tensors: Mapping[str, np.ndarray], **settings: Any) -> Model:
    """Returns a model with these tensors; `settings` replace those of `SETTINGS`."""

    def read(name: str, index: Any = ...) -> np.ndarray:
        return tensors[name][index]

    listed = {
        name: Tensor(x.shape, str(x.dtype), functools.partial(read, name))
        for name, x in tensors.items()
    }
    return Model(pathlib.Path("x.pt"), SETTINGS | settings | sizes(listed), listed)
