"""A trained model tested under another position method, or with other keys of the model."""

import dataclasses
import functools

import jax
from jaxtyping import PyTree

from alibi.config import Config, replaced
from alibi.config.fields import as_text, without_lists
from alibi.config.model import by_layer
from alibi.config.override import MODEL_KEYS, Override
from alibi.model.decoder import UNKNOWN_VOCABULARY, DecoderLM, build_model
from alibi.model.positions import init_position
from alibi.positions import changed_options, known_options


def effective(override: Override, config: Config) -> Override | None:
    """Returns how `override` differs from the trained `config`, or None if it doesn't.

    Trained options, such as rotary's base or ALiBi's slopes, stay if the other method has them, unless
    the override sets them. Idempotent.

    Raises:
      ValueError: an unknown position method.
    """
    position = override.position or config.position
    defaults = known_options(position)
    kept = {
        name: value
        for name, value in config.position_options.items()
        if name in defaults and value != defaults[name]
    }
    options = kept | without_lists(dict(override.options))
    changed = any(
        value != kept.get(name, defaults.get(name, ...)) for name, value in options.items()
    )
    model = {
        key: value
        for key, value in override.model.items()
        if by_layer(f"model.{key}", value, config.model.num_layers) != config.model.by_layer(key)
    }
    if position != config.position or changed:
        return Override(position, tuple(sorted(options.items())), **model)
    return Override(**model) if model else None


def overridden(config: Config, override: Override | None) -> Config:
    """Returns the tested config, and computes nothing.

    Args:
      override: a result of `effective`.

    Raises:
      ValueError: a position method with other parameters, or one that would take the training length
        for the length at which rotations were learned, or a refused option or key.
    """
    if override is None:
        return config
    tested = replaced(config, {f"model.{key}": value for key, value in override.model.items()})
    if override.position is not None:
        tested = dataclasses.replace(
            tested,
            position=override.position,
            position_options=dict(override.options),
            changes=tuple(change for change in config.changes if change[0] == "train_length"),
        )
    trained_model, tested_model = (
        build_model(each, UNKNOWN_VOCABULARY) for each in (config, tested)
    )
    has, needs = position_parameters(trained_model), position_parameters(tested_model)
    refused = f"{_named(tested, config)} can't be tested on a run of position={config.position}"
    pairs = tested_model.method_pairs(trained_model)
    if has == needs and not all(trained.shares_parameters(method) for method, trained in pairs):
        raise ValueError(
            f"{refused}: its position parameters have the same names and shapes, but another meaning; train it from "
            "the start"
        )
    if has != needs:
        needed, there = (
            f"the position parameters {', '.join(names)}" if names else "no position parameters"
            for names in (needs, has)
        )
        raise ValueError(
            f"{refused}: it needs {needed}, and the checkpoint has {there}; give a method and "
            "options of the same parameters, or go on training with these by train.py --init_from"
        )
    for method, trained in pairs:
        method.check_meaning(trained, f"a run of position={config.position}", "--position_options=")
    return tested


def _named(tested: Config, config: Config) -> str:
    """Returns the tested method's name, with changed options and keys if training had it too."""
    if tested.position != config.position:
        return f"position={tested.position}"
    options = changed_options(
        tested.position, *(each.position_options for each in (config, tested))
    )
    changed = [f"{name}={now}" for name, (_, now) in options.items()]
    for key in MODEL_KEYS:
        if (now := tested.model[key]) != config.model[key]:
            changed.append(f"{key}={as_text(now)}")
    return f"position={tested.position} with " + ", ".join(changed)


def position_parameters(model: DecoderLM) -> list[str]:
    """Returns names and shapes of position parameters, shared and for each layer."""
    key, several = jax.eval_shape(lambda: jax.random.key(0)), len(model.methods) > 1
    layers: dict[str, list[int]] = {}
    names = [
        f"{index}/{described}" if several else described
        for index, method in enumerate(model.methods)
        for described in _described(jax.eval_shape(method.init, key))
    ]
    for layer in range(model.config.num_layers):
        kind = model.pattern[layer % len(model.pattern)]
        init = functools.partial(init_position, kind.position, kind.logit_scale)
        for described in _described(jax.eval_shape(init, key)):
            layers.setdefault(described, []).append(layer)
    for described, numbers in layers.items():
        every = len(numbers) == model.config.num_layers
        of = f" of layers {', '.join(map(str, numbers))}"
        names.append(f"layer {described}" if every else described + of)
    return sorted(names)


def _described(params: PyTree) -> list[str]:
    """Returns the name and shape of each parameter."""
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} {list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(params)
    ]
