"""A trained model under another position method, or another window, when it is tested."""

import dataclasses
import itertools
from typing import Any

import jax

from alibi.config import Config, replaced
from alibi.config.fields import without_lists
from alibi.config.override import Override
from alibi.model.decoder import UNKNOWN_VOCABULARY, build_model
from alibi.positions import LOGIT_SCALE, PositionMethod, changed_options, method_class


def effective(override: Override, config: Config) -> Override | None:
    """What of `override` differs from the `config` that a run was trained with; None: nothing.

    Options of training, such as rotary's base or ALiBi's slopes, stay where the other method has them too and no others
    are given. So do those of a method inside another one, but `method_options`, if given, replace them all. The result
    has all options that are not the method's defaults, and the defaults that replace options of training, so that it
    says what is tested and is its own `effective`.

    Raises:
      ValueError: an unknown position method.
    """
    position, own = override.position or config.position, dict(config.position_options)
    asked = without_lists(dict(override.options))
    defaults = {LOGIT_SCALE: "", **method_class(position).options()}
    own = _carried(own, config.position, position, asked)
    kept = {name: value for name, value in own.items() if name in defaults and value != defaults[name]}
    given = kept | asked
    options = {name: value for name, value in sorted(given.items()) if name in kept or value != defaults.get(name, ...)}
    same = position == config.position and options == kept
    window = None if override.window == config.model.window else override.window
    if same and window is None:
        return None
    return Override(window=window) if same else Override(position, tuple(options.items()), window)


def _carried(own: dict[str, Any], trained: str, tested: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options of training as the tested method calls them, into a method inside another one and out of it.

    Args:
      own: of the `trained` method.
      given: of the `tested` method, by the user.
    """
    known, outer = method_class(tested).options(), method_class(trained).options() | own
    if trained == tested and given.get("method", outer.get("method")) == outer.get("method"):
        return own
    pairs = outer.get("method_options")
    inside = own if pairs is None else dict(zip(pairs[::2], pairs[1::2], strict=True))
    if not {"method", "method_options"} <= known.keys():
        return own | inside
    defaults = method_class(str((known | own | given)["method"])).options()
    carried = ((name, value) for name, value in sorted(inside.items()) if value != defaults.get(name, value))
    return own | {"method_options": tuple(itertools.chain(*carried))}


def overridden(config: Config, override: Override | None) -> Config:
    """The config of a run as it is tested; nothing is computed.

    Args:
      override: as `effective` gives it.

    Raises:
      ValueError: a position method that needs other parameters than the run has, or would take the run's training
        length for another one that its rotated positions are known from; or an option, a window or a combination that
        the model refuses.
    """
    if override is None:
        return config
    tested = config
    if override.position is not None:
        tested = dataclasses.replace(tested, position=override.position, position_options=dict(override.options))
    if override.window is not None:
        tested = replaced(tested, {"model.window": override.window})
    own, other = (build_model(one, UNKNOWN_VOCABULARY).position for one in (config, tested))
    has, needs = _parameters(own), _parameters(other)
    refused = f"{_named(tested, config)} can't be tested on a run of position={config.position}"
    if has == needs and not own.shares_parameters(other):
        raise ValueError(
            f"{refused}: its position parameters have the same names and shapes, but another meaning; train it from "
            "the start"
        )
    if has != needs:
        raise ValueError(
            f"{refused}: it needs {_told(needs)}, and the checkpoint has {_told(has)}; give a method and options of "
            "the same parameters, or go on training with these by train.py --init_from"
        )
    named, option = f"a run of position={config.position}", "--position_options=original_length"
    other.check_known_length(own.known_length, named, option)
    return tested


def _named(tested: Config, config: Config) -> str:
    """The method that is tested, and where it is that of training the options that differ."""
    if tested.position != config.position:
        return f"position={tested.position}"
    options = changed_options(tested.position, *(one.position_options for one in (config, tested)))
    return f"position={tested.position} with " + ", ".join(f"{name}={now}" for name, (_, now) in options.items())


def _parameters(position: PositionMethod) -> dict[str, tuple[int, ...]]:
    """The shapes of a method's parameters, of those that layers share and of each layer's."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = {"": jax.eval_shape(position.init, key), "layer ": jax.eval_shape(position.init_layer, key)}
    return {
        of + jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for of, params in made.items()
        for path, leaf in jax.tree.leaves_with_path(params)
    }


def _told(parameters: dict[str, tuple[int, ...]]) -> str:
    named = (f"{name} {list(shape)}" for name, shape in parameters.items())
    return f"the position parameters {', '.join(named)}" if parameters else "no position parameters"
