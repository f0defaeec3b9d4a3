"""The quickstart's model: small enough for two CPU cores, large enough to show the effect.

python train.py --config=configs/quickstart.py:position=alibi,length=128 --workdir=workdirs/quickstart-alibi
"""

import ml_collections

from configs import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
    config.model.num_layers = 4
    config.model.width = 128
    config.model.num_heads = 4
    config.model.feed_forward = 512
    config.data.corpus = "books"
    config.data.tokenizer = "bytes"
    config.train.steps = 600
    config.train.batch_tokens = 2048
    return base.apply(config, arg)
