r"""The paper's model and recipe at a small scale: WikiText-2, words, two CPU cores (for tables 1 to
7 and 13 to 15).

python train.py --config=configs/wikitext2.py:position=alibi,length=64 --workdir=workdirs/wikitext2-alibi-64 \
    --config.data.train=wikitext-2/train.txt --config.data.valid=wikitext-2/valid.txt

The texts have a token between blanks and `<unk>` in place: `wikitext-2-v1` in the hub's
Salesforce/wikitext, not the raw ones. They give the paper's counts: 2,088,628, 217,646 and 245,569
tokens, and 33,280 entries in the dictionary. Widths, cutoffs, lengths and updates in
configs/wikitext103.py are divided. Comments name other differences.
"""

import ml_collections

from configs import base, wikitext103


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = wikitext103.get_config()
    config.train_length = 64
    config.model.update(
        num_layers=4,
        width=64,
        num_heads=8,  # the paper's, so that ALiBi has its slopes
        feed_forward=256,
        cutoffs=(2_000, 8_000),
        # The text is a fiftieth of WikiText-103 and the model a 465th of the paper's (530,560
        # parameters), and it sees the text a few times instead of 205: it needs no such dropout.
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        softmax_dropout=0.0,
    )
    config.data.update(corpus="text", name="", subset="", revision="", train="", valid="", test="")
    steps = config.train.get_ref("steps")
    # CHOICE: more than the paper's share. 16/286 of these would be 123 updates, hardly more than
    # the 100 that a momentum of 0.99 averages over.
    config.optimizer.warmup_steps = steps // 11
    config.optimizer.period_steps = steps - steps // 11
    config.train.update(steps=2_200, max_device_tokens=0)
    config.train.batch_tokens = base.whole_sequences(4_096, config)
    config.eval.update(every_steps=550, max_tokens=65_536)
    config.checkpoint.every_steps = 550
    config.log.every_steps = 20
    return base.apply(config, arg)
