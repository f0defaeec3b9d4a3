"""Llama, and families with its names: Mistral, Qwen 2 and 3, Gemma, OLMo 2."""

import functools
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
from alibi.positions import known_options

NAMES = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu", "relu": "relu"}

FEED_FORWARD = (
    *dense("model.layers.{n}.mlp.gate_proj", "layers_{n}/gate"),
    *dense("model.layers.{n}.mlp.up_proj", "layers_{n}/up"),
    *dense("model.layers.{n}.mlp.down_proj", "layers_{n}/down"),
)
ENDS = (
    Entry("model.embed_tokens.weight", ("embedding",)),
    *norm("model.layers.{n}.input_layernorm", "layers_{n}/attention_norm"),
    *norm("model.layers.{n}.post_attention_layernorm", "layers_{n}/feed_forward_norm"),
    *norm("model.norm", "final_norm"),
    Entry("lm_head.weight", ("head",)),
)
BUFFERS = r".*rotary_emb\.inv_freq"
ENTRIES = (
    *ENDS,
    *FEED_FORWARD,
    *dense("model.layers.{n}.self_attn.q_proj", *attention("query")),
    *dense("model.layers.{n}.self_attn.k_proj", *attention("key")),
    *dense("model.layers.{n}.self_attn.v_proj", *attention("value")),
    *dense("model.layers.{n}.self_attn.o_proj", *attention("out")),
    *norm("model.layers.{n}.self_attn.q_norm", "layers_{n}/query_norm"),
    *norm("model.layers.{n}.self_attn.k_norm", "layers_{n}/key_norm"),
)
OLMO2 = (
    *(entry for entry in ENTRIES if "layernorm" not in entry.theirs),
    *norm("model.layers.{n}.post_attention_layernorm", "layers_{n}/attention_norm"),
    *norm("model.layers.{n}.post_feedforward_layernorm", "layers_{n}/feed_forward_norm"),
)
# What a family has otherwise than Llama.
UNLIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"model.qkv_bias": True},
    "qwen3": {"model.qk_norm": True},
    "gemma": {"model.norm": "rms_one", "model.embedding_scale": 0.0},
    "olmo2": {"model.norms": "behind", "model.qk_norm": True, "model.qk_norm_joint": True},
}
# By rope_type: the position method, options with other values than its own, and options by key, with defaults.
ROPE: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, float]]]] = {
    "default": ("rotary", {}, {}),
    "linear": ("rotary_interpolated", {}, {}),
    "yarn": ("yarn", {"ramp": "pairs"}, {"fast": ("beta_fast", 32.0), "slow": ("beta_slow", 1.0)}),
    "llama3": (
        "yarn",
        {"ramp": "turns", "temperature": 0.0},
        {"fast": ("high_freq_factor", 4.0), "slow": ("low_freq_factor", 1.0)},
    ),
}
LEARNED = "original_max_position_embeddings"
# Where config.json doesn't say. Other families are untied, with an epsilon of 1e-6.
TIED = {"gemma": True}
EPSILON = {"olmo2": 1e-5}


