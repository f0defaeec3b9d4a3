"""A family of another codebase's models: its tensors and its config, beside ours."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from alibi.config import Config, ModelConfig, flatten, replaced
from alibi.config.fields import CHANGED
from alibi.config.tree import role_of
from alibi.objectives import make_objective
from alibi.positions import known_options

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

# Keys of any config.json that don't change the logits: about the file, its tokens, training,
# initialization, dropout, transformers' calls, other tasks.
_GENERIC = """
  _name_or_path name_or_path architectures auto_map model_type transformers_version language license
  torch_dtype dtype use_cache torchscript verbose pretraining_tp gradient_checkpointing
  bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id cls_token_id
  mask_token_id tokenizer_class tokenizer_name prefix n_ctx
  initializer_range init_device init_std
  attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop emb_pdrop embed_dropout
  classifier_dropout classifier_dropout_prob resid_dropout
  hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout
  is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder
  output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
  chunk_size_feed_forward _attn_implementation attn_implementation use_bfloat16 tf_legacy_loss
  id2label label2id problem_type finetuning_task task_specific_params
  summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
  temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty do_sample
  early_stopping num_beams num_beam_groups num_return_sequences max_length min_length max_new_tokens
  no_repeat_ngram_size encoder_no_repeat_ngram_size remove_invalid_values
