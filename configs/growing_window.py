"""Windows that grow: attention reaches back L / 8 tokens, then L / 4, L / 2 and all, a quarter of the
updates each.

python train.py --config=configs/growing_window.py:length=128 --workdir=workdirs/growing-window

Source: the speed runs of modded-nanogpt (github.com/KellerJordan/modded-nanogpt), record of 24 November 2024,
"attention window warmup". Early updates need few keys, and cost less. The model is the quickstart's, with
rotary. Give length and updates after the colon: the windows follow them there.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config(f"position=rotary,{arg}")
    length, quarter = config.train_length, config.train.steps // 4
    windows = [
        (0, max(1, length // 8)),
        (quarter, max(1, length // 4)),
        (2 * quarter, max(1, length // 2)),
        (3 * quarter, 0),
    ]
    base.set_key(config, "model.window", windows)
    return config
