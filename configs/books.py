"""The paper's model and recipe at the smallest scale: the embedded books, words, a minute or two on
two CPU cores.

python train.py --config=configs/books.py:position=alibi,length=64 --workdir=workdirs/books-alibi-64

As configs/wikitext2.py, but without a file: it reads 1.4M words of prose.
"""

import ml_collections

from configs import base, wikitext2


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = wikitext2.get_config()
    config.data.update(corpus="books", train="train", valid="valid", test="test")
    config.train.steps = 600  # 2.5M tokens
    steps = config.train.get_ref("steps")
    # CHOICE: more than the paper's share. 16/286 of these would be 33 updates, a third of the 100
    # that a momentum of 0.99 averages over.
    config.optimizer.warmup_steps = steps // 10
    config.optimizer.period_steps = steps - steps // 10
    config.eval.every_steps = 300
    config.checkpoint.every_steps = 300
    return base.apply(config, arg)
