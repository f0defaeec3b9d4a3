"""Variants of the quickstart's model, each trained once: layers that differ, positions that depend on
tokens, a sink in attention's denominator, a gate of its output.

python scripts/sweep.py --sweep=configs/sweeps/variants.py --workdir=workdirs/variants --jobs=2
"""

from alibi.config import flatten, read_config
from configs import alibi_none, gemma3, irope, quickstart, rnope_swa


def get_sweep() -> dict:
    default = flatten(read_config(quickstart.get_config()))
    layers = {}
    for module in (rnope_swa, irope, gemma3, alibi_none):
        keys = flatten(read_config(module.get_config()))
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        layers[name] = {key: value for key, value in keys.items() if default.get(key) != value}
    variants = {
        "alibi": {"position": "alibi"},
        "rotary": {"position": "rotary"},
        **layers,
        "pope": {"position": "pope"},
        "selective-rope": {"position": "selective_rope"},
        "alibi-sink": {"position": "alibi", "model.normalizer": "sink"},
        "alibi-gate": {"position": "alibi", "model.attention_gate": True},
    }
    return {
        "title": "Variants of the quickstart's model, trained at 128 tokens",
        "config": "configs/quickstart.py",
        "runs": [
            {"name": name, "train_length": 128, "seed": 0, **keys}
            for name, keys in variants.items()
        ],
        "multiples": [1, 2, 4, 8, 16],
    }