"""
GENERIC = frozenset(_GENERIC.split())
EMPTY: tuple[Any, ...] = (None, "", [], {})
# transformers' names of activations, and ours: its gelu is the exact form, Flax's default the tanh form.
ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
}


class HubConfig:
    """A config.json whose keys are taken one after the other. The others can be listed.

    Args:
      content: its keys and values.
      file: its name in messages.
    """

    def __init__(self, content: Mapping[str, Any], file: str = "config.json"):
        self.content, self.file, self._taken = dict(content), file, set[str]()
        self.rest: dict[str, Any] = {}  # keys that a nested config has left

    def take(self, *names: str, default: Any = ...) -> Any:
        """Returns the first value under one of the `names` that is not null, else `default`.

        Raises:
          ValueError: there is none, and no default.
        """
        self._taken.update(names)
        for name in names:
            if self.content.get(name) is not None:
                return self.content[name]
        if default is ...:
            raise ValueError(f"{self.file} has no {names[0]}, which this architecture needs")
        return default

    def needs(self, name: str, *values: Any, default: Any = ...) -> None:
        """Raises ValueError for other values than `values`. The key may be missing or null."""
        first = values[0] if default is ... else default
        self.choose(dict.fromkeys(values, ""), name, default=first)

    def ignore(self, *names: str) -> None:
        """Marks keys that don't change the logits."""
        self._taken.update(names)

    def choose(self, values: Mapping[Any, str], *names: str, default: Any = ...) -> str:
        """Returns our name for a key's value. Raises ValueError if it has none."""
        got = self.take(*names, default=default)
        if got not in list(values):  # it may be a list
            raise ValueError(
                f"{self.file} asks for {names[0]}={got!r}, which is not implemented here (only "
                f"{', '.join(map(repr, values))})"
            )
        return values[got]

    def left(self) -> dict[str, Any]:
        """Returns the keys that were not taken, without generic and empty ones."""
        return self.rest | {
            name: value
            for name, value in self.content.items()
            if name not in self._taken | GENERIC and value not in EMPTY
        }


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of their tensors, and the parameters in it.

    Attributes:
      theirs: its name. {n} is the layer's number.
      ours: our parameters' paths. Their rows follow each other in the tensor.
      interleaved: our parameters' rows take turns, head by head (BLOOM's queries, keys and values).
      inputs_first: the matrix is `[in, out]` (GPT-2's Conv1D), not `[out, in]`.
    """

    theirs: str
    ours: tuple[str, ...]
    interleaved: bool = False
    inputs_first: bool = False

    def of_layers(self, count: int) -> Iterator["Entry"]:
        """Yields an entry for each layer, or itself if it belongs to none."""
        for n in range(count if "{n}" in self.theirs else 1):
            ours = tuple(path.replace("{n}", str(n)) for path in self.ours)
            yield dataclasses.replace(self, theirs=self.theirs.replace("{n}", str(n)), ours=ours)

    def shape(self, shapes: Shapes) -> Shape:
        """Returns their tensor's shape for our parameters' `shapes`."""
        outputs = [_rows_shape(path, shapes[path]) for path in self.ours]
        rows = (sum(shape[0] for shape in outputs), *outputs[0][1:])
        return rows[::-1] if self.inputs_first else rows

    def to_ours(
        self, tensor: Float[np.ndarray, "..."], shapes: Shapes
    ) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
        """Yields path and values for each of our parameters in their tensor."""
        rows = tensor.T if self.inputs_first else tensor
        outputs = [_rows_shape(path, shapes[path]) for path in self.ours]
        if self.interleaved:
            heads, rest = shapes[self.ours[0]][-2], rows.shape[1:]
            turns = rows.reshape(heads, len(self.ours), -1, *rest)
            arrays = [turns[:, turn].reshape(-1, *rest) for turn in range(len(self.ours))]
        else:
            arrays = np.split(rows, np.cumsum([shape[0] for shape in outputs])[:-1])
        for path, array in zip(self.ours, arrays, strict=True):
            yield path, (array.T if path.endswith("kernel") else array).reshape(shapes[path])

    def to_theirs(self, params: Mapping[str, Any]) -> Float[np.ndarray, "..."]:
        """Returns their tensor for our parameters, the inverse of `to_ours`."""
        arrays = []
        for path in self.ours:
            shape, array = _rows_shape(path, params[path].shape), np.asarray(params[path])
            kernel = path.endswith("kernel")
            arrays.append(array.reshape(shape[::-1]).T if kernel else array.reshape(shape))
        if self.interleaved:
            heads, rest = params[self.ours[0]].shape[-2], arrays[0].shape[1:]
            turns = [array.reshape(heads, 1, -1, *rest) for array in arrays]
            rows = np.concatenate(turns, axis=1).reshape(-1, *rest)
        else:
            rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(rows.T if self.inputs_first else rows)


def _rows_shape(path: str, shape: Shape) -> Shape:
    """Returns a parameter's shape as rows: `[out, in]` for a kernel, `[out]` for a bias."""
    if path.endswith("kernel"):
        inputs = math.prod(shape[: len(shape) - 1 if path.endswith("out/kernel") else 1])
        return math.prod(shape) // inputs, inputs
    return (math.prod(shape),) if path.endswith("bias") else shape


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of another codebase.

    Attributes:
      name: the family's name here.
      architectures: its names in config.json. Of a masked model the second has no head.
      entries: maps config.json to tensors. Those for parameters that the model lacks are ignored.
      to_ours: maps config.json to our keys, and takes each of its keys.
      to_theirs: maps our config to config.json.
      prefix: begins the tensors' names. Some files lack it.
      buffers: matches further tensors' names, which are no parameters.
      tied: names of tensors that may repeat another one, with its name. Defaults to lm_head.weight
        and the first entry.
      untie: the remedy where they differ.
      file: the config's name in messages.
      unread: maps our config to the keys of config.json that the model needs and transformers' own
        code ignores.
      mark: a part of a tensor's name, for families that share architectures. The one without a mark
        is taken if no mark is found.
      masked_head: begins the names of the head's tensors in models of masked tokens. Models without
        it predict the next token.
      kept: matches names of tensors that the model doesn't use. An export writes them again.
      unsaid: our keys that config.json has no words for.
      lengths: keys of config.json with lengths that need not be the training's. An export has the
        import's, or the longer training length.
      own_code: only the code of the model's authors reads its files.
    """

    name: str
    architectures: tuple[str, ...]
    entries: Callable[[HubConfig], tuple[Entry, ...]]
    to_ours: Callable[[HubConfig], dict[str, Any]]
    to_theirs: Callable[[Config], dict[str, Any]]
    prefix: str = ""
    buffers: str = "$^"
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    untie: str = "set tie_word_embeddings to false there"
    file: str = "config.json"
    unread: Callable[[Config], list[str]] = lambda config: []
    mark: str = ""
    masked_head: str = ""
    kept: str = "$^"
    unsaid: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    own_code: bool = False

    def settings(self, content: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns our keys for a config.json.

        Args:
          ignored: keys that are not read.

        Raises:
          ValueError: a key is missing, unknown, or asks for something else than is implemented.
        """
        read = {key: value for key, value in content.items() if key not in ignored}
        hub = HubConfig(read, self.file)
        settings = DEFAULTS | self.to_ours(hub)
        if left := {key: value for key, value in hub.left().items() if key not in ignored}:
            shown = ", ".join(f"{name}={value!r}" for name, value in sorted(left.items()))
            raise ValueError(
                f"config.json has keys that are not known here: {shown}; if they don't change the logits, name them "
                f"in --ignore={','.join(sorted(left))}"
            )
        return settings

    def describe(self, config: Config) -> dict[str, Any]:
        """Returns the config.json for our config.

        Raises:
          ValueError: the family can't say some keys, which the error names.
        """
        objective = make_objective(config)
        if bool(self.masked_head) != (objective.both_sides and not objective.causal) or (
            not self.masked_head and objective.added_tokens
        ):
            predicted = "masked tokens" if self.masked_head else "the next token"
            raise ValueError(
                f"{self.architectures[0]} predicts {predicted}, and this model has "
                f"objective={config.objective.name}"
            )
        has_head = config.model.masked_head
        options = known_options(config.position)
        head = {"model.masked_head": has_head} if self.masked_head else {}
        for name, value in config.position_options.items():
            if isinstance(value, tuple) and isinstance(options.get(name), int | float):
                raise ValueError(
                    f"{self.architectures[0]} can't say position_options.{name}, which differs between layers"
                )
        try:
            content = {
                "architectures": [self.architectures[bool(self.masked_head) and not has_head]],
                **self.to_theirs(config),
            }
            hub = HubConfig(content)
            read = replaced(
                dataclasses.replace(config, position_options={}),
                DEFAULTS | self.to_ours(hub) | head,
            )
        except ValueError as error:
            raise ValueError(f"{self.architectures[0]} can't say this model: {error}") from error
        defaults = {f"position_options.{name}": value for name, value in options.items()}
        ours, said = defaults | flatten(config), defaults | flatten(read)
        if differing := sorted(
            key for key in ours if ours[key] != said.get(key) and key not in self.unsaid
        ):
            shown = "; ".join(
                f"{key} is {ours[key]!r} and would become {said.get(key)!r}" for key in differing
            )
            raise ValueError(f"{self.architectures[0]} can't say this model: {shown}")
        return content


# A family names what it has otherwise.
DEFAULTS: dict[str, Any] = {
    **{
        f"model.{name}": value
        for name, value in vars(ModelConfig()).items()
        if role_of(f"model.{name}") in ("", CHANGED)
    },
    "model.embedding_scale": 1.0,
    "position": "alibi",
}


def dense(theirs: str, *ours: str, **options: Any) -> tuple[Entry, Entry]:
    """Returns the entries for a layer's weight and bias. The names lack "weight" and "kernel"."""
    return (
        Entry(f"{theirs}.weight", tuple(f"{path}/kernel" for path in ours), **options),
        Entry(
            f"{theirs}.bias",
            tuple(f"{path}/bias" for path in ours),
            interleaved=options.get("interleaved", False),
        ),
    )


def norm(theirs: str, ours: str) -> tuple[Entry, Entry]:
    """Returns the entries for a norm's scale and bias."""
    return Entry(f"{theirs}.weight", (f"{ours}/scale",)), Entry(f"{theirs}.bias", (f"{ours}/bias",))


def attention(*names: str) -> tuple[str, ...]:
    """Returns paths in a layer's attention. Defaults to queries, keys and values."""
    return tuple(f"layers_{{n}}/attention/{name}" for name in names or ("query", "key", "value"))


def whole(value: float) -> float | int:
    """Returns a whole number as an int, as transformers wants some keys."""
    return int(value) if value == int(value) else value
