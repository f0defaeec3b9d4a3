"""SkyLadder: short rows first, of L / 8 tokens, then longer ones up to L (Zhu et al. 2025, arXiv 2503.15450).

python train.py --config=configs/skyladder.py:length=128 --workdir=workdirs/skyladder

Published, for models with 1B parameters and contexts of up to 32K tokens: up to 3.7% better on common
benchmarks, and up to 22% faster training. There the context grows linearly, by a mask within long rows.
Here it is doubled when the line reaches the double, and L after 64% of the updates. The text is in the
order of a run at length L. The model is the quickstart's, with rotary. Give length and updates after the
colon: the rows follow them there, and --config.train_length replaces the list.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config(f"position=rotary,{arg}")
    length, full = config.train_length, config.train.steps * 64 // 100
    # 1/8 + 7/8 t is a quarter, a half and 1 at t = 1/7, 3/7 and 1
    rows = [
        (full * sevenths // 7, length // divisor)
        for sevenths, divisor in ((0, 8), (1, 4), (3, 2), (7, 1))
    ]
    base.set_key(config, "train_length", rows)
    return config
