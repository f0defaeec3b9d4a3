"""The paper's WikiText-103 model, 247M parameters (section 2.1, tables 1 to 7 and 13 to 15).

python train.py --config=configs/wikitext103.py:position=alibi,length=512 --workdir=workdirs/wikitext103-alibi-512

Model, optimizer and schedule are as in Baevski and Auli (2019) and the paper's code:
`transformer_lm_wiki103`. An update sees 8 parts with 9,216 tokens, each cut to whole sequences: 73,728
/ L sequences, or 32 at L = 2,048. The number of devices, divided by mesh.tensor (which splits the
heads), must divide that. 1, 2, 4 and 8 devices do, and take the parts in turn. At the paper's lengths 5
and 7 don't, nor 3 and 6 at L = 2,048. 16 devices do at each length with `--config.mesh.tensor=2`, 32
with 4, 64 with 8.
"""

import ml_collections

from alibi.config import base

GPUS, GPU_TOKENS = 8, 9_216  # of the paper


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
    config.train_length = 512  # table 5 has 64 to 3,072
    config.model.update(
        # section 2.1, as all of these: "16 transformer layers of dimension 1024, with 8 heads,
        num_layers=16,
        width=1024,  # and a feedforward inner dimension of 4096"
        num_heads=8,
        feed_forward=4096,
        activation="relu",  # the paper's code
        # CHOICE: the paper trained in float16 with scaled losses, which is not here
        dtype="float32",
        final_norm=False,  # the paper's code
        norm_epsilon=1e-5,  # PyTorch's
        initialization="paper",  # the paper's code
        embedding="adaptive",  # section 2.1: word embedding and softmax matrices are tied
        cutoffs=(20_000, 60_000),  # the paper's code, as all below
        adaptive_factor=4,
        dropout=0.3,
        attention_dropout=0.1,
        activation_dropout=0.1,
        softmax_dropout=0.2,
        padding_rows=True,
    )
    config.data.update(
        corpus="hub",  # 103,227,021, 217,646 and 245,569 tokens; 267,744 entries of the dictionary
        name="Salesforce/wikitext",
        subset="wikitext-103-v1",  # not -raw-v1, which has other words
        revision="b08601e04326c79dfdd32d625aee71d232d685c3",
        train="train",
        valid="validation",
        test="test",
        tokenizer="words",
    )
    config.train.steps = 286_000  # 205 epochs (section 2.1): the warm-up and one period
    steps = config.train.get_ref("steps")
    config.optimizer.update(
        name="nag",  # this and all below: the paper's code
        momentum=0.99,
        clip_norm=0.1,
        weight_decay=0.0,
        schedule="cosine_restarts",
        learning_rate=1.0,
        warmup_init=1e-7,
        warmup_steps=steps * 16 // 286,  # 16,000
        period_steps=steps - steps * 16 // 286,  # 270,000
        period_mult=2.0,
        shrink=0.75,
        min_learning_rate=1e-4,
    )
    config.train.max_device_tokens = GPU_TOKENS
    config.eval.update(every_steps=1_400, max_tokens=-1)  # about once an epoch
    config.checkpoint.every_steps = 1_400
    config.log.every_steps = 100
    # 8 x 8,192 at L = 2,048
    config.train.batch_tokens = base.whole_sequences(GPU_TOKENS, config) * GPUS
    return base.apply(config, arg)
