"""MPT (llm-foundry): ALiBi with `alibi_bias_max`, clipped and normed queries and keys. Replit's code
models.
"""

from typing import Any

from alibi.config import Config
from alibi.convert.families.base import Entry, Family, HubConfig, attention, dense, norm, whole

NORMS = ("low_precision_layernorm", "layernorm", "rmsnorm", "low_precision_rmsnorm")


def _entries(norms: tuple[str, str, str], up: str, down: str) -> tuple[Entry, ...]:
    block = "transformer.blocks.{n}"
    return (
        Entry("transformer.wte.weight", ("embedding",)),
        Entry("transformer.wpe.weight", ("position/table",)),
        *norm(f"{block}.{norms[0]}", "layers_{n}/attention_norm"),
        *dense(f"{block}.attn.Wqkv", *attention()),
        *norm(f"{block}.attn.q_ln", "layers_{n}/query_norm"),
        *norm(f"{block}.attn.k_ln", "layers_{n}/key_norm"),
        *dense(f"{block}.attn.out_proj", *attention("out")),
        *norm(f"{block}.{norms[1]}", "layers_{n}/feed_forward_norm"),
        *dense(f"{block}.{up}", "layers_{n}/up"),
        *dense(f"{block}.{down}", "layers_{n}/down"),
        *norm(f"transformer.{norms[2]}", "final_norm"),
        Entry("lm_head.weight", ("head",)),
    )


ENTRIES = _entries(("norm_1", "norm_2", "norm_f"), "ffn.up_proj", "ffn.down_proj")
REPLIT = _entries(("ln_1", "ln_2", "ln_f"), "mlp.mlp_up", "mlp.mlp_down")


