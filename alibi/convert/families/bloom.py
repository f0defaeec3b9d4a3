"""BLOOM and BLOOMZ (arXiv 2211.05100): ALiBi, and a norm after the embedding."""

from typing import Any

from alibi.config import Config
from alibi.convert.families.base import Entry, Family, HubConfig, attention, dense, norm

ENTRIES = (
    Entry("transformer.word_embeddings.weight", ("embedding",)),
    *norm("transformer.word_embeddings_layernorm", "embedding_norm"),
    *norm("transformer.h.{n}.input_layernorm", "layers_{n}/attention_norm"),
    *dense("transformer.h.{n}.self_attention.query_key_value", *attention(), interleaved=True),
    *dense("transformer.h.{n}.self_attention.dense", *attention("out")),
    *norm("transformer.h.{n}.post_attention_layernorm", "layers_{n}/feed_forward_norm"),
    *dense("transformer.h.{n}.mlp.dense_h_to_4h", "layers_{n}/up"),
    *dense("transformer.h.{n}.mlp.dense_4h_to_h", "layers_{n}/down"),
    *norm("transformer.ln_f", "final_norm"),
)


def to_ours(hub: HubConfig) -> dict[str, Any]:
    width = hub.take("hidden_size", "n_embed")
    hub.needs("apply_residual_connection_post_layernorm", False)
    hub.needs("tie_word_embeddings", True)
    hub.needs("n_inner", 4 * width)
    hub.ignore("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "offset_alibi")
    hub.ignore("masked_softmax_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion")
    return {
        "train_length": hub.take("seq_length", default=2048),
        "model.num_layers": hub.take("n_layer", "num_hidden_layers"),
        "model.width": width,
        "model.num_heads": hub.take("n_head", "num_attention_heads"),
        "model.feed_forward": 4 * width,
        "model.activation": "gelu",
        "model.embedding_norm": True,
        "model.norm_epsilon": hub.take("layer_norm_epsilon", default=1e-5),
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "model_type": "bloom",
        "hidden_size": model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "seq_length": config.train_length,
        "vocab_size": model.vocab_rows,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    }


FAMILY = Family(
    "bloom", ("BloomForCausalLM",), lambda hub: ENTRIES, to_ours, to_theirs, "transformer."
)
