"""BERT, and encoders made from it with symmetric ALiBi: MosaicBERT, DNABERT-2, jina-embeddings-v2."""

import functools
from collections.abc import Callable
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

NAMES = {"gelu_exact": "gelu", "gelu": "gelu_new", "relu": "relu", "silu": "silu"}
LAYER = "bert.encoder.layer.{n}"
QKV = attention()
GATED = tuple(f"layers_{{n}}/{name}" for name in ("gate", "up"))
HEAD, BIAS = "cls.predictions.", "cls.predictions.bias"
# The pooler, and the head for pairs of texts, which BERT's first training left in its files.
POOLER = (
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
)
KEPT = r"(bert\.)?pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"


def bert_entries(*layer: Entry, bias: str = BIAS) -> tuple[Entry, ...]:
    """Returns the tensors that all share, and the others of a `layer`.

    Args:
      bias: the name of the vocabulary's bias.
    """
    return (
        Entry("bert.embeddings.word_embeddings.weight", ("embedding",)),
        Entry("bert.embeddings.token_type_embeddings.weight", ("token_types",)),
        Entry("bert.embeddings.position_embeddings.weight", ("position/table",)),
        *norm("bert.embeddings.LayerNorm", "embedding_norm"),
        *dense(f"{LAYER}.attention.output.dense", *attention("out")),
        *layer,
        *dense(f"{HEAD}transform.dense", "head_dense"),
        *norm(f"{HEAD}transform.LayerNorm", "head_norm"),
        Entry(f"{HEAD}decoder.weight", ("head",)),
        Entry(bias, ("head_bias",)),
    )


SEPARATE = tuple(
    entry
    for path in QKV
    for entry in dense(f"{LAYER}.attention.self.{path.rpartition('/')[2]}", path)
)
AFTER_ATTENTION = norm(f"{LAYER}.attention.output.LayerNorm", "layers_{n}/attention_norm")
BERT = bert_entries(
    *SEPARATE,
    *AFTER_ATTENTION,
    *dense(f"{LAYER}.intermediate.dense", "layers_{n}/up"),
    *dense(f"{LAYER}.output.dense", "layers_{n}/down"),
    *norm(f"{LAYER}.output.LayerNorm", "layers_{n}/feed_forward_norm"),
)
GLU = (
    Entry(f"{LAYER}.mlp.gated_layers.weight", tuple(f"{path}/kernel" for path in GATED)),
    *dense(f"{LAYER}.mlp.wo", "layers_{n}/down"),
    *norm(f"{LAYER}.mlp.layernorm", "layers_{n}/feed_forward_norm"),
)
MOSAIC = bert_entries(
    *dense(f"{LAYER}.attention.self.Wqkv", *QKV),
    *AFTER_ATTENTION,
    *GLU,
    bias=f"{HEAD}decoder.bias",
)
JINA = bert_entries(*SEPARATE, *AFTER_ATTENTION, *GLU)
JINA_QK = bert_entries(
    *SEPARATE,
    *norm(f"{LAYER}.attention.self.layer_norm_q", "layers_{n}/query_norm"),
    *norm(f"{LAYER}.attention.self.layer_norm_k", "layers_{n}/key_norm"),
    *norm(f"{LAYER}.attention.output.LayerNorm", "layers_{n}/attention_output_norm"),
    *norm(f"{LAYER}.layer_norm_1", "layers_{n}/attention_norm"),
    # the gate's rows are last
    Entry(f"{LAYER}.mlp.up_gated_layer.weight", tuple(f"{path}/kernel" for path in GATED[::-1])),
    *dense(f"{LAYER}.mlp.down_layer", "layers_{n}/down"),
    *norm(f"{LAYER}.layer_norm_2", "layers_{n}/feed_forward_norm"),
)


def sizes(hub: HubConfig) -> dict[str, Any]:
    """Returns the keys that all share."""
    hub.needs("is_decoder", False)
    hub.needs("add_cross_attention", False)
    hub.ignore("directionality", "output_past", *POOLER)
    return {
        "train_length": hub.take("max_position_embeddings", default=512),
        "model.num_layers": hub.take("num_hidden_layers"),
        "model.width": hub.take("hidden_size"),
        "model.num_heads": hub.take("num_attention_heads"),
        "model.feed_forward": hub.take("intermediate_size"),
        "model.activation": "gelu_exact",
        "model.norms": "after",
        "model.embedding_norm": True,
        "model.final_norm": False,
        "model.norm_epsilon": hub.take("layer_norm_eps", default=1e-12),
        "model.token_types": hub.take("type_vocab_size", default=2),
        "model.embedding": "tied" if hub.take("tie_word_embeddings", default=True) else "untied",
        "model.vocab_rows": hub.take("vocab_size"),
    }