def sizes(hub: HubConfig, epsilon: float = 1e-6) -> dict[str, Any]:
    """Returns the keys that all families with Llama's names share.

    Args:
      epsilon: for norms, where config.json doesn't say.
    """
    return {
        "train_length": hub.take("max_position_embeddings", "model_max_length"),
        "model.num_layers": hub.take("num_hidden_layers"),
        "model.width": hub.take("hidden_size"),
        "model.num_heads": hub.take("num_attention_heads"),
        "model.feed_forward": hub.take("intermediate_size"),
        "model.gated": True,
        "model.norm": "rms",
        "model.norm_epsilon": hub.take("rms_norm_eps", default=epsilon),
        "model.qkv_bias": False,
        "model.out_bias": False,
        "model.feed_forward_bias": False,
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_ours(hub: HubConfig, named: str, share: float | None = None) -> dict[str, Any]:
    """Returns our keys. `share` is as in `rotary`."""
    keys = sizes(hub, EPSILON.get(named, 1e-6))
    heads, layers = keys["model.num_heads"], keys["model.num_layers"]
    kv_heads = hub.take("num_key_value_heads", default=heads)
    head_dim = hub.take(
        "head_dim", default=128 if named == "qwen3" else 256 if named == "gemma" else None
    )
    own_size = head_dim not in (None, keys["model.width"] / heads)
    attention_bias = hub.take("attention_bias", default=False)
    mlp_bias = hub.take("mlp_bias", default=False)
    activation = hub.choose(
        ACTIVATIONS,
        *(("hidden_activation", "hidden_act") if named == "gemma" else ("hidden_act",)),
        default="gelu_pytorch_tanh" if named == "gemma" else "silu",
    )
    hub.ignore("hidden_act")
    if named == "gemma":  # its code computes the tanh form, whatever the older key says
        activation = "gelu" if activation.startswith("gelu") else activation
    tied = hub.take("tie_word_embeddings", default=TIED.get(named, False))
    return keys | {
        **rotary(hub, share),
        "model.num_kv_heads": 0 if kv_heads == heads else kv_heads,
        "model.head_size": head_dim if own_size else 0,
        "model.activation": activation,
        "model.qkv_bias": attention_bias,
        "model.out_bias": attention_bias,
        "model.feed_forward_bias": mlp_bias,
        "model.embedding": "tied" if tied else "untied",
        "model.window": _windows(hub, layers, named),
        **UNLIKE[named],
    }


def rotary(hub: HubConfig, share: float | None = None, base: float = 1e4) -> dict[str, Any]:
    """Returns the position method and its options. Raises ValueError for forms that are not implemented.

    Args:
      share: share of a head that is rotated, where config.json doesn't say. None means all, and
        another `partial_rotary_factor` is refused.
      base: base of the frequencies, where config.json doesn't say.
    """
    scaling, parameters = (hub.take(key, default={}) for key in ("rope_scaling", "rope_parameters"))
    rope = HubConfig(scaling or parameters)
    kind = rope.choose({name: name for name in ROPE}, "rope_type", "type", default="default")
    position, options, keys = ROPE[kind]
    base = hub.take("rope_theta", default=base)
    options = {"base": float(rope.take("rope_theta", default=base)), **options}
    if kind != "default":
        options["factor"] = float(rope.take("factor"))
    if position == "yarn":
        options["original_length"] = rope.take(LEARNED, default=hub.take("max_position_embeddings"))
    for name, (key, default) in keys.items():
        # In transformers a beta of 0 is the default, too.
        options[name] = float(rope.take(key, default=default) or default)
    if share is None:
        for section in (hub, rope):
            section.needs("partial_rotary_factor", 1.0)
    else:
        share = hub.take("partial_rotary_factor", default=share)
        options["share"] = float(rope.take("partial_rotary_factor", default=share))
    rope.needs("truncate", True)
    rope.ignore("finetuned")
    hub.rest |= {f"rope_parameters.{key}": value for key, value in rope.left().items()}
    return {"position": position} | {f"position_options.{name}": options[name] for name in options}


def rotary_to_theirs(config: Config) -> dict[str, Any]:
    """Returns `rope_theta`, and `rope_scaling` of a method that stretches rotary."""
    options = {**known_options(config.position), **config.position_options}
    content = {"rope_theta": options.get("base", 10_000.0)}
    for kind in ROPE.keys() - {"default"}:
        position, fixed, keys = ROPE[kind]
        if position == config.position and fixed.items() <= options.items():
            rope = {"rope_type": kind, "factor": options["factor"]}
            if position == "yarn":
                rope[LEARNED] = options["original_length"] or config.train_length
            rope |= {key: options[name] for name, (key, _) in keys.items()}
            content["rope_scaling"] = rope
    return content


def _windows(hub: HubConfig, layers: int, named: str) -> int | tuple[int, ...]:
    """Returns one window for all layers, or one for each, as transformers does: there a missing key
    is not null.
    """
    keys: dict[str, Any] = {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": None,
    }
    hub.ignore(*keys)
    keys |= hub.content
    window, kinds = keys["sliding_window"] or 0, keys["layer_types"]
    if named == "mistral":
        if kinds and set(kinds) != {"sliding_attention" if window else "full_attention"}:
            raise ValueError(
                f"config.json asks for layer_types={kinds!r}, which Mistral's own code doesn't read: each of its "
                "layers has sliding_window; remove the key"
            )
        return window
    if not named.startswith("qwen") or not window or not keys["use_sliding_window"]:
        return 0
    if kinds is None:
        first = keys["max_window_layers"]
        kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    each = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return each[0] if len(set(each)) == 1 else each


def to_theirs(config: Config, named: str) -> dict[str, Any]:
    model, windows = config.model, config.model.by_layer("window")
    content = sizes_to_theirs(config) | {
        "model_type": named,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": NAMES[model.activation],
        "attention_bias": model.out_bias,
    }
    content |= rotary_to_theirs(config)
    if named == "llama":
        content["mlp_bias"] = model.feed_forward_bias
    if named == "gemma":
        content["hidden_activation"] = NAMES[model.activation]
    if named in ("mistral", "qwen2", "qwen3"):
        content["sliding_window"] = max(windows) or None
    if named in ("qwen2", "qwen3"):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        content |= {
            "use_sliding_window": any(windows),
            "layer_types": kinds,
            "max_window_layers": 0,
        }
    return content


def sizes_to_theirs(config: Config) -> dict[str, Any]:
    """Returns config.json's keys for `sizes`, and `tie_word_embeddings`."""
    model = config.model
    return {
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": config.train_length,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.embedding == "tied",
        "vocab_size": model.vocab_rows,
    }


def _family(name: str, architecture: str, entries: tuple[Entry, ...]) -> Family:
    ours, theirs = (functools.partial(side, named=name) for side in (to_ours, to_theirs))
    return Family(name, (architecture,), lambda hub: entries, ours, theirs, "model.", BUFFERS)


FAMILIES = tuple(
    _family(name, f"{prefix}ForCausalLM", OLMO2 if name == "olmo2" else ENTRIES)
    for name, prefix in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("gemma", "Gemma"),
        ("olmo2", "Olmo2"),
    )
)
