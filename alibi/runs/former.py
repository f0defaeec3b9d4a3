"""Configs saved by earlier versions keep their meaning, and their hash."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from alibi.config import Config
from alibi.config.fields import without_lists
from alibi.config.former import BY_LENGTH, DEFAULTS, VERSION, hashed_scale, present_scale


def saved(config: Config) -> dict[str, Any]:
    """Returns the content of a config as it is saved."""
    return dataclasses.asdict(config) | {"version": VERSION}


def upgraded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a saved config, with former defaults written out and former names
    replaced if it is of an earlier version.
    """
    if content.get("version", 1) >= VERSION:
        return dict(content)
    model = dict(content.get("model", {}))
    if "logit_scale" in model:
        model["logit_scale"] = present_scale(model["logit_scale"])
    options = changed_defaults(content["position"], former=True)
    given = content.get("position_options", {})
    return {**content, "model": model, "position_options": {**options, **given}}


def hashed(position: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config by dotted key as its hash reads them: former defaults are left
    out, as in hashes of earlier versions, and present ones written out.
    """
    found = dict(leaves)
    present = changed_defaults(position, former=False)
    for option, former in changed_defaults(position, former=True).items():
        key = f"position_options.{option}"
        value = without_lists(found.pop(key, present[option]))
        if value != former:
            found[key] = present[option] if value == present[option] else value
    return found | {"model.logit_scale": hashed_scale(found["model.logit_scale"])}


def changed_defaults(position: str, *, former: bool) -> dict[str, Any]:
    """Returns the defaults that changed, former or present, of the options of a config's `position`;
    if it lists methods with different defaults, a value for each.
    """
    if position in DEFAULTS:  # the usual case, in which JAX is not imported
        return dict(DEFAULTS[position]) if former else dict.fromkeys(DEFAULTS[position], BY_LENGTH)
    names, found = position.split(","), dict[str, Any]()
    if not any(":" in name or name in DEFAULTS for name in names):
        return found
    from alibi.positions import method_class

    with contextlib.suppress(ValueError):  # a class that can't be imported can't be computed
        kinds = [method_class(name) for name in names]
        for name, options in DEFAULTS.items():
            for option, before in options.items():
                default = before if former else BY_LENGTH
                # a class of the user's own may take its default from a changed one
                takes = [
                    issubclass(kind, method_class(name)) and kind.options()[option] == BY_LENGTH
                    for kind in kinds
                ]
                values = tuple(
                    default if takes_it else kind.options().get(option, default)
                    for kind, takes_it in zip(kinds, takes, strict=True)
                )
                if any(takes):
                    found[option] = values if len(set(values)) > 1 else values[0]
    return found
