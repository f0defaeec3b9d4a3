"""Families on the Hugging Face hub, under the architectures in config.json."""

from collections.abc import Mapping
from typing import Any

from alibi.config.fields import did_you_mean
from alibi.convert.families import baichuan, bloom, btlm, falcon, gpt2, llama, mpt, refact
from alibi.convert.families.base import Entry, Family, HubConfig

__all__ = ["FAMILIES", "Entry", "Family", "HubConfig", "family_of"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(bloom.FAMILY, mpt.FAMILY, mpt.REPLIT_FAMILY, falcon.FAMILY, btlm.FAMILY, btlm.JAIS),
        *(baichuan.FAMILY, refact.FAMILY, gpt2.FAMILY, *llama.FAMILIES),
    )
}


def family_of(content: Mapping[str, Any]) -> Family:
    """Returns the family for a config.json. Raises ValueError, with the known ones, if it has none."""
    by_architecture = {
        name: family for family in FAMILIES.values() for name in family.architectures
    }
    named = content.get("architectures") or [""]
    if named[0] not in by_architecture:
        raise ValueError(
            f"config.json has the architecture {named[0]!r}, which is not known here; "
            f"{did_you_mean(named[0], by_architecture)}there are: {', '.join(by_architecture)}"
        )
    return by_architecture[named[0]]
