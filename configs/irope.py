"""iRoPE, the layers of Llama 4: rotary in three layers of four, each seeing few tokens; in the
fourth no position method, the full context, and queries that grow with their position.

python train.py --config=configs/irope.py:length=128 --workdir=workdirs/irope

Published (Meta AI 2025, "The Llama 4 herd", and transformers' Llama4TextConfig): every fourth layer
without positions, whose queries are multiplied by 1 + 0.1 ln(floor((p + 1) / 8192) + 1) at position
p; rotary's base 500,000; attention in chunks of 8,192 tokens in the other layers; training on up to
256K tokens, contexts of 10M tokens claimed for Scout. Here the model is the quickstart's; queries
grow with each training length of tokens in place of 8,192, and a sliding window takes the place of
chunks, a quarter of L = 128: set model.window with another length. Llama 4 also normalises queries
and keys of its rotary layers after their rotation, which is not part of this config; model.qk_norm
does so in all layers, before rotation.
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
