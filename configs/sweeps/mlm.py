"""Masked language models trained at 128 tokens, tested to 2,048: position methods that see both
sides.

python scripts/sweep.py --sweep=configs/sweeps/mlm.py --workdir=workdirs/mlm --jobs=2
python scripts/ngram.py --workdirs=workdirs/mlm/runs/none-seed0 --output_dir=workdirs/mlm

ALiBi has the same slopes on both sides, or different ones: fixed, so that a head that is steep before a
token is flat after it, or learned. Learned slopes that both sides share separate the effect of learning
from the effect of two slopes.
"""

FLAT_AFTER_STEEP = "0.00390625:0.015625:0.0625:0.25"  # the paper's four slopes, backwards
VARIANTS = {
    "alibi": {"position": "alibi"},
    "alibi-two-slopes": {
        "position": "alibi",
        "position_options.slopes_after": FLAT_AFTER_STEEP,
    },
    "alibi-learned-slopes": {"position": "alibi_learned"},
    "alibi-two-learned-slopes": {
        "position": "alibi_learned",
        "position_options.slopes_after": "paper",
    },
    "t5": {"position": "t5", "position_options.max_distance": 128},
    **{name: {"position": name} for name in ("rotary", "sinusoidal", "learned", "none")},
}


def get_sweep() -> dict:
    return {
        "title": "Masked language models, trained at 128 tokens",
        "config": "configs/mlm.py",
        "runs": [
            {"name": f"{name}-seed{seed}", "seed": seed, **keys}
            for seed in range(3)
            for name, keys in VARIANTS.items()
        ],
        "multiples": [1, 2, 4, 8, 16],
    }
