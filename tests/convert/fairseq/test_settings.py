"""What checkpoints of older and newer versions say, and numbers that can't be."""

import argparse
import pickle

import pytest

from alibi.convert.fairseq.parameters import Architecture
from alibi.convert.fairseq.settings import read_settings
from alibi.convert.fairseq.unpickle import unpickle

SIZES = Architecture(2, 24, 40, 96, (40, 72), 2, final_norm=False)
SAID = {
    "arch": "transformer_lm",
    "decoder_layers": 2,
    "decoder_attention_heads": 6,
    "tokens_per_sample": 16,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
    "adaptive_softmax_cutoff": "40,72",
    "seed": 7,
}


def settings(updates=150, **said):
    """Those of an older checkpoint: a Namespace of arguments, as the reader gives it."""
    content = {"args": argparse.Namespace(**SAID | said), "optimizer_history": [{"num_updates": updates}]}
    return read_settings(unpickle(pickle.dumps(content, 2), lambda storage: None), SIZES)


@pytest.mark.parametrize(
    ("said", "rate"),
    [({"relu_dropout": 0.1}, 0.1), ({"activation_dropout": 0.2, "relu_dropout": 0.0}, 0.2), ({}, 0.0)],
)
def test_the_arguments_of_older_versions(said, rate):
    found = settings(**said)
    assert found.rates == {
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": rate,
        "softmax_dropout": 0.2,
    }
    assert (found.num_heads, found.train_length, found.seed, found.updates) == (6, 16, 7, 150)
    assert (found.position, found.activation) == ("sinusoidal", "relu")
    assert settings(seed=2**32 - 1).seed == 2**32 - 1


@pytest.mark.parametrize(("theirs", "ours"), [("gelu", "gelu_exact"), ("gelu_fast", "gelu"), ("swish", "silu")])
def test_activations_have_other_names(theirs, ours):
    assert settings(activation_fn=theirs).activation == ours


DEEP = [[]]
for _ in range(40):
    DEEP = [DEEP, DEEP]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tokens_per_sample": 0}, "tokens_per_sample=0, which must be from 1"),
        ({"tokens_per_sample": 2**40}, "which must be from 1 to 2,147,483,647"),
        ({"decoder_attention_heads": -8}, "decoder_attention_heads=-8, which must be"),
        ({"updates": 0}, "after 0 updates"),
        ({"updates": 2**40}, "after 1099511627776 updates .* from 1 to 2,147,483,647"),
        ({"dropout": float("nan")}, "dropout=nan, which must be from 0 to below 1"),
        ({"relu_dropout": 1.0}, "relu_dropout=1.0, which must be"),
        ({"seed": -1}, "seed=-1, which must be"),
        ({"seed": 2**32}, r"seed=4294967296, which must be from 0 to 2\^32 - 1"),
        ({"activation_fn": "linear"}, "the activation 'linear'; only relu, gelu, gelu_fast"),
        # Each of these would be a message of a terabyte.
        ({"arch": DEEP}, "of the architecture .*; only"),
        ({"base_layers": DEEP}, "trained with base_layers=.*; only"),
        ({"adaptive_softmax_cutoff": DEEP}, "say adaptive_softmax_cutoff=.* and its tensors"),
        ({"dropout": DEEP}, "in place of a number as dropout"),
        ({"activation_fn": DEEP}, "the activation .*; only"),
        ({"updates": DEEP}, "saved after .* updates"),
    ],
)
def test_what_cannot_be_is_one_short_line(said, message):
    with pytest.raises(ValueError, match=message) as error:
        settings(**said)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500
