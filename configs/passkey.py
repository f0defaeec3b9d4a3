"""The quickstart's model on books with passkeys, a key in the text and later a question for it.

`python eval_extrapolation.py --evaluators=passkey` measures how many it finds.

python train.py --config=configs/passkey.py:position=alibi,length=128 --workdir=workdirs/passkey-alibi
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.data.corpus = "passkeys"
    # key and question fit into a training sequence
    config.data.passkey_distance = config.get_ref("train_length") - 32
    config.train.steps = 3000
    config.eval.every_steps = config.checkpoint.every_steps = 500
    return base.apply(config, arg)
