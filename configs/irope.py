"""iRoPE, Llama 4's layers: rotary in three of four layers, which see few tokens, and in the fourth no
position method, the full context, and queries that grow with their position.

python train.py --config=configs/irope.py:length=128 --workdir=workdirs/irope

Published (Meta AI 2025, "The Llama 4 herd", and transformers' Llama4TextConfig): every fourth layer has
no positions, and its queries at position p are multiplied by 1 + 0.1 ln(floor((p + 1) / 8192) + 1). The
others have rotary with the base 500,000 and attention in chunks of 8,192 tokens. Training uses up to
256K tokens, and Scout claims contexts of 10M tokens. Here the model is the quickstart's, queries grow
with each training length in place of 8,192 tokens, and a sliding window, L / 4 for L = 128, replaces
chunks: set model.window with another length. Llama 4 also normalises queries and keys in rotary layers
after their rotation. This config doesn't, and model.qk_norm does so in all layers before rotation.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.position = "rotary,rotary,rotary,none"
    config.position_options.base = 500_000.0
    config.model.window = (32, 32, 32, 0)
    config.model.logit_scale = ("", "", "", "llama4")
    return base.apply(config, arg)
