r"""The paper's 1.3B model on CC100 and RoBERTa's corpora (section 4.2; tables 11 and 12).

python train.py --config=configs/cc100_1b3.py:position=alibi,length=512 --workdir=workdirs/cc100-alibi-512 \
    --config.data.train=TRAIN --config.data.valid=VALID

TRAIN and VALID are text files or globs (.xz as CC100 comes). The paper's are CC100's English part (300
GB) and RoBERTa's training corpora (161 GB), which nobody redistributes as one. train.py says how to run
on several hosts.

Section 4.2 publishes the model's sizes, the updates and the GPUs. Optimizer, learning rate, batch,
dropout, tokenizer and initialization are not published. Each is chosen here, and marked CHOICE with
the reason.
"""

import ml_collections

from alibi.config import base

GPUS, GPU_TOKENS = 128, 16_384


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
    config.train_length = 512  # tables 11 and 12: 512, 1,024 and 2,048
    config.model.update(
        num_layers=25,  # section 4.2: "25 transformer layers with 16 heads and a dimension of 2048,
        width=2048,  # with an 8192 hidden dimension of the feedforward sublayers"
        num_heads=16,
        feed_forward=8192,
        activation="relu",  # CHOICE: as in the paper's other models
        # CHOICE: fairseq's default; the WikiText-103 models lack one for Baevski and Auli's sake
        final_norm=True,
        norm_epsilon=1e-5,  # PyTorch's
        initialization="paper",  # CHOICE: fairseq's, whose models these are
        embedding="tied",  # CHOICE: 1.3B parameters are counted with one matrix for both
        dropout=0.0,  # CHOICE: the run is one epoch, which can't overfit
        attention_dropout=0.0,
        activation_dropout=0.0,
        # CHOICE: today's accelerators are made for it; the paper's GPUs had half precision
        dtype="bfloat16",
        remat=True,
    )
    config.data.update(
        corpus="text",
        train="",
        valid="",  # of the paper: 649K tokens
        document_end="blank_line",  # as in CC100's files
        # CHOICE: byte-level BPE, as RoBERTa, whose corpora these are; trained on TRAIN
        tokenizer="bpe",
        # CHOICE: more text would hardly change the merges, and takes memory
        tokenizer_train_bytes=1 << 30,
        bpe_vocab_size=50_264,  # CHOICE: RoBERTa's 50,260 entries, a multiple of 8
    )
    config.optimizer.update(
        # CHOICE, as all below: Brown et al. (2020), table 2.1 and appendix B, for their 1.3B model
        name="adamw",
        learning_rate=2e-4,
        schedule="cosine",
        final_fraction=0.1,
        warmup_init=0.0,
        # as many updates as theirs, 375M tokens in batches of 1M; ours are twice as large
        warmup_steps=375,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        clip_norm=1.0,
    )
    config.train.steps = 50_000  # section 4.2: "one epoch, which is 50k updates on 128 V100 GPUs"
    # CHOICE: 461 GB are about 105B tokens at RoBERTa's 4.4 bytes a token, and 50,000 updates
    # of 2,097,152 tokens see each once: 16,384 a GPU.
    config.train.batch_tokens = GPUS * GPU_TOKENS
    config.train.max_device_tokens = GPU_TOKENS
    # parameters and Adam's state of 1.3B: 16 GB, split over the devices
    config.mesh.update(data=1, fsdp=-1)
    config.eval.update(every_steps=1_000, max_tokens=-1)
    config.checkpoint.update(every_steps=1_000, keep=2)
    config.log.every_steps = 20
    return base.apply(config, arg)
