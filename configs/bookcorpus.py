r"""The paper's Toronto BookCorpus model (appendix A.3; tables 8 to 10).

python train.py --config=configs/bookcorpus.py:position=alibi,length=512 --workdir=workdirs/bookcorpus-alibi-512 \
    --config.data.train=TRAIN --config.data.valid=VALID \
    --config.data.test=TEST --config.data.tokenizer_file=tokenizer.json

TRAIN, VALID and TEST are text files, one document each, or globs: the corpus may not be
redistributed (about 700M tokens, 2.9 GB), and the hub has it only as a script that `datasets` doesn't
run any more. The paper uses the splits from Khandelwal et al. (2020) and BERT's vocabulary with 29K
byte-pair encodings: give it as data.tokenizer_file. Without one, a BPE vocabulary of that size is
trained on TRAIN.
"""

import ml_collections

from configs import base, wikitext103


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    # Appendix A.3: "a similar model architecture" to WikiText-103's. Unpublished values
    # (dropout, updates, batch) are kept from there.
    config = wikitext103.get_config()
    config.model.update(
        # appendix A.3: "we replace the adaptive word embedding and softmax ... with a tied" one
        embedding="tied",
        softmax_dropout=0.0,  # there are no tails
        padding_rows=False,
    )
    config.data.update(
        corpus="text",
        name="",
        subset="",
        revision="",
        train="",
        valid="",
        test="",
        tokenizer="bpe",
        bpe_vocab_size=29_000,  # appendix A.3: "BERT's vocabulary of 29K byte-pair encodings"
    )
    return base.apply(config, arg)
