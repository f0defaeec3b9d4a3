"""The quickstart's model as an encoder: masked tokens are predicted from both sides (BERT's 15%,
80/10/10).

python train.py --config=configs/mlm.py:position=alibi,length=128 --workdir=workdirs/mlm-alibi

A mask hides a byte and gives one target in seven tokens, so this trains for longer than the quickstart.
For learned slopes on each side use position=alibi_learned with
--config.position_options.slopes_after=paper.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.objective.name = "masked"
    config.train.steps = 1000
    config.eval.every_steps = config.checkpoint.every_steps = 500
    return base.apply(config, arg)
