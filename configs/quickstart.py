"""The quickstart's model: small enough for two CPU cores, large enough to show the effect.

python train.py --config=configs/quickstart.py:position=alibi,length=128 --workdir=workdirs/quickstart-alibi
"""

import ml_collections

from alibi.config import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
    config.model.num_heads = 4  # half the attention weights of 8, at the same number of parameters
    # an evaluation takes seconds; 32 windows at 16 times the length
    config.data.max_valid_bytes = 65_536
    config.train.steps = 500
    config.eval.every_steps = 250
    config.eval.max_tokens = 16_384
    config.checkpoint.every_steps = 250
    return base.apply(config, arg)
