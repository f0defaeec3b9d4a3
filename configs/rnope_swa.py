"""RNoPE-SWA: rotary under a sliding window in three of four layers, no position method and the full
context in the fourth (Yang et al. 2025, arXiv 2501.18795).

python train.py --config=configs/rnope_swa.py:length=128 --workdir=workdirs/rnope-swa

Published, for models with 8B parameters: on RULER's retrieval tasks 96.1 at 8k tokens and 74.8 at 256k
(rotary in all layers, with a larger base: 96.6 and 57.1), on its question answering 55.5 and 42.5 (53.5
and 30.0). Command A has this pattern with windows of 4,096 tokens (its model card). Here the model is
the quickstart's, and the window is L / 4 for L = 128: set model.window with another length.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.position = "rotary,rotary,rotary,none"
    config.model.window = (32, 32, 32, 0)
    return base.apply(config, arg)
