"""Llama's architecture at the quickstart's size: RMS norms, SwiGLU, shared keys, no biases, rotary
positions (arXiv 2302.13971, with grouped-query attention as in Llama 2, arXiv 2307.09288).

python train.py --config=configs/llama_like.py:position=alibi --workdir=workdirs/llama-like

Any position method goes with it. With rotary, scripts/export_hf.py writes the run as Llama.
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.position = "rotary"
    config.model.update(
        num_kv_heads=2,
        feed_forward=344,  # two thirds of 4 x width: a gate has a third matrix
        gated=True,
        activation="silu",
        norm="rms",
        qkv_bias=False,
        out_bias=False,
        feed_forward_bias=False,
        embedding="untied",
        embedding_scale=1.0,
    )
    return base.apply(config, arg)