def bert_to_ours(hub: HubConfig) -> dict[str, Any]:
    hub.needs("position_embedding_type", "absolute")
    rows = hub.take("max_position_embeddings", default=512)
    return sizes(hub) | {
        "position": "learned",
        "position_options.num_positions": rows,  # a shorter training keeps the table
        "model.activation": hub.choose(ACTIVATIONS, "hidden_act", default="gelu"),
    }


def gated_to_ours(hub: HubConfig) -> dict[str, Any]:
    """Returns the keys of the models with GEGLU and ALiBi."""
    hub.needs("hidden_act", "gelu")  # of the head, and so of the gate
    return sizes(hub) | {"model.gated": True, "model.up_bias": False}


def mosaic_to_ours(hub: HubConfig) -> dict[str, Any]:
    hub.needs("layer_norm_eps", 1e-12)  # its head has no other
    hub.ignore("position_embedding_type")  # not read by its code, which has ALiBi alone
    settings = gated_to_ours(hub)
    return settings | {
        "train_length": hub.take("alibi_starting_size", default=settings["train_length"])
    }


def jina_to_ours(hub: HubConfig) -> dict[str, Any]:
    hub.needs("position_embedding_type", "alibi")
    hub.needs("feed_forward_type", "geglu")
    hub.ignore("emb_pooler", "model_max_length")
    return gated_to_ours(hub)


def jina_qk_to_ours(hub: HubConfig) -> dict[str, Any]:
    norms = {"model.norms": "after_twice", "model.qk_norm": True, "model.qk_norm_joint": True}
    return jina_to_ours(hub) | norms


def to_theirs(config: Config, **keys: Any) -> dict[str, Any]:
    """Returns the config.json for our config, with these `keys` too."""
    model = config.model
    return {
        "model_type": "bert",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.feed_forward,
        "hidden_act": NAMES[model.activation],
        "layer_norm_eps": model.norm_epsilon,
        "max_position_embeddings": config.position_options.get("num_positions")
        or config.train_length,
        "type_vocab_size": model.token_types,
        "vocab_size": model.vocab_rows,
        "tie_word_embeddings": model.embedding == "tied",
        **keys,
    }


def mosaic_to_theirs(config: Config) -> dict[str, Any]:
    return to_theirs(config, alibi_starting_size=config.train_length)


def _family(
    name: str,
    prefix: str,
    entries: tuple[Entry, ...],
    to_ours: Callable[[HubConfig], dict[str, Any]],
    to_theirs: Callable[[Config], dict[str, Any]],
    **options: Any,
) -> Family:
    return Family(
        name,
        tuple(f"{prefix}{kind}" for kind in ("ForMaskedLM", "Model", "ForPreTraining")),
        lambda hub: entries,
        to_ours,
        to_theirs,
        prefix="bert.",
        buffers=r"(bert\.)?embeddings\.(position_ids|token_type_ids)",
        tied={
            f"{HEAD}decoder.weight": "bert.embeddings.word_embeddings.weight",
            f"{HEAD}decoder.bias": BIAS,
        },
        masked_head=HEAD,
        kept=KEPT,
        **options,
    )


_JINA = functools.partial(to_theirs, position_embedding_type="alibi", feed_forward_type="geglu")
# ALiBi's models: their lengths are the longest text and a buffer's size, not the length of training,
# and only their authors' code reads them.
_OF_ALIBI: dict[str, Any] = {
    "lengths": ("max_position_embeddings", "alibi_starting_size"),
    "own_code": True,
}
FAMILIES = (
    _family(
        "mosaic_bert", "Bert", MOSAIC, mosaic_to_ours, mosaic_to_theirs, mark="Wqkv", **_OF_ALIBI
    ),
    _family(
        "bert",
        "Bert",
        BERT,
        bert_to_ours,
        functools.partial(to_theirs, position_embedding_type="absolute"),
        unsaid=("train_length", "position_options.num_positions"),
    ),
    _family(
        "jina_bert_qk",
        "JinaBert",
        JINA_QK,
        jina_qk_to_ours,
        _JINA,
        mark="layer_norm_q",
        **_OF_ALIBI,
    ),
    _family("jina_bert", "JinaBert", JINA, jina_to_ours, _JINA, **_OF_ALIBI),
)
