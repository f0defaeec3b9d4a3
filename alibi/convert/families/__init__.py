"""Families on the Hugging Face hub, under the architectures in config.json."""

from collections.abc import Collection, Mapping
from typing import Any

from alibi.convert.families import (
    baichuan,
    bert,
    bloom,
    btlm,
    falcon,
    gpt2,
    gpt_neox,
    llama,
    mpt,
    refact,
    stablelm,
    starcoder2,
)
from alibi.convert.families.base import Entry, Family, HubConfig

__all__ = ["FAMILIES", "Entry", "Family", "HubConfig", "family_of"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(bloom.FAMILY, mpt.FAMILY, mpt.REPLIT_FAMILY, falcon.FAMILY, btlm.FAMILY, btlm.JAIS),
        *(baichuan.FAMILY, refact.FAMILY, gpt2.FAMILY, *llama.FAMILIES),
        *(gpt_neox.FAMILY, starcoder2.FAMILY, stablelm.FAMILY, *bert.FAMILIES),
    )
}


def family_of(content: Mapping[str, Any], names: Collection[str] = ()) -> Family:
    """Returns the family for a config.json and the `names` of its tensors. Raises ValueError, with the
    known architectures, if it has none.
    """
    architectures = list(
        dict.fromkeys(x for family in FAMILIES.values() for x in family.architectures)
    )
    named = content.get("architectures") or [""]
    if named[0] not in architectures:
        raise ValueError(
            f"config.json has the architecture {named[0]!r}, which is not known here; there are: "
            f"{', '.join(architectures)}"
        )
    fitting = [family for family in FAMILIES.values() if named[0] in family.architectures]
    marked = (f for f in fitting if not f.mark or any(f.mark in name for name in names))
    return next(marked)
