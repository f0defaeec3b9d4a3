"""Checkpoints of the paper's own code, a fork of fairseq: sizes, settings and parameters in this
project's names.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from alibi.extras import needs

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]
Tree = dict[str, Any]

EMBEDDINGS = "decoder.embed_tokens"
SOFTMAX = "decoder.adaptive_softmax"
# tensors without content: they mark the device and the format
BUFFERS = re.compile(r".*\.(_float_tensor|version)")
# Packages whose classes fairseq pickles into its settings and meters. They are not imported:
# `_Unread` stands for them.
PICKLED = ("omegaconf", "fairseq", "collections", "enum", "typing", "builtins")
# Settings that change the computation, with the only values that this project's model has.
REQUIRED = {
    "decoder_normalize_before": True,
    "decoder_learned_pos": False,
    "no_scale_embedding": False,
    "layernorm_embedding": False,
    "character_embeddings": False,
    "base_layers": 0,
}
POSITIONS = ("alibi", "sinusoidal", "none")
# fairseq's gelu is the exact form; its other two names are the tanh form, Flax's default.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_accurate": "gelu",
    "swish": "silu",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes of a `transformer_lm` with adaptive or plain tied embeddings, as its tensors have
    them.

    Attributes:
      vocab_size: entries of the dictionary, specials and padding included.
      cutoffs: first id of each band but the first; empty for a plain tied embedding.
      adaptive_factor: ratio of the widths of two neighbouring bands; 1 without bands.
      final_norm: whether a layer norm follows the last layer.
    """

    num_layers: int
    width: int
    feed_forward: int
    vocab_size: int
    cutoffs: tuple[int, ...]
    adaptive_factor: int
    final_norm: bool

    @property
    def config(self) -> dict[str, Any]:
        """The keys of the config's section `model` for this architecture."""
        keys: dict[str, Any] = {
            "num_layers": self.num_layers,
            "width": self.width,
            "feed_forward": self.feed_forward,
            "final_norm": self.final_norm,
            "norm_epsilon": 1e-5,
            "initialization": "paper",
            "embedding": "adaptive" if self.cutoffs else "tied",
        }
        if self.cutoffs:
            keys |= {
                "cutoffs": self.cutoffs,
                "adaptive_factor": self.adaptive_factor,
                "padding_rows": True,
            }
        return keys


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a checkpoint without a trace in its tensors, in this project's names.

    Attributes:
      position: a name from `POSITIONS`; `position_reason` names the setting behind it.
      rates: dropout rates, by key of the config's section `model`.
      updates: number of the update after which the checkpoint was saved.
    """

    num_heads: int
    position: str
    position_reason: str
    train_length: int
    activation: str
    rates: dict[str, float]
    seed: int
    updates: int


class _Unread:
    """An object of the pickle, kept as its arguments and attributes without its class."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> "_Unread":
        made = super().__new__(cls)
        made.arguments = arguments
        return made


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a .pt file, with NumPy arrays under `model`; PyTorch reads it and runs
    nothing of it.

    Raises:
      MissingPackageError: PyTorch is not installed.
      ValueError: a damaged or other file; or a pickle with a class or
        function of another package.
    """
    needs("a fairseq checkpoint", "torch")
    import torch

    file = pathlib.Path(os.path.expanduser(path))
    try:
        stand_ins: list[Any] = [
            (argparse.Namespace if name == "argparse.Namespace" else _Unread, name)
            for name in torch.serialization.get_unsafe_globals_in_checkpoint(file)
            if name == "argparse.Namespace" or name.partition(".")[0] in PICKLED
        ]
        with torch.serialization.safe_globals(stand_ins):
            content = torch.load(file, map_location="cpu", weights_only=True)
        tensors = content["model"]
        content["model"] = {
            name: tensor.detach().float().numpy() for name, tensor in tensors.items()
        }
    except OSError as error:
        raise ValueError(
            f"checkpoint {file} can't be read ({error.strerror or error}); check --checkpoint, or fetch the file again"
        ) from error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"checkpoint {file} holds no tensors under `model`; give the .pt file that fairseq wrote"
        ) from error
    except Exception as error:  # PyTorch raises many classes for a damaged file
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"its pickle names {refused[1]}" if refused else str(error).strip().partition("\n")[0]
        )
        raise ValueError(
            f"checkpoint {file} can't be read by torch.load(weights_only=True): {reason}; "
            "give the .pt file that fairseq wrote"
        ) from error
    return content


def architecture(tensors: Tensors) -> Architecture:
    """Returns the sizes of `tensors`; `to_params` checks for missing and unfitting tensors.

    Raises:
      ValueError: tensors of another architecture.
    """
    layers = {
        int(found[1]) for name in tensors if (found := re.match(r"decoder\.layers\.(\d+)\.", name))
    }
    bands = sum(
        name.startswith(f"{EMBEDDINGS}.embeddings.") and name.endswith(".0.weight")
        for name in tensors
    )
    names = [f"{EMBEDDINGS}.embeddings.{band}.0.weight" for band in range(bands)] or [
        f"{EMBEDDINGS}.weight"
    ]
    for name in (*names, "decoder.layers.0.fc1.weight"):
        if name not in tensors or tensors[name].ndim != 2:
            raise ValueError(f"the checkpoint has no matrix {name}; it is of another architecture")
    ends = np.cumsum([len(tensors[name]) for name in names]).tolist()
    widths = [tensors[name].shape[1] for name in names]
    return Architecture(
        num_layers=len(layers),
        width=widths[0],
        feed_forward=len(tensors["decoder.layers.0.fc1.weight"]),
        vocab_size=ends[-1],
        cutoffs=tuple(ends[:-1]),
        adaptive_factor=max(widths[0] // widths[1], 1) if bands > 1 else 1,
        final_norm="decoder.layer_norm.weight" in tensors,
    )


def read_settings(content: Mapping[str, Any], sizes: Architecture) -> Settings:
    """Returns the settings of the checkpoint `content`, whose tensors have `sizes`.

    Raises:
      ValueError: a missing setting, or a setting beyond this project's model.
    """
    config, arguments = (_plain(content.get(key)) for key in ("cfg", "args"))
    try:
        model, common = (config["model"], config["common"]) if config else (arguments, arguments)
        name = model["_name"] if "_name" in model else model["arch"]
        if not str(name).startswith("transformer_lm"):
            raise ValueError(
                f"it is of the architecture {name}; only fairseq's transformer_lm can be read"
            )
        for key, required in REQUIRED.items():
            if model.get(key, required) != required:
                raise ValueError(
                    f"it was trained with {key}={model[key]}; only {key}={required} can be read"
                )
        activation = model.get("activation_fn", "relu")
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"it has the activation {activation}; only {', '.join(ACTIVATIONS)} can be read"
            )
        # The paper's fork has no setting for ALiBi, and leaves unused sinusoids in its checkpoints.
        if config and model.get("max_tokens") is not None:
            position, reason = (
                "alibi",
                "its model has the setting max_tokens, as in the paper's fork of fairseq alone",
            )
        elif model.get("no_token_positional_embeddings"):
            position, reason = "none", "its settings have no_token_positional_embeddings"
        else:
            position, reason = (
                "sinusoidal",
                "its model lacks the setting max_tokens of the paper's fork of fairseq",
            )
        return Settings(
            num_heads=model["decoder_attention_heads"],
            position=position,
            position_reason=reason,
            train_length=model["tokens_per_sample"],
            activation=ACTIVATIONS[activation],
            rates={
                "dropout": float(model["dropout"]),
                "attention_dropout": float(model["attention_dropout"]),
                # relu_dropout is the name in older versions of fairseq.
                "activation_dropout": float(
                    model.get("activation_dropout") or model.get("relu_dropout") or 0.0
                ),
                "softmax_dropout": float(model["adaptive_softmax_dropout"])
                if sizes.cutoffs
                else 0.0,
            },
            seed=common["seed"],
            updates=_plain(content["optimizer_history"])[-1]["num_updates"],
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"its settings are not fairseq's ({error}); give the .pt file that fairseq wrote"
        ) from error


def _plain(value: Any) -> Any:
    """Returns a setting as dicts, lists and values, without the objects of argparse and omegaconf
    around it.
    """
    if isinstance(value, _Unread):  # a node of omegaconf, or a member of an enumeration
        first = value.arguments[0] if value.arguments else None
        return _plain(
            next((vars(value)[key] for key in ("_content", "_val") if key in vars(value)), first)
        )
    if isinstance(value, argparse.Namespace):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_params(tensors: Tensors, num_heads: int) -> Tree:
    """Returns the parameters, float32, of a `DecoderLM` of the sizes `architecture(tensors)` with
    `num_heads`.

    Args:
      tensors: all tensors under the checkpoint's `model`, by name; PyTorch's matrices are [out,
        in].

    Raises:
      ValueError: a missing or surplus tensor, or a tensor of another shape than the others need;
        tied tensors with different values; infinite values; a number of heads by which the width
        can't be divided.
    """
    sizes = architecture(tensors)
    if num_heads < 1 or sizes.width % num_heads:
        raise ValueError(
            f"the checkpoint's width {sizes.width} can't be divided into {num_heads} heads"
        )
    take = _Taker(tensors)
    if sizes.cutoffs:
        params: Tree = {"adaptive": _adaptive(take, sizes)}
    else:
        params = {"embedding": take(f"{EMBEDDINGS}.weight", sizes.vocab_size, sizes.width)}
        take.tied("decoder.output_projection.weight", params["embedding"])
    for layer in range(sizes.num_layers):
        params[f"layers_{layer}"] = _layer(take, f"decoder.layers.{layer}", sizes, num_heads)
    if sizes.final_norm:
        params["final_norm"] = take.norm("decoder.layer_norm", sizes.width)
    if take.left:
        names = ", ".join(sorted(take.left)[:3])
        raise ValueError(
            f"the checkpoint has {len(take.left)} tensors that the model has no place for, such as {names}; "
            "it is of another architecture than fairseq's transformer_lm with pre-layer-norm decoder layers"
        )
    return params


class _Taker:
    """Takes tensors by name, and checks the shape of each."""

    def __init__(self, tensors: Tensors):
        self.left = {
            name: tensor for name, tensor in tensors.items() if not BUFFERS.fullmatch(name)
        }

    def __call__(self, name: str, *shape: int) -> Float[np.ndarray, "..."]:
        if name not in self.left:
            raise ValueError(f"the checkpoint has no tensor {name}; it is of another architecture")
        tensor = np.asarray(self.left.pop(name), np.float32)
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name} of the checkpoint has shape {list(tensor.shape)}, the others need {list(shape)}; "
                "it is of another architecture"
            )
        if not np.isfinite(tensor).all():
            raise ValueError(
                f"tensor {name} of the checkpoint has values that are not finite: its training diverged; "
                "use an earlier checkpoint"
            )
        return tensor

    def tied(self, name: str, tensor: Float[np.ndarray, "..."]) -> None:
        """Takes a tensor, which must equal `tensor`: the model uses one array in both places."""
        if not np.array_equal(self(name, *tensor.shape), tensor):
            raise ValueError(
                f"tensor {name} of the checkpoint differs from the embedding that it should be tied to; only models "
                "with tied embeddings and projections can be read (fairseq: --tie-adaptive-weights --tie-adaptive-proj)"
            )

    def dense(self, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Tree:
        kernel = self(f"{name}.weight", math.prod(outputs), math.prod(inputs)).T
        bias = self(f"{name}.bias", math.prod(outputs))
        return {"kernel": kernel.reshape(*inputs, *outputs), "bias": bias.reshape(outputs)}

    def norm(self, name: str, width: int) -> Tree:
        return {"scale": self(f"{name}.weight", width), "bias": self(f"{name}.bias", width)}


def _adaptive(take: _Taker, sizes: Architecture) -> Tree:
    """Takes the adaptive embeddings, which the checkpoint holds twice: at the input and in the
    softmax.
    """
    starts, ends = (0, *sizes.cutoffs), (*sizes.cutoffs, sizes.vocab_size)
    adaptive: Tree = {}
    for band, (start, end) in enumerate(zip(starts, ends, strict=True)):
        features = sizes.width // sizes.adaptive_factor**band
        embedding = take(f"{EMBEDDINGS}.embeddings.{band}.0.weight", end - start, features)
        projection = take(f"{EMBEDDINGS}.embeddings.{band}.1.weight", sizes.width, features)
        adaptive[f"band_{band}"] = {"embedding": embedding, "kernel": projection.T}
        if band == 0:
            take.tied(f"{SOFTMAX}.head.word_proj.weight", embedding)
        else:
            take.tied(f"{SOFTMAX}.tail.{band - 1}.0.weight", projection)
            take.tied(f"{SOFTMAX}.tail.{band - 1}.2.weight", embedding)
    adaptive["clusters"] = take(
        f"{SOFTMAX}.head.class_proj.weight", len(sizes.cutoffs), sizes.width
    ).T
    return adaptive


def _layer(take: _Taker, prefix: str, sizes: Architecture, num_heads: int) -> Tree:
    """Takes the parameters of one decoder layer."""
    width, hidden, heads = (
        (sizes.width,),
        (sizes.feed_forward,),
        (num_heads, sizes.width // num_heads),
    )
    attention = f"{prefix}.self_attn"
    return {
        "attention_norm": take.norm(f"{prefix}.self_attn_layer_norm", sizes.width),
        "attention": {
            "query": take.dense(f"{attention}.q_proj", width, heads),
            "key": take.dense(f"{attention}.k_proj", width, heads),
            "value": take.dense(f"{attention}.v_proj", width, heads),
            "out": take.dense(f"{attention}.out_proj", heads, width),
        },
        "feed_forward_norm": take.norm(f"{prefix}.final_layer_norm", sizes.width),
        "up": take.dense(f"{prefix}.fc1", width, hidden),
        "down": take.dense(f"{prefix}.fc2", hidden, width),
    }
