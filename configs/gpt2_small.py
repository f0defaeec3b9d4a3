"""A model of GPT-2 small's shape (110M parameters) for one GPU, trained at L = 512 on 2.6 billion tokens.

python train.py --config=configs/gpt2_small.py:position=alibi --workdir=workdirs/small-alibi \
    --config.data.train="texts/*.jsonl.zst" --config.data.valid=valid.txt
python train.py --config=configs/gpt2_small.py --plan --devices=1 --device_kind="NVIDIA H100"

Nobody ran it to the end: no GPU was at hand for so long. The learning rate is GPT-3's for this size
(arXiv 2005.14165, table 2.1), with half of its batch and of its warm-up. 24 tokens a parameter are a few
more than the 20 of arXiv 2203.15556. train.max_device_tokens splits an update into parts that fit 24 GB, as
--plan estimates.
"""

import ml_collections

from alibi.config import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
    config.train_length = 512
    config.model.update(
        num_layers=12,
        width=768,
        num_heads=12,
        feed_forward=3_072,
        activation="gelu",
        dtype="bfloat16",
    )
    config.data.update(corpus="text", tokenizer="bpe", bpe_vocab_size=32_768)
    config.data.tokenizer_train_bytes = 1_000_000_000
    config.data.max_valid_bytes = 10_000_000
    config.train.steps = 10_000
    config.train.batch_tokens = base.whole_sequences(262_144, config)
    config.train.max_device_tokens = 32_768
    config.optimizer.update(learning_rate=6e-4, warmup_steps=700, b2=0.95)
    config.eval.every_steps = config.checkpoint.every_steps = 500
    config.eval.max_tokens = 1_048_576
    return base.apply(config, arg)
