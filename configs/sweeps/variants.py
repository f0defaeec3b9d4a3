"""Variants of the quickstart's model, each trained once: layers that differ, positions that depend on
tokens, a sink in attention's denominator, a gate on its output.

python scripts/sweep.py --sweep=configs/sweeps/variants.py --workdir=workdirs/variants --jobs=2
"""

VARIANTS = {
    "alibi": {"position": "alibi"},
    "rotary": {"position": "rotary"},
    "rnope-swa": {"config": "configs/rnope_swa.py"},
    "irope": {"config": "configs/irope.py"},
    "gemma3": {"config": "configs/gemma3.py"},
    "alibi-none": {"config": "configs/alibi_none.py"},
    "pope": {"position": "pope"},
    "selective-rope": {"position": "selective_rope"},
    "alibi-sink": {"position": "alibi", "model.normalizer": "sink"},
    "alibi-gate": {"position": "alibi", "model.attention_gate": True},
}


def get_sweep() -> dict:
    return {
        "title": "Variants of the quickstart's model, trained at 128 tokens",
        "config": "configs/quickstart.py",
        "runs": [
            {"name": name, "train_length": 128, "seed": 0, **keys}
            for name, keys in VARIANTS.items()
        ],
        "multiples": [1, 2, 4, 8, 16],
    }
