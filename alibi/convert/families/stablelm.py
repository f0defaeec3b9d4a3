"""StableLM (arXiv 2402.17834): Llama's names, with layer norms and rotary for a share of each head."""

from typing import Any

from alibi.config import Config
from alibi.convert.families import llama
from alibi.convert.families.base import Family, HubConfig


def to_ours(hub: HubConfig) -> dict[str, Any]:
    hub.needs("qk_layernorm", False)  # a norm of its own for each head
    return llama.to_ours(hub, "llama", share=0.25) | {
        "model.norm": "layer",
        "model.norm_epsilon": hub.take("layer_norm_eps", default=1e-5),
        "model.qkv_bias": hub.take("use_qkv_bias", default=False),
        "model.out_bias": False,
        "model.feed_forward_bias": False,
        "model.parallel": hub.take("use_parallel_residual", default=False),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model, content = config.model, llama.to_theirs(config, "llama")
    unread = ("rms_norm_eps", "attention_bias", "mlp_bias", "head_dim")
    return {key: value for key, value in content.items() if key not in unread} | {
        "model_type": "stablelm",
        "partial_rotary_factor": config.position_options.get("share", 1.0),
        "layer_norm_eps": model.norm_epsilon,
        "use_qkv_bias": model.qkv_bias,
        "use_parallel_residual": model.parallel,
    }


FAMILY = Family(
    "stablelm",
    ("StableLmForCausalLM",),
    lambda hub: llama.ENTRIES,
    to_ours,
    to_theirs,
    "model.",
    llama.BUFFERS,
)
