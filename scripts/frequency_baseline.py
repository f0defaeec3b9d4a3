"""Scores the tokens that an objective predicts by their frequency in the train text alone.

python scripts/frequency_baseline.py --config=configs/mlm.py

A model that knows no context reaches this NLL; each token of the vocabulary counts once more than it
occurs, so none is impossible.
"""

import math

import clone  # noqa: F401
import numpy as np
from absl import flags

from alibi.cli import command_line

_CONFIG = command_line.define_config_flag()
_SPLIT = flags.DEFINE_string("split", "valid", "the text to score: valid or test")


def main() -> None:
    from alibi.data.tokens import prepare
    from alibi.training.setup import objective_of

    config = _CONFIG.value
    train = prepare(config.data, "train")
    text = prepare(config.data, _SPLIT.value, train.tokenizer())
    counts = np.bincount(np.asarray(train.tokens), minlength=train.manifest.vocab_size) + 1
    predicted = objective_of(config, text).predicted(0, len(text.tokens))
    targets = np.asarray(text.tokens)[predicted]
    nll = -np.log(counts / counts.sum())[targets].mean()
    print(
        f"{text.manifest.source}, {_SPLIT.value}: {targets.size:,} tokens predicted by their frequency: "
        f"{nll:.4f} nats, perplexity {math.exp(nll):.2f}"
    )


if __name__ == "__main__":
    command_line.run(main, required=("config",))
