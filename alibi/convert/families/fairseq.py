"""The paper's own code, a fork of fairseq: a `transformer_lm` with adaptive or tied embeddings."""

import argparse
import itertools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from alibi.convert.families.base import Entry, Family, HubConfig, attention, dense, norm
from alibi.convert.tensors import Model, list_dense, load_pickle

# Packages whose classes fairseq pickles into its settings and meters; they are not imported.
PACKAGES = ("omegaconf", "fairseq", "collections", "enum", "typing", "builtins")
# fairseq's gelu is the exact form; its other two names are the tanh form, Flax's default.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_accurate": "gelu",
    "swish": "silu",
}
# Settings that change the computation, with the only values that the model here has.
REQUIRED = {
    "decoder_normalize_before": True,
    "decoder_learned_pos": False,
    "no_scale_embedding": False,
    "layernorm_embedding": False,
    "character_embeddings": False,
    "base_layers": 0,
}
POSITIONS = ("alibi", "sinusoidal", "none")  # the paper's code has no other
EMBEDDINGS, SOFTMAX = "decoder.embed_tokens", "decoder.adaptive_softmax"
LAYER = "decoder.layers.{n}"
MOST_BANDS = 16

ENTRIES = (
    Entry(f"{EMBEDDINGS}.weight", ("embedding",)),
    *(
        Entry(f"{EMBEDDINGS}.embeddings.{band}.{layer}.weight", (f"adaptive/band_{band}/{ours}",))
        for band in range(MOST_BANDS)
        for layer, ours in enumerate(("embedding", "kernel"))
    ),
    Entry(f"{SOFTMAX}.head.class_proj.weight", ("adaptive/clusters",), inputs_first=True),
    *norm(f"{LAYER}.self_attn_layer_norm", "layers_{n}/attention_norm"),
    *dense(f"{LAYER}.self_attn.q_proj", *attention("query")),
    *dense(f"{LAYER}.self_attn.k_proj", *attention("key")),
    *dense(f"{LAYER}.self_attn.v_proj", *attention("value")),
    *dense(f"{LAYER}.self_attn.out_proj", *attention("out")),
    *norm(f"{LAYER}.final_layer_norm", "layers_{n}/feed_forward_norm"),
    *dense(f"{LAYER}.fc1", "layers_{n}/up"),
    *dense(f"{LAYER}.fc2", "layers_{n}/down"),
    *norm("decoder.layer_norm", "final_norm"),
)
# The input's matrices again, in the softmax.
TIED = {
    "decoder.output_projection.weight": f"{EMBEDDINGS}.weight",
    f"{SOFTMAX}.head.word_proj.weight": f"{EMBEDDINGS}.embeddings.0.0.weight",
    **{
        f"{SOFTMAX}.tail.{band - 1}.{theirs}.weight": f"{EMBEDDINGS}.embeddings.{band}.{layer}.weight"
        for band in range(1, MOST_BANDS)
        for theirs, layer in ((0, 1), (2, 0))
    },
}


class Unread:
    """An object in the pickle with its attributes, without its class."""

    def __new__(cls, *arguments: Any) -> "Unread":
        made = super().__new__(cls)
        vars(made)["_val"] = arguments[0] if arguments else None
        return made


def read_checkpoint(path: pathlib.Path) -> Model:
    """Returns the model in a .pt file. Its config also has the sizes that the tensors show.

    Raises:
      MissingPackageError: PyTorch is not installed.
      ValueError: another file, or another architecture.
    """
    stand_ins = dict.fromkeys(PACKAGES, Unread) | {"argparse.Namespace": argparse.Namespace}
    content = load_pickle(path, stand_ins)
    try:
        tensors = list_dense(content["model"], path)
        saved = _plain(content.get("cfg")) or {"model": _plain(content["args"])}
        config = saved.get("common", {}) | saved["model"] | sizes(tensors)
        config["num_updates"] = _plain(content["optimizer_history"])[-1]["num_updates"]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no model and settings of fairseq ({error}); give the .pt file that fairseq wrote"
        ) from error
    return Model(path, config, tensors)


