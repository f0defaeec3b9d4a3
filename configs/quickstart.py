"""The quickstart's model: small enough for two CPU cores, large enough to show the effect.

python train.py --config=configs/quickstart.py:position=alibi,length=128 --workdir=workdirs/quickstart-alibi
"""

import ml_collections

from configs import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
    config.model.num_heads = 4
    return base.apply(config, arg)
