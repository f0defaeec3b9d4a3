"""Refact-1.6B: ALiBi with one head of keys, layer norms without bias, SwiGLU."""

import math
from typing import Any

from alibi.config import Config
from alibi.convert.families.base import Entry, Family, HubConfig, attention, dense, norm

BLOCK = "transformer.h.{n}"
ENTRIES = (
    Entry("transformer.wte.weight", ("embedding",)),
    *norm(f"{BLOCK}.ln_1", "layers_{n}/attention_norm"),
    *dense(f"{BLOCK}.attn.q", *attention("query")),
    *dense(f"{BLOCK}.attn.kv", *attention("key", "value")),
    *dense(f"{BLOCK}.attn.c_proj", *attention("out")),
    *norm(f"{BLOCK}.ln_2", "layers_{n}/feed_forward_norm"),
    *dense(f"{BLOCK}.mlp.gate_up_proj", "layers_{n}/gate", "layers_{n}/up"),
    *dense(f"{BLOCK}.mlp.c_proj", "layers_{n}/down"),
    *norm("ln_f", "final_norm"),
    Entry("lm_head.weight", ("head",)),
)


def to_ours(hub: HubConfig) -> dict[str, Any]:
    width = hub.take("n_embd")
    hub.needs("multi_query", True)
    hub.needs("tie_word_embeddings", False)
    hub.needs("scale_attn_weights", True)
    hub.ignore("attention_bias_in_fp32", "attention_softmax_in_fp32", "activation_function")
    hub.ignore("scale_attention_softmax_in_fp32")
    inner = hub.take("n_inner", default=4 * width)
    return {
        "train_length": hub.take("n_positions"),
        "model.num_layers": hub.take("n_layer"),
        "model.width": width,
        "model.num_heads": hub.take("n_head"),
        "model.num_kv_heads": 1,
        "model.feed_forward": 256 * math.ceil(int(2 / 3 * inner) / 256),
        "model.activation": "silu",
        "model.gated": True,
        "model.norm": "layer_no_bias",
        "model.norm_epsilon": hub.take("layer_norm_epsilon", default=1e-5),
        "model.qkv_bias": False,
        "model.out_bias": False,
        "model.feed_forward_bias": False,
        "model.embedding": "untied",
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "model_type": "gpt_refact",
        "n_embd": model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        # the most whose two thirds are rounded up to `feed_forward`
        "n_inner": 3 * model.feed_forward // 2,
        "n_positions": config.train_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "multi_query": True,
        "tie_word_embeddings": False,
        "vocab_size": model.vocab_rows,
    }


FAMILY = Family(
    "refact",
    ("GPTRefactForCausalLM",),
    lambda hub: ENTRIES,
    to_ours,
    to_theirs,
    "transformer.",
    own_code=True,
)