def to_ours(hub: HubConfig) -> dict[str, Any]:
    # llm-foundry and transformers save no keys at their defaults, which differ.
    foundry = "auto_map" in hub.content
    attn, of_layers = HubConfig(hub.take("attn_config", default={})), dict[str, Any]()
    width, heads = hub.take("d_model"), hub.take("n_heads")
    for name, value in (
        *(("prefix_lm", False), ("rope", False), ("qk_gn", False), ("sliding_window_size", -1)),
        *(("attn_logit_softcapping", None), ("fused_qkv", True), ("kv_dim", None), ("nope", False)),
    ):
        attn.needs(name, value)
    # without a scale the floor has no effect
    HubConfig(attn.take("attn_temperature_tuning", default={})).needs("attn_scale", 0.0)
    attn.ignore("attn_impl", "attn_uses_sequence_id", "kv_n_heads")
    attn.ignore("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config")
    shared = attn.take("attn_type", default="multihead_attention")
    kv_heads = {"multihead_attention": 0, "multiquery_attention": 1}.get(shared)
    if kv_heads is None:
        kv_heads = attn.take("kv_n_heads")
    if attn.take("alibi", default=not foundry):
        of_layers["position"] = "alibi"
        of_layers["position_options.alibi_bias_max"] = float(attn.take("alibi_bias_max", default=8))
    else:
        attn.ignore("alibi_bias_max")
        of_layers["position"] = "learned" if hub.take("learned_pos_emb", default=True) else "none"
    qk_norm = attn.take("qk_ln", default=False)
    ffn = HubConfig(hub.take("ffn_config", default={}))
    ffn.needs("ffn_type", "mptmlp")
    for name in ("ffn_act_fn", "ffn_hidden_size"):
        ffn.needs(name, None)
    ffn.ignore("fc_type")
    clip, softmax_scale = (
        float(attn.take(key, default=0.0)) for key in ("clip_qkv", "softmax_scale")
    )
    for name, section in (("attn_config", attn), ("ffn_config", ffn)):
        hub.rest |= {f"{name}.{key}": value for key, value in section.left().items()}
    hub.needs("residual_modification", None)
    hub.needs("final_logit_softcapping", None)
    hub.ignore("learned_pos_emb", "embedding_fraction", "init_config", "fc_type")
    hub.ignore("use_pad_tok_in_ffn")
    bias = not hub.take("no_bias", default=not foundry)
    norm_type = hub.choose({name: name for name in NORMS}, "norm_type", default=NORMS[0])
    if "rms" in norm_type and bias:
        raise ValueError(
            f"config.json asks for norm_type={norm_type!r} with biases, which is not implemented here"
        )
    epsilon = hub.take("layer_norm_epsilon", "norm_eps", default=1e-5)
    if qk_norm and (norm_type not in NORMS[:2] or epsilon != 1e-5):
        raise ValueError(
            f"config.json asks for qk_ln beside norm_type={norm_type!r} and norm_eps={epsilon}; llm-foundry norms "
            "queries and keys by layer norm with 1e-05 whatever these are, which is not implemented here"
        )
    scale = hub.take("logit_scale", default=1.0)
    return of_layers | {
        "train_length": hub.take("max_seq_len"),
        "model.num_layers": hub.take("n_layers"),
        "model.width": width,
        "model.num_heads": heads,
        "model.num_kv_heads": 0 if kv_heads == heads else kv_heads,
        "model.feed_forward": int(width * hub.take("expansion_ratio", default=4)),
        "model.activation": "gelu_exact",
        "model.norm": "rms" if "rms" in norm_type else "layer" if bias else "layer_no_bias",
        "model.norm_epsilon": epsilon,
        "model.qkv_bias": hub.take("attention_bias", default=bias),
        "model.out_bias": bias,
        "model.feed_forward_bias": bias,
        "model.qk_norm": qk_norm,
        "model.qk_norm_joint": qk_norm,
        "model.clip_qkv": clip,
        "model.attention_scale": softmax_scale,
        "model.logits_scale": width**-0.5 if scale == "inv_sqrt_d_model" else float(scale),
        "model.embedding": "tied" if hub.take("tie_word_embeddings", default=True) else "untied",
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model = config.model
    shared = {0: "multihead_attention", 1: "multiquery_attention"}
    return {
        "model_type": "mpt",
        "d_model": model.width,
        "n_heads": model.num_heads,
        "n_layers": model.num_layers,
        "expansion_ratio": whole(model.feed_forward / model.width),
        "max_seq_len": config.train_length,
        "vocab_size": model.vocab_rows,
        "no_bias": not model.qkv_bias,
        "norm_type": "rmsnorm" if model.norm == "rms" else "low_precision_layernorm",
        "layer_norm_epsilon": model.norm_epsilon,
        "norm_eps": model.norm_epsilon,  # llm-foundry's name
        "learned_pos_emb": config.position == "learned",
        "logit_scale": None if model.logits_scale == 1 else model.logits_scale,
        "tie_word_embeddings": model.embedding == "tied",
        "attn_config": {
            "attn_type": shared.get(model.num_kv_heads, "grouped_query_attention"),
            "kv_n_heads": model.kv_heads,
            "alibi": config.position == "alibi",
            "alibi_bias_max": whole(config.position_options.get("alibi_bias_max", 8.0)),
            "clip_qkv": model.clip_qkv or None,
            "qk_ln": model.qk_norm,
            "softmax_scale": model.attention_scale or None,
            "prefix_lm": False,
        },
    }


def unread(config: Config) -> list[str]:
    """Returns the keys that matter and that MPT in transformers 5.24 doesn't read."""
    model, options = config.model, config.position_options
    matters = {
        "alibi": config.position != "alibi",
        "alibi_bias_max": options.get("alibi_bias_max", 8) != 8,
        "attn_type": model.kv_heads != model.num_heads,
        "expansion_ratio": model.feed_forward != 4 * model.width,
        "logit_scale": model.logits_scale != 1,
        "no_bias": model.qkv_bias,
        "norm_type": model.norm == "rms",
        "qk_ln": model.qk_norm,
    }
    return [key for key, needed in matters.items() if needed]


# Replit's flat keys, which are MPT's of an earlier version.
FLAT = {
    **{key: key for key in ("alibi", "alibi_bias_max", "softmax_scale", "prefix_lm")},
    "attn_qk_ln": "qk_ln",
    "attn_clip_qkv": "clip_qkv",
}


def replit_to_ours(hub: HubConfig) -> dict[str, Any]:
    content = {key: value for key, value in hub.content.items() if key not in FLAT}
    plain = not hub.take("low_precision_layernorm", default=True)
    content |= {
        "auto_map": content.get("auto_map", {}),
        "attn_config": {new: hub.content[old] for old, new in FLAT.items() if old in hub.content},
        "expansion_ratio": hub.take("mlp_ratio", "expansion_ratio", default=4),
        "norm_type": "layernorm" if plain else "low_precision_layernorm",
    }
    nested = HubConfig(content)
    nested.ignore("mlp_ratio", "low_precision_layernorm", "attn_impl", "attn_uses_sequence_id")
    nested.ignore("init_gain", "init_nonlinearity", "init_div_is_residual", "fan_mode")
    nested.ignore("param_init_fn", "emb_init_std", "emb_init_uniform_lim")
    settings = to_ours(nested)
    hub.ignore(*hub.content)
    hub.rest |= nested.left()
    return settings


def replit_to_theirs(config: Config) -> dict[str, Any]:
    content = to_theirs(config)
    of_attention = content.pop("attn_config")
    for key in ("norm_type", "layer_norm_epsilon", "norm_eps"):
        content.pop(key)
    return content | {
        "model_type": "replit_lm",
        "low_precision_layernorm": True,
        "mlp_ratio": content.pop("expansion_ratio"),
        **{old: of_attention[new] for old, new in FLAT.items()},
    }


FAMILY = Family(
    "mpt",
    ("MptForCausalLM", "MPTForCausalLM"),
    lambda hub: ENTRIES,
    to_ours,
    to_theirs,
    "transformer.",
    unread=unread,
)
REPLIT_FAMILY = Family(
    "replit",
    ("ReplitLM",),
    lambda hub: REPLIT,
    replit_to_ours,
    replit_to_theirs,
    "transformer.",
    own_code=True,
)
