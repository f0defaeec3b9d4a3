"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): rotary for a share of each head, and two norms
in front of parallel layers.
"""

from typing import Any

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
from alibi.convert.families.bert import NAMES
from alibi.convert.families.llama import rotary, rotary_to_theirs

LAYER = "gpt_neox.layers.{n}"
ENTRIES = (
    Entry("gpt_neox.embed_in.weight", ("embedding",)),
    *norm(f"{LAYER}.input_layernorm", "layers_{n}/attention_norm"),
    *dense(f"{LAYER}.attention.query_key_value", *attention(), interleaved=True),
    *dense(f"{LAYER}.attention.dense", *attention("out")),
    *norm(f"{LAYER}.post_attention_layernorm", "layers_{n}/feed_forward_norm"),
    *dense(f"{LAYER}.mlp.dense_h_to_4h", "layers_{n}/up"),
    *dense(f"{LAYER}.mlp.dense_4h_to_h", "layers_{n}/down"),
    *norm("gpt_neox.final_layer_norm", "final_norm"),
    Entry("embed_out.weight", ("head",)),
)


def to_ours(hub: HubConfig) -> dict[str, Any]:
    share, base = hub.take("rotary_pct", default=0.25), hub.take("rotary_emb_base", default=1e4)
    hub.needs("rope_theta", base)  # its code reads the names above alone
    hub.needs("partial_rotary_factor", share)
    bias = hub.take("attention_bias", default=True)
    parallel = hub.take("use_parallel_residual", default=True)
    return rotary(hub, share, base) | {
        "train_length": hub.take("max_position_embeddings", default=2048),
        "model.num_layers": hub.take("num_hidden_layers"),
        "model.width": hub.take("hidden_size"),
        "model.num_heads": hub.take("num_attention_heads"),
        "model.feed_forward": hub.take("intermediate_size"),
        "model.activation": hub.choose(
            ACTIVATIONS | {"gelu_fast": "gelu"}, "hidden_act", default="gelu"
        ),
        "model.parallel": parallel,
        "model.norms": "before_each" if parallel else "before",
        "model.norm_epsilon": hub.take("layer_norm_eps", default=1e-5),
        "model.qkv_bias": bias,
        "model.out_bias": bias,
        "model.embedding": "tied" if hub.take("tie_word_embeddings", default=False) else "untied",
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model, rope = config.model, rotary_to_theirs(config)
    base = rope.pop("rope_theta")
    return rope | {
        "model_type": "gpt_neox",
        "rotary_emb_base": base,
        "rotary_pct": config.position_options.get("share", 1.0),
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.feed_forward,
        "hidden_act": NAMES[model.activation],
        "use_parallel_residual": model.parallel,
        "layer_norm_eps": model.norm_epsilon,
        "attention_bias": model.qkv_bias,
        "max_position_embeddings": config.train_length,
        "tie_word_embeddings": model.embedding == "tied",
        "vocab_size": model.vocab_rows,
    }


FAMILY = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM",),
    lambda hub: ENTRIES,
    to_ours,
    to_theirs,
    "gpt_neox.",
    r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    {"embed_out.weight": "gpt_neox.embed_in.weight"},
)
