"""GPT-2: learned positions, and matrices `[in, out]`."""

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


def gpt2_entries(*ours: Entry) -> tuple[Entry, ...]:
    """Returns the tensors that GPT-2, BTLM and Jais share, and `ours`."""
    block = "transformer.h.{n}"
    return (
        Entry("transformer.wte.weight", ("embedding",)),
        *norm(f"{block}.ln_1", "layers_{n}/attention_norm"),
        *dense(f"{block}.attn.c_attn", *attention(), inputs_first=True),
        *dense(f"{block}.attn.c_proj", *attention("out"), inputs_first=True),
        *norm(f"{block}.ln_2", "layers_{n}/feed_forward_norm"),
        *dense(f"{block}.mlp.c_fc", "layers_{n}/up", inputs_first=True),
        *dense(f"{block}.mlp.c_proj", "layers_{n}/down", inputs_first=True),
        *norm("transformer.ln_f", "final_norm"),
        *ours,
    )


def sizes(hub: HubConfig) -> dict[str, Any]:
    """Returns the keys that GPT-2, BTLM and Jais share."""
    width = hub.take("n_embd")
    hub.needs("scale_attn_weights", True)
    hub.needs("scale_attn_by_inverse_layer_idx", False)
    hub.needs("add_cross_attention", False)
    hub.needs("tie_word_embeddings", True)
    hub.ignore("reorder_and_upcast_attn")
    return {
        "train_length": hub.take("n_positions"),
        "model.num_layers": hub.take("n_layer"),
        "model.width": width,
        "model.num_heads": hub.take("n_head"),
        "model.feed_forward": hub.take("n_inner", default=4 * width),
        "model.norm_epsilon": hub.take("layer_norm_epsilon", default=1e-5),
        "model.vocab_rows": hub.take("vocab_size"),
    }


def to_ours(hub: HubConfig) -> dict[str, Any]:
    activation = hub.choose(ACTIVATIONS, "activation_function", default="gelu_new")
    return sizes(hub) | {"position": "learned", "model.activation": activation}


def sizes_to_theirs(config: Config) -> dict[str, Any]:
    """Returns config.json's keys for `sizes`."""
    model = config.model
    return {
        "n_embd": model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.feed_forward,
        "n_positions": config.train_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "vocab_size": model.vocab_rows,
        "tie_word_embeddings": True,
    }


def to_theirs(config: Config) -> dict[str, Any]:
    activation = NAMES.get(config.model.activation, "gelu_new")
    return sizes_to_theirs(config) | {"model_type": "gpt2", "activation_function": activation}


ENTRIES = gpt2_entries(Entry("transformer.wpe.weight", ("position/table",)))
BUFFERS = r".*\.attn\.(bias|masked_bias)"
FAMILY = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    lambda hub: ENTRIES,
    to_ours,
    to_theirs,
    "transformer.",
    BUFFERS,
)
