"""Four position methods, trained at L = 128 and tested at up to 16 times that.

python scripts/sweep.py --sweep=configs/sweeps/quickstart.py --workdir=workdirs/quickstart
"""


def get_sweep() -> dict:
    return {
        "title": "Train at 128, test up to 2,048",
        "config": "configs/quickstart.py",
        "product": {
            "position": ["sinusoidal", "rotary", "t5", "alibi"],
            "train_length": [128],
            "seed": [0],
        },
        "multiples": [1, 2, 4, 8, 16],
    }
