"""The embedded books for the paper's tables at a small scale: as configs/books.py, in half the tokens.

python train.py --config=configs/books_tables.py:position=alibi,length=32 --workdir=workdirs/books-tables-alibi-32

Nesterov's momentum of 0.99 needs many updates more than large ones: with batches of 1,024
tokens 0.9M tokens bring it as far as 2.5M do with the 4,096 of configs/books.py.
"""

import ml_collections

from configs import base, books


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = books.get_config(arg)
    config.data.max_valid_bytes = 131_072  # 26,000 words; a window for each of them (stride 1) takes minutes
    config.optimizer.update(warmup_steps=120, period_steps=1_080)
    config.train.update(steps=1_200, batch_tokens=base.whole_sequences(1_024, config, arg))
    config.eval.update(every_steps=600, max_tokens=-1)
    config.checkpoint.every_steps = 600
    return base.apply(config, arg)
