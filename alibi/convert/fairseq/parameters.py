"""The parameters of the paper's own code, by its names, as those of this project's model."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from alibi.convert.fairseq.unpickle import shown

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]
Tree = dict[str, Any]

EMBEDDINGS = "decoder.embed_tokens"
SOFTMAX = "decoder.adaptive_softmax"
# Buffers without content: of the device and the format.
NO_PARAMETERS = re.compile(r".*\.(_float_tensor|version)")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes of a `transformer_lm` with adaptive or with plain tied embeddings, as its tensors have them.

    Attributes:
      vocab_size: entries of the dictionary, specials and padding included.
      cutoffs: first id of each band but the first; empty: one tied embedding.
      adaptive_factor: by which the bands get narrower; 1 where there is one band.
      final_norm: a layer norm after the last layer.
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
        """What the config must say, by key of its section `model`."""
        sizes = {key: getattr(self, key) for key in ("num_layers", "width", "feed_forward", "final_norm")}
        always = {"norm_epsilon": 1e-5, "initialization": "paper"}
        if not self.cutoffs:
            return sizes | always | {"embedding": "tied"}
        adaptive = {"cutoffs": self.cutoffs, "adaptive_factor": self.adaptive_factor, "padding_rows": True}
        return sizes | always | {"embedding": "adaptive"} | adaptive


def architecture(tensors: Tensors) -> Architecture:
    """The sizes that `tensors` have; whether all are there and fit is for `to_params` to see.

    The number of heads and the position method leave no trace in them.

    Raises:
      ValueError: tensors that are not those of a decoder language model, or whose bands get wider.
    """
    layers = {int(found[1]) for name in tensors if (found := re.match(r"decoder\.layers\.(\d+)\.", name))}
    bands = sum(name.startswith(f"{EMBEDDINGS}.embeddings.") and name.endswith(".0.weight") for name in tensors)
    embedding = [_matrix(tensors, f"{EMBEDDINGS}.embeddings.{band}.0.weight") for band in range(bands)]
    embedding = embedding or [_matrix(tensors, f"{EMBEDDINGS}.weight")]
    ends = np.cumsum([len(band) for band in embedding]).tolist()
    widths = [band.shape[1] for band in embedding]
    if bands > 1 and widths[1] > widths[0]:
        raise ValueError(
            f"the checkpoint's bands of words are {widths} wide, and each must be narrower than the one before; "
            "it is damaged or of another architecture"
        )
    return Architecture(
        num_layers=len(layers),
        width=widths[0],
        feed_forward=len(_matrix(tensors, "decoder.layers.0.fc1.weight")),
        vocab_size=ends[-1],
        cutoffs=tuple(ends[:-1]),
        adaptive_factor=widths[0] // widths[1] if bands > 1 else 1,
        final_norm="decoder.layer_norm.weight" in tensors,
    )


def to_params(tensors: Tensors, num_heads: int) -> Tree:
    """The parameter tree, float32, of the `DecoderLM` that `architecture(tensors)` describes, with `num_heads`.

    Args:
      tensors: all of the checkpoint's "model", by name; PyTorch's matrices are [out, in].

    Raises:
      ValueError: a tensor that is missing, surplus or of another shape than the others ask
        for; tied tensors that differ; heads that don't divide the width.
    """
    sizes = architecture(tensors)
    if num_heads < 1 or sizes.width % num_heads:
        raise ValueError(f"the checkpoint's width {sizes.width} can't be divided into {num_heads} heads")
    take = _Taker(tensors)
    params = _bands(take, sizes) if sizes.cutoffs else _tied(take, sizes)
    for layer in range(sizes.num_layers):
        params[f"layers_{layer}"] = _layer(take, f"decoder.layers.{layer}", sizes, num_heads)
    if sizes.final_norm:
        params["final_norm"] = _norm(take, "decoder.layer_norm", sizes.width)
    take.check_all_taken()
    return params


class _Taker:
    """Takes tensors by name, each with the shape it must have."""

    def __init__(self, tensors: Tensors):
        self._left = {name: tensor for name, tensor in tensors.items() if not NO_PARAMETERS.fullmatch(name)}

    def __call__(self, name: str, *shape: int) -> Float[np.ndarray, "..."]:
        tensor = _find(self._left, name)
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {name} of the checkpoint has shape {list(tensor.shape)}, the others ask for {list(shape)}; "
                "it is damaged or of another architecture"
            )
        numbers = np.asarray(self._left.pop(name), np.float32)
        wrong = numbers.size - int(np.isfinite(numbers).sum())
        if wrong:
            raise ValueError(
                f"tensor {name} of the checkpoint has {wrong:,} of {numbers.size:,} values that are infinite or no "
                "number; its training diverged, or it is damaged: use an earlier checkpoint"
            )
        return numbers

    def same(self, name: str, tied: Float[np.ndarray, "..."]) -> None:
        """Takes a tensor that is a copy of another one."""
        if not np.array_equal(self(name, *tied.shape), tied):
            raise ValueError(
                f"tensor {name} of the checkpoint differs from the embedding that it should be tied to; only models "
                "with tied embeddings and projections can be read (fairseq: --tie-adaptive-weights --tie-adaptive-proj)"
            )

    def check_all_taken(self) -> None:
        if self._left:
            names = [shown(name)[1:-1] for name in sorted(self._left)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"the checkpoint has tensors that the model has no place for: {', '.join(names[:3])}{more}; "
                "it is of another architecture than fairseq's transformer_lm with pre-layer-norm decoder layers"
            )


def _bands(take: _Taker, sizes: Architecture) -> Tree:
    """Adaptive embeddings, which the checkpoint holds twice."""
    starts, ends = (0, *sizes.cutoffs), (*sizes.cutoffs, sizes.vocab_size)
    adaptive: Tree = {}
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        features = sizes.width // sizes.adaptive_factor**number
        embedding = take(f"{EMBEDDINGS}.embeddings.{number}.0.weight", end - start, features)
        projection = take(f"{EMBEDDINGS}.embeddings.{number}.1.weight", sizes.width, features)
        adaptive[f"band_{number}"] = {"embedding": embedding, "kernel": projection.T}
        if number == 0:
            take.same(f"{SOFTMAX}.head.word_proj.weight", embedding)
        else:
            take.same(f"{SOFTMAX}.tail.{number - 1}.0.weight", projection)
            take.same(f"{SOFTMAX}.tail.{number - 1}.2.weight", embedding)
    adaptive["clusters"] = take(f"{SOFTMAX}.head.class_proj.weight", len(sizes.cutoffs), sizes.width).T
    return {"adaptive": adaptive}


def _tied(take: _Taker, sizes: Architecture) -> Tree:
    embedding = take(f"{EMBEDDINGS}.weight", sizes.vocab_size, sizes.width)
    take.same("decoder.output_projection.weight", embedding)
    return {"embedding": embedding}


def _layer(take: _Taker, prefix: str, sizes: Architecture, num_heads: int) -> Tree:
    width, hidden, heads = (sizes.width,), (sizes.feed_forward,), (num_heads, sizes.width // num_heads)
    attention = f"{prefix}.self_attn"
    return {
        "attention_norm": _norm(take, f"{prefix}.self_attn_layer_norm", sizes.width),
        "attention": {
            "query": _dense(take, f"{attention}.q_proj", width, heads),
            "key": _dense(take, f"{attention}.k_proj", width, heads),
            "value": _dense(take, f"{attention}.v_proj", width, heads),
            "out": _dense(take, f"{attention}.out_proj", heads, width),
        },
        "feed_forward_norm": _norm(take, f"{prefix}.final_layer_norm", sizes.width),
        "up": _dense(take, f"{prefix}.fc1", width, hidden),
        "down": _dense(take, f"{prefix}.fc2", hidden, width),
    }


def _dense(take: _Taker, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Tree:
    kernel = take(f"{name}.weight", math.prod(outputs), math.prod(inputs)).T
    bias = take(f"{name}.bias", math.prod(outputs))
    return {"kernel": kernel.reshape(*inputs, *outputs), "bias": bias.reshape(outputs)}


def _norm(take: _Taker, name: str, width: int) -> Tree:
    return {"scale": take(f"{name}.weight", width), "bias": take(f"{name}.bias", width)}


def _find(tensors: Tensors, name: str) -> Shaped[np.ndarray, "..."]:
    if name not in tensors:
        raise ValueError(f"the checkpoint has no tensor {name}; it is truncated or of another architecture")
    return tensors[name]


def _matrix(tensors: Tensors, name: str) -> Shaped[np.ndarray, "rows columns"]:
    matrix = _find(tensors, name)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"tensor {name} of the checkpoint has shape {list(matrix.shape)}; a matrix is needed")
    return matrix
