"""DroPE: rotary for three quarters of the updates, then no position method (Gelberg et al. 2025, arXiv
2512.12167).

python train.py --config=configs/drope.py:length=128 --workdir=workdirs/drope

Published: pretrained models lose their rotary positions and go on for a few updates at the same length, in
a training of its own. Then they read longer contexts than before, and keep their quality at the old length.
Here one run does both, with one optimizer and one learning rate schedule. The model is the quickstart's, so
the second part is a larger share than in the paper. Give length and updates after the colon: the change
follows them there.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config(f"position=rotary,{arg}")
    dropped = config.train.steps * 3 // 4
    base.set_key(config, "position", ((0, config.position), (dropped, "none")))
    return config
