"""The embedded books for the paper's tables at a small scale: as configs/books.py, in half the
tokens.

python train.py --config=configs/books_tables.py:position=alibi,length=32 --workdir=workdirs/books-tables-alibi-32

Nesterov's momentum of 0.99 needs many updates more than large ones: 1,200 updates with 1,024 tokens
(1.2M, or 960 tokens in whole sequences at lengths such as 96 and 192), not 600 with 4,096 (2.5M).
"""

import ml_collections

from configs import base, books


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = books.get_config()
    # 26,000 words; a window for each of them (stride 1) takes minutes
    config.data.max_valid_bytes = 131_072
    # a tenth of them is the warm-up, as in configs/books.py; 16/286 would be 67 updates
    config.train.steps = 1_200
    config.train.batch_tokens = base.whole_sequences(1_024, config)
    config.eval.update(every_steps=600, max_tokens=-1)
    config.checkpoint.every_steps = 600
    return base.apply(config, arg)
