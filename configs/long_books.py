"""The quickstart's model on long books, bytes, for the paper's tables at a medium scale: 16M bytes,
ten minutes a run.

python train.py --config=configs/long_books.py:position=alibi,length=128 --workdir=workdirs/long-books-alibi-128

Twenty bytes are read for each parameter, none twice: models come to know the training positions, and
have something to lose beyond them. The books are PG-19's on the hub, or your own text:
data.corpus=text,data.train=FILES,data.valid=FILES,data.test=FILES. results/tables-medium used the books
in long_books.json, from which scripts/join_books.py makes data/long-books/train.txt, valid.txt and
test.txt.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.data.update(
        corpus="hub", name="emozilla/pg19", train="train", valid="validation", test="test"
    )
    config.data.update(streaming=True, max_train_bytes=100_000_000)  # of 11 GB
    config.train.steps = 2_000
    config.train.batch_tokens = base.whole_sequences(8_192, config)
    config.optimizer.warmup_steps = 100
    config.eval.every_steps = config.checkpoint.every_steps = 500
    return base.apply(config, arg)