def _plain(value: Any) -> Any:
    """Returns a setting without the objects of argparse and omegaconf around it."""
    if isinstance(value, Unread):
        return _plain(vars(value).get("_content", vars(value)["_val"]))
    if isinstance(value, argparse.Namespace):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def sizes(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's sizes from its tensors. Raises LookupError for another architecture."""
    bands = [f"{EMBEDDINGS}.embeddings.{band}.0.weight" for band in range(MOST_BANDS)]
    shapes = [tensors[name].shape for name in (*bands, f"{EMBEDDINGS}.weight") if name in tensors]
    return {
        "cutoffs": tuple(itertools.accumulate(shape[0] for shape in shapes[:-1])),
        "vocab_size": sum(shape[0] for shape in shapes),
        "adaptive_factor": max(shapes[0][-1] // shapes[1][-1], 1) if shapes[1:] else 1,
        "decoder_embed_dim": shapes[0][-1],
        "decoder_ffn_embed_dim": tensors["decoder.layers.0.fc1.weight"].shape[0],
        "decoder_layers": sum(bool(re.fullmatch(r".*\.fc1\.weight", name)) for name in tensors),
        "decoder_final_norm": "decoder.layer_norm.weight" in tensors,
    }


def position(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the position method that a checkpoint's settings show, and the setting."""
    # The paper's fork has no setting for ALiBi, and leaves unused sinusoids in its checkpoints. In
    # arguments of older versions, with `arch` in place of `_name`, max_tokens is the batch's.
    if "_name" in settings and settings.get("max_tokens") is not None:
        return (
            "alibi",
            "its model has the setting max_tokens, as in the paper's fork of fairseq alone",
        )
    if settings.get("no_token_positional_embeddings"):
        return "none", "its settings have no_token_positional_embeddings"
    return "sinusoidal", "its model lacks the setting max_tokens of the paper's fork of fairseq"


def to_ours(hub: HubConfig) -> dict[str, Any]:
    name = hub.take("_name", "arch")
    if not str(name).startswith("transformer_lm"):
        raise ValueError(
            f"it is of the architecture {name}; only fairseq's transformer_lm can be read"
        )
    for key, value in REQUIRED.items():
        hub.needs(key, value)
    banded: dict[str, Any] = {}
    if cutoffs := hub.take("cutoffs"):
        banded = {
            "model.embedding": "adaptive",
            "model.cutoffs": cutoffs,
            "model.adaptive_factor": hub.take("adaptive_factor"),
            "model.padding_rows": True,
            "model.softmax_dropout": float(hub.take("adaptive_softmax_dropout")),
        }
    hub.ignore(*hub.content)
    return {
        "seed": hub.take("seed"),
        "train_length": hub.take("tokens_per_sample"),
        "position": position(hub.content)[0],
        "model.num_layers": hub.take("decoder_layers"),
        "model.width": hub.take("decoder_embed_dim"),
        "model.num_heads": hub.take("decoder_attention_heads"),
        "model.feed_forward": hub.take("decoder_ffn_embed_dim"),
        "model.activation": hub.choose(ACTIVATIONS, "activation_fn", default="relu"),
        "model.final_norm": hub.take("decoder_final_norm"),
        "model.norm_epsilon": 1e-5,
        "model.embedding_scale": 0.0,  # sqrt(width)
        "model.initialization": "paper",
        "model.dropout": float(hub.take("dropout")),
        "model.attention_dropout": float(hub.take("attention_dropout")),
        # relu_dropout is the name in older versions
        "model.activation_dropout": float(
            hub.take("activation_dropout", default=0) or hub.take("relu_dropout", default=0)
        ),
        "model.softmax_dropout": 0.0,
        **banded,
    }


FAMILY = Family(
    "fairseq",
    ("transformer_lm",),
    lambda hub: ENTRIES,
    to_ours,
    lambda config: {},  # nothing is written for fairseq
    buffers=r".*\.(_float_tensor|version)",
    tied=TIED,
    untie="only models with tied embeddings and projections can be read (--tie-adaptive-weights "
    "--tie-adaptive-proj)",
    file="cfg",
)
