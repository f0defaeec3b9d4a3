"""ALiBi in every other layer, no position method in the others.

python train.py --config=configs/alibi_none.py:length=128 --workdir=workdirs/alibi-none

The layers in between see distant tokens as well as near ones, as in configs/rnope_swa.py, and ALiBi
keeps the order. We know no published results with ALiBi in some layers. NAPE (arXiv 2506.16640) mixes
both within each layer: half the heads have ALiBi, half none. The model is the quickstart's.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.position = "alibi,none"
    return base.apply(config, arg)
