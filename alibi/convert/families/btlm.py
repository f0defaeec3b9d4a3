"""BTLM (arXiv 2309.11568) and Jais (arXiv 2308.16149): GPT-2's names with ALiBi, SwiGLU and scales
of muP.
"""

import functools
from typing import Any

from alibi.config import Config
from alibi.convert.families.base import Family, HubConfig, dense
from alibi.convert.families.gpt2 import BUFFERS, gpt2_entries, sizes, sizes_to_theirs

# c_fc2 is the gate.
ENTRIES = gpt2_entries(*dense("transformer.h.{n}.mlp.c_fc2", "layers_{n}/gate", inputs_first=True))


def to_ours(hub: HubConfig, named: str) -> dict[str, Any]:
    shared = sizes(hub)
    hub.needs("position_embedding_type", "alibi", default="learned")
    hub.needs("activation_function", "swiglu", default="gelu")
    hub.needs("alibi_scaling", None)
    by_dim = hub.take("mup_scale_qk_dot_by_d", "scale_qk_dot_by_d", default=None)
    if by_dim is None and named == "jais":
        raise ValueError(
            "config.json has neither mup_scale_qk_dot_by_d nor scale_qk_dot_by_d, by which Jais's models differ; add "
            "the one that the model was trained with"
        )
    head_dim = shared["model.width"] // shared["model.num_heads"]
    output = hub.take("width_scale", default=None)
    if output is None:
        output = hub.take("mup_output_alpha", default=1.0) * hub.take(
            "mup_width_scale", default=1.0
        )
    hub.ignore("mup_output_alpha", "mup_width_scale")
    return shared | {
        "model.activation": "silu",
        "model.gated": True,
        "model.attention_scale": 1 / head_dim if by_dim else 0.0,
        "model.embedding_scale": float(
            hub.take("mup_embeddings_scale", "embeddings_scale", default=1.0)
        ),
        "model.logits_scale": float(output),
    }


def to_theirs(config: Config, named: str) -> dict[str, Any]:
    model = config.model
    return sizes_to_theirs(config) | {
        "model_type": named,
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
        "scale_qk_dot_by_d": model.attention_scale == 1 / model.head_dim,
        "embeddings_scale": model.embedding_scale,
        "width_scale": model.logits_scale,
    }


def _family(name: str, architecture: str) -> Family:
    ours, theirs = (functools.partial(side, named=name) for side in (to_ours, to_theirs))
    buffers = rf"{BUFFERS}|.*relative_pe\.slopes"
    return Family(
        name,
        (architecture,),
        lambda hub: ENTRIES,
        ours,
        theirs,
        "transformer.",
        buffers,
        own_code=True,
    )


FAMILY, JAIS = _family("btlm", "BTLMLMHeadModel"), _family("jais", "JAISLMHeadModel")
