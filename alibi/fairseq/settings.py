"""What a fairseq checkpoint says besides its tensors: heads, position method, rates, updates."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from alibi.fairseq.parameters import Architecture
from alibi.fairseq.unpickle import Record

# Settings without which this project's model is another one than the checkpoint's.
NEEDED = {
    "decoder_normalize_before": True,
    "decoder_learned_pos": False,
    "no_scale_embedding": False,
    "layernorm_embedding": False,
    "character_embeddings": False,
    "base_layers": 0,
}
POSITIONS = ("alibi", "sinusoidal", "none")


class _Absent(enum.Enum):
    ABSENT = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a `transformer_lm`, by this project's names.

    Attributes:
      position: alibi, sinusoidal or none; `position_reason` says by what it is known.
      rates: of dropout, by key of the config's section `model`.
      updates: after how many the checkpoint was saved.
    """

    num_heads: int
    position: str
    position_reason: str
    train_length: int
    activation: str
    rates: dict[str, float]
    seed: int
    updates: int


def read_settings(content: Any, sizes: Architecture) -> Settings:
    """The settings of a checkpoint whose tensors have `sizes`.

    Raises:
      ValueError: a checkpoint that fairseq didn't write, one of another architecture, or one
        whose settings and tensors contradict each other.
    """
    model, common = _sections(content)
    _check_architecture(model)
    _check_sizes(model, sizes)
    position, reason = _position(content, model)
    updates = _updates(content)
    return Settings(
        num_heads=_number(model, "decoder_attention_heads", int),
        position=position,
        position_reason=reason,
        train_length=_number(model, "tokens_per_sample", int),
        activation=str(_get(model, "activation_fn", "relu")),
        rates={
            "dropout": _number(model, "dropout", float),
            "attention_dropout": _number(model, "attention_dropout", float),
            # Older versions know the second name only.
            "activation_dropout": _number(model, "activation_dropout", float)
            or _number(model, "relu_dropout", float, 0.0),
            "softmax_dropout": _number(model, "adaptive_softmax_dropout", float) if sizes.cutoffs else 0.0,
        },
        seed=_number(common, "seed", int),
        updates=updates,
    )


def _sections(content: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of the model and the common ones: of a config, or of the arguments of older versions."""
    config = _get(content, "cfg", None)
    if isinstance(config, Mapping):
        return _section(config, "model"), _section(config, "common")
    arguments = _get(content, "args", None)
    if isinstance(arguments, Mapping):
        return arguments, arguments
    raise ValueError("it has no settings: neither `cfg` nor `args` is there; give the .pt file that fairseq wrote")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = _get(config, name, None)
    if not isinstance(section, Mapping):
        raise ValueError(f"its settings have no section {name!r}; give the .pt file that fairseq wrote")
    return section


def _check_architecture(model: Mapping[str, Any]) -> None:
    name = _get(model, "_name", _get(model, "arch", None))
    if not isinstance(name, str) or not name.startswith("transformer_lm"):
        raise ValueError(
            f"it is of the architecture {name!r}; only fairseq's transformer_lm and its variants can be read"
        )
    for key, needed in NEEDED.items():
        found = _get(model, key, needed)
        if found != needed:
            raise ValueError(f"it was trained with {key}={found!r}; only models with {key}={needed!r} can be read")


def _check_sizes(model: Mapping[str, Any], sizes: Architecture) -> None:
    """Settings and tensors must agree, or tensors are missing at the end."""
    of_tensors: dict[str, Any] = {
        "decoder_layers": sizes.num_layers,
        "decoder_embed_dim": sizes.width,
        "decoder_ffn_embed_dim": sizes.feed_forward,
        "no_decoder_final_norm": not sizes.final_norm,
    }
    if sizes.cutoffs:
        of_tensors["adaptive_softmax_cutoff"] = of_tensors["adaptive_input_cutoff"] = list(sizes.cutoffs)
    for key, found in of_tensors.items():
        said = _get(model, key, found)
        if key.endswith("cutoff"):
            said = _integers(said)
        if said != found:
            raise ValueError(
                f"its settings say {key}={said!r} and its tensors {found!r}: tensors are missing or surplus, "
                "or it is of another architecture"
            )


def _position(content: Any, model: Mapping[str, Any]) -> tuple[str, str]:
    """The paper's fork has no setting for ALiBi, and leaves unused sinusoids in its checkpoints."""
    if isinstance(_get(content, "cfg", None), Mapping) and _get(model, "max_tokens", None) is not None:
        return "alibi", "its model has the setting max_tokens, as in the paper's fork of fairseq alone"
    if _get(model, "no_token_positional_embeddings", False):
        return "none", "its settings say no_token_positional_embeddings"
    return "sinusoidal", "its model lacks the setting max_tokens of the paper's fork of fairseq"


def _updates(content: Any) -> int:
    history = _get(content, "optimizer_history", None)
    updates = _get(history[-1], "num_updates", None) if isinstance(history, list) and history else None
    if type(updates) is not int or updates < 1:
        raise ValueError(f"it was saved after {updates!r} updates (optimizer_history); a trained one has at least 1")
    return updates


def _number(section: Mapping[str, Any], key: str, kind: type, default: Any = _Absent.ABSENT) -> Any:
    value = _get(section, key, default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        said = "nothing of" if value is _Absent.ABSENT else f"{key}={value!r} in place of a number as"
        raise ValueError(f"its settings say {said} {key}; give the .pt file that fairseq wrote")
    return kind(value)  # type: ignore[arg-type]


def _integers(value: Any) -> Any:
    """ "2000,6000" and [2000, 6000] as a list of integers; all else as it is."""
    parts = value.strip("[]()").split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return [int(part) if str(part).strip().isdecimal() else part for part in parts]


def _get(mapping: Any, key: str, default: Any) -> Any:
    """A value by its name, where there is one, without the wrappings of argparse and omegaconf."""
    mapping = _unwrapped(mapping)
    return _unwrapped(mapping[key]) if isinstance(mapping, Mapping) and key in mapping else default


def _unwrapped(value: Any) -> Any:
    """Of a Namespace its attributes, of an omegaconf node its content, of an enum's member its value."""
    for _ in range(4):  # nodes lie in nodes; a pickle may also make an endless chain of them
        if not isinstance(value, Record):
            break
        state = value.state[0] if isinstance(value.state, tuple) and value.state else value.state
        if isinstance(state, Mapping) and state:
            value = next((state[key] for key in ("_content", "_val") if key in state), state)
        elif len(value.args) == 1:
            value = value.args[0]
        else:
            break
    return value
