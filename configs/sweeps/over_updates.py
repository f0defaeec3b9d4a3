"""DroPE, SkyLadder and growing windows, each with three seeds, beside the same updates without a change.

python scripts/sweep.py --sweep=configs/sweeps/over_updates.py --workdir=workdirs/over-updates

results/over-updates/claims.md says what is asked, and was written before the runs. `none` has no positions
from the first update on, for DroPE.
"""

SEEDS = (0, 1, 2)
KINDS = {
    "rotary": ("quickstart", {"position": "rotary"}),
    "none": ("quickstart", {"position": "none"}),
    "drope": ("drope", {}),
    "skyladder": ("skyladder", {}),
    "growing": ("growing_window", {}),
}


def get_sweep() -> dict:
    return {
        "title": "Values that change over updates: trained at 128, tested up to 512",
        "config": "configs/quickstart.py",
        "runs": [
            {
                "name": f"{kind}-L128-seed{seed}",
                "config": f"configs/{config}.py",
                "train_length": 128,
                "seed": seed,
                "model.num_layers": 2,
                "train.steps": 400,
                "eval.every_steps": 0,
                "checkpoint.every_steps": 0,
                **keys,
            }
            for seed in SEEDS
            for kind, (config, keys) in KINDS.items()
        ],
        "multiples": [1, 2, 4],
    }
