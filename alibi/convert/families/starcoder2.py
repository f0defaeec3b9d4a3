"""StarCoder 2 (arXiv 2402.19173): Llama's names, with biases, layer norms and no gate."""

from typing import Any

from alibi.config import Config
from alibi.convert.families import llama
from alibi.convert.families.base import ACTIVATIONS, Family, HubConfig, dense

ENTRIES = (
    *(entry for entry in llama.ENTRIES if entry not in llama.FEED_FORWARD),
    *dense("model.layers.{n}.mlp.c_fc", "layers_{n}/up"),
    *dense("model.layers.{n}.mlp.c_proj", "layers_{n}/down"),
)


def to_ours(hub: HubConfig) -> dict[str, Any]:
    hub.needs("mlp_type", "default")
    hub.needs("norm_type", "layer_norm")
    hub.needs("scale_attn_weights", True)
    # its code reads hidden_act and norm_epsilon in place of the first two
    hub.ignore("activation_function", "layer_norm_epsilon")
    hub.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    bias, tied = hub.take("use_bias", default=True), hub.take("tie_word_embeddings", default=True)
    return llama.to_ours(hub, "llama") | {
        "model.gated": False,
        "model.activation": hub.choose(ACTIVATIONS, "hidden_act", default="gelu_pytorch_tanh"),
        "model.norm": "layer",
        "model.norm_epsilon": hub.take("norm_epsilon", default=1e-5),
        "model.qkv_bias": bias,
        "model.out_bias": bias,
        "model.feed_forward_bias": bias,
        "model.embedding": "tied" if tied else "untied",
        "model.window": hub.take("sliding_window", default=0),
    }


def to_theirs(config: Config) -> dict[str, Any]:
    model, content = config.model, llama.to_theirs(config, "llama")
    unread = ("rms_norm_eps", "attention_bias", "mlp_bias")
    return {key: value for key, value in content.items() if key not in unread} | {
        "model_type": "starcoder2",
        "norm_epsilon": model.norm_epsilon,
        "use_bias": model.qkv_bias,
        "sliding_window": max(model.by_layer("window")) or None,
    }


FAMILY = Family(
    "starcoder2",
    ("Starcoder2ForCausalLM",),
    lambda hub: ENTRIES,
    to_ours,
    to_theirs,
    "model.",
    llama.BUFFERS,
)
