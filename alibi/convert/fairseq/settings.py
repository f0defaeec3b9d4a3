"""What a fairseq checkpoint says besides its tensors: heads, position method, rates, updates."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from alibi.config.ranges import RANGES
from alibi.convert.fairseq.parameters import Architecture
from alibi.convert.fairseq.unpickle import Record, shown

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
# fairseq's gelu is the exact form, and its other two names are the tanh form that is Flax's default.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu_exact", "gelu_fast": "gelu", "gelu_accurate": "gelu", "swish": "silu"}
SEED = RANGES["seed"]
MOST = 2**31 - 1  # of updates and lengths, which are int32 in training
_ABSENT: Any = object()

Section = Mapping[str, Any]
Number = TypeVar("Number", int, float)


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
    activation = _get(model, "activation_fn", "relu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"it has the activation {shown(activation)}; only {', '.join(ACTIVATIONS)} can be read")
    return Settings(
        num_heads=_count(model, "decoder_attention_heads"),
        position=position,
        position_reason=reason,
        train_length=_count(model, "tokens_per_sample"),
        activation=ACTIVATIONS[activation],
        rates={
            "dropout": _rate(model, "dropout"),
            "attention_dropout": _rate(model, "attention_dropout"),
            # Older versions know the second name only.
            "activation_dropout": _rate(model, "activation_dropout", 0.0) or _rate(model, "relu_dropout", 0.0),
            "softmax_dropout": _rate(model, "adaptive_softmax_dropout") if sizes.cutoffs else 0.0,
        },
        seed=_number(common, "seed", int, lambda seed: not SEED.complaint(seed), SEED.words),
        updates=_updates(content),
    )


def _sections(content: Any) -> tuple[Section, Section]:
    """The settings of the model and the common ones: of a config, or of the arguments of older versions."""
    config = _get(content, "cfg", None)
    if isinstance(config, Mapping):
        return _section(config, "model"), _section(config, "common")
    arguments = _get(content, "args", None)
    if isinstance(arguments, Mapping):
        return arguments, arguments
    raise ValueError("it has no settings: neither `cfg` nor `args` is there; give the .pt file that fairseq wrote")


def _section(config: Section, name: str) -> Section:
    section = _get(config, name, None)
    if not isinstance(section, Mapping):
        raise ValueError(f"its settings have no section {name!r}; give the .pt file that fairseq wrote")
    return section


def _check_architecture(model: Section) -> None:
    name = _get(model, "_name", _get(model, "arch", None))
    if not isinstance(name, str) or not name.startswith("transformer_lm"):
        raise ValueError(
            f"it is of the architecture {shown(name)}; only fairseq's transformer_lm and its variants can be read"
        )
    for key, needed in NEEDED.items():
        found = _get(model, key, needed)
        if found != needed:
            raise ValueError(f"it was trained with {key}={shown(found)}; only models with {key}={needed!r} can be read")


def _check_sizes(model: Section, sizes: Architecture) -> None:
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
                f"its settings say {key}={shown(said)} and its tensors {shown(found)}: tensors are missing or surplus, "
                "or it is of another architecture"
            )


def _position(content: Any, model: Section) -> tuple[str, str]:
    """The paper's fork has no setting for ALiBi, and leaves unused sinusoids in its checkpoints."""
    if isinstance(_get(content, "cfg", None), Mapping) and _get(model, "max_tokens", None) is not None:
        return "alibi", "its model has the setting max_tokens, as in the paper's fork of fairseq alone"
    if _get(model, "no_token_positional_embeddings", False):
        return "none", "its settings say no_token_positional_embeddings"
    return "sinusoidal", "its model lacks the setting max_tokens of the paper's fork of fairseq"


def _updates(content: Any) -> int:
    history = _get(content, "optimizer_history", None)
    updates = _get(history[-1], "num_updates", None) if isinstance(history, list) and history else None
    if type(updates) is not int or not 1 <= updates <= MOST:
        raise ValueError(
            f"it was saved after {shown(updates)} updates (optimizer_history); a trained one has from 1 to {MOST:,}"
        )
    return updates


def _count(section: Section, key: str) -> int:
    return _number(section, key, int, lambda count: 1 <= count <= MOST, f"from 1 to {MOST:,}")


def _rate(section: Section, key: str, default: Any = _ABSENT) -> float:
    return _number(section, key, float, lambda rate: 0 <= rate < 1, "from 0 to below 1", default)


def _number(
    section: Section, key: str, kind: type[Number], is_right: Callable[[Any], bool], right: str, default: Any = _ABSENT
) -> Number:
    value = _get(section, key, default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        said = "nothing of" if value is _ABSENT else f"{key}={shown(value)} in place of a number as"
        raise ValueError(f"its settings say {said} {key}; give the .pt file that fairseq wrote")
    if not is_right(value):
        raise ValueError(f"its settings say {key}={shown(value)}, which must be {right}; it is damaged")
    return kind(value)


def _integers(value: Any) -> Any:
    """ "2000,6000" and [2000, 6000] as a list of integers; all else as it is."""
    parts = value.strip("[]()").split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return [int(part) if isinstance(part, str) and part.strip().isdecimal() else part for part in parts]


def _get(mapping: Any, key: str, default: Any) -> Any:
    """A value by its name, where there is one, without the wrappings of argparse and omegaconf."""
    mapping = _unwrapped(mapping)
    return _unwrapped(mapping[key]) if isinstance(mapping, Mapping) and key in mapping else default


def _unwrapped(value: Any) -> Any:
    """The attributes of a Namespace, the content of an omegaconf node, the value of an enum's member."""
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
