"""Falcon: Falcon-RW with ALiBi (arXiv 2306.01116), and Falcon-7B with rotary positions.

Falcon adds m j to the products of queries and keys before their division by sqrt(head_dim), with m
rounded to bfloat16. Its code also rounds m j to bfloat16, which loses the order of far keys. Here
distances are exact.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from alibi.config import Config
from alibi.convert.families.base import (
    ACTIVATIONS,
    Entry,
    Family,
    HubConfig,
    attention,
    dense,
    norm,
)
from alibi.convert.families.llama import NAMES, rotary, rotary_to_theirs
from alibi.slopes import alibi_slopes


def entries(hub: HubConfig) -> tuple[Entry, ...]:
    fused = "transformer.h.{n}.self_attention.query_key_value"
    return (
        Entry("transformer.word_embeddings.weight", ("embedding",)),
        *norm("transformer.h.{n}.input_layernorm", "layers_{n}/attention_norm"),
        *dense(fused, *attention(), interleaved=not hub.take("multi_query", default=True)),
        *dense("transformer.h.{n}.self_attention.dense", *attention("out")),
        *norm("transformer.h.{n}.post_attention_layernorm", "layers_{n}/feed_forward_norm"),
        *dense("transformer.h.{n}.mlp.dense_h_to_4h", "layers_{n}/up"),
        *dense("transformer.h.{n}.mlp.dense_4h_to_h", "layers_{n}/down"),
        *norm("transformer.ln_f", "final_norm"),
        Entry("lm_head.weight", ("head",)),
    )


def to_ours(hub: HubConfig) -> dict[str, Any]:
    width, heads = hub.take("hidden_size"), hub.take("num_attention_heads", "n_head")
    hub.needs("new_decoder_architecture", False)  # two norms before parallel layers
    hub.ignore("num_kv_heads", "n_head_kv", "num_ln_in_parallel_attn")
    hub.ignore("apply_residual_connection_post_layernorm")
    bias, several = hub.take("bias", default=False), not hub.take("multi_query", default=True)
    alibi = hub.take("alibi", default=False)
    position = rotary(hub)
    if alibi:
        rounded = np.asarray(alibi_slopes(heads).astype(jnp.bfloat16), np.float64)
        slopes = tuple((rounded / (width // heads) ** 0.5).tolist())
        position = {"position": "alibi", "position_options.slopes": slopes}
    return position | {
        "train_length": hub.take("max_position_embeddings", default=2048),
        "model.num_layers": hub.take("num_hidden_layers", "n_layer"),
        "model.width": width,
        "model.num_heads": heads,
        "model.num_kv_heads": 0 if several else 1,
        "model.feed_forward": hub.take("ffn_hidden_size", default=4 * width),
        "model.activation": hub.choose(ACTIVATIONS, "activation", default="gelu"),
        "model.parallel": hub.take("parallel_attn", default=True),
        "model.qkv_bias": bias,
        "model.out_bias": bias,
        "model.feed_forward_bias": bias,
        "model.norm_epsilon": hub.take("layer_norm_epsilon", default=1e-5),
        "model.embedding": "tied" if hub.take("tie_word_embeddings", default=True) else "untied",
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model, alibi = config.model, config.position == "alibi"
    return ({"rope_theta": 10_000.0} if alibi else rotary_to_theirs(config)) | {
        "model_type": "falcon",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_hidden_size": model.feed_forward,
        "activation": NAMES[model.activation],
        "alibi": alibi,
        "bias": model.qkv_bias,
        "multi_query": model.kv_heads == 1,
        "parallel_attn": model.parallel,
        "new_decoder_architecture": False,
        "layer_norm_epsilon": model.norm_epsilon,
        "max_position_embeddings": config.train_length,
        "tie_word_embeddings": model.embedding == "tied",
        "vocab_size": model.vocab_rows,
    }


FAMILY = Family(
    "falcon",
    ("FalconForCausalLM", "RWForCausalLM"),
    entries,
    to_ours,
    to_theirs,
    "transformer.",
    r".*\.rotary_emb\.inv_freq",
)
