"""A model that has something to lose: it is below the n-grams that were counted on its train text, of up
to ten bytes and eight tokens, and in one run uses more than 128 tokens of context. 3.7M parameters, BPE,
half an hour a run on two cores.

python train.py --config=configs/study.py:position=alibi --workdir=workdirs/study-alibi

The text is the books in configs/long_books.json, from which scripts/join_books.py makes files. Any
other text does too, such as PG-19 on the hub: data.corpus=hub,data.name=emozilla/pg19,
data.valid=validation,data.train=train,data.streaming=True,data.max_train_bytes=100000000.
results/beyond-counting has one run of it, results/study runs of several methods.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.train_length = 512
    config.model.width = 256
    config.model.feed_forward = 1_024
    config.data.update(
        corpus="text", train="data/long-books/train.txt", valid="data/long-books/valid.txt"
    )
    config.data.tokenizer = "bpe"
    config.data.max_valid_bytes = 1_000_000
    config.train.steps = 4_000
    config.train.batch_tokens = base.whole_sequences(4_096, config)
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.eval.every_steps = config.checkpoint.every_steps = 500
    config.eval.max_tokens = 65_536
    return base.apply(config, arg)
