"""Gemma 3's layers: five under a window with rotary's base 10,000, then one with the full context
and the base 1,000,000 (Gemma Team 2025, arXiv 2503.19786).

python train.py --config=configs/gemma3.py:length=128 --workdir=workdirs/gemma3

Published: windows of 1,024 tokens, the first layer local, contexts of 128K tokens (32K for the model
with 1B parameters). Here the model is the quickstart's with six layers, and the window is L / 4 for L =
128: set model.window with another length. Gemma 3 also norms queries and keys (here model.qk_norm),
groups queries, and divides positions in global layers by 8 for contexts of 128K. This config doesn't.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.position = "rotary"
    config.position_options.base = (1e4, 1e4, 1e4, 1e4, 1e4, 1e6)
    config.model.num_layers = 6
    config.model.window = (32, 32, 32, 32, 32, 0)
    return base.apply(config, arg)
