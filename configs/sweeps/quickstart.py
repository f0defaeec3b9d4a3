"""Four position methods, trained at L = 128 and tested at up to 16 times that.

python scripts/sweep.py --sweep=configs/sweeps/quickstart.py --workdir=workdirs/quickstart
"""

METHODS = {
    "sinusoidal": {},
    "rotary": {},
    "t5": {"position_options.max_distance": 128},  # as in the paper
    "alibi": {},
}


def get_sweep() -> dict:
    return {
        "title": "Train at 128, test up to 2,048",
        "config": "configs/quickstart.py",
        "runs": [
            {
                "name": f"{name}-L128-seed0",
                "position": name,
                "train_length": 128,
                "seed": 0,
                **options,
            }
            for name, options in METHODS.items()
        ],
        "multiples": [1, 2, 4, 8, 16],
    }
