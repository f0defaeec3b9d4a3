"""Baichuan and Baichuan 2 (arXiv 2309.10305): Llama's layers with ALiBi (13B) or rotary positions
(7B). The second version's head has rows of norm 1.
"""

from typing import Any

from alibi.config import Config
from alibi.convert.families.base import Family, HubConfig, attention, dense
from alibi.convert.families.llama import ENDS, FEED_FORWARD, sizes, sizes_to_theirs

ENTRIES = (
    *ENDS,
    *FEED_FORWARD,
    *dense("model.layers.{n}.self_attn.W_pack", *attention()),
    *dense("model.layers.{n}.self_attn.o_proj", *attention("out")),
)
VOCABULARY_2 = 125_696  # tokens of Baichuan 2


def to_ours(hub: HubConfig) -> dict[str, Any]:
    # Only the 7B models, which are rotary, have a bound of positions.
    rotary = "max_position_embeddings" in hub.content
    second = hub.content.get("vocab_size") == VOCABULARY_2 or "z_loss_weight" in hub.content
    keys = sizes(hub)
    hub.needs("hidden_act", "silu")
    hub.needs("tie_word_embeddings", False)
    hub.ignore("z_loss_weight", "model_max_length")
    position = {"position": "rotary", "position_options.base": 10_000.0} if rotary else {}
    return keys | {
        **position,
        "model.activation": "silu",
        "model.embedding": "normalised" if second else "untied",
    }


def to_theirs(config: Config) -> dict[str, Any]:
    content = sizes_to_theirs(config) | {"model_type": "baichuan", "hidden_act": "silu"}
    content["tie_word_embeddings"] = False
    if config.position != "rotary":
        content["model_max_length"] = content.pop("max_position_embeddings")
    if config.model.embedding == "normalised":
        content["z_loss_weight"] = 0
    return content


FAMILY = Family(
    "baichuan",
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    lambda hub: ENTRIES,
    to_ours,
    to_theirs,
    "model.",
    r".*rotary_emb\.inv_freq",
    own_code=True,
)
