"""Four position methods on books in which keys are told and asked for again; then `scripts/passkey.py` of their runs.

python scripts/sweep.py --sweep=configs/sweeps/passkey.py --workdir=workdirs/passkey
python scripts/passkey.py --workdirs=$(ls -d workdirs/passkey/runs/* | paste -sd,) --output_dir=workdirs/passkey
"""


def get_sweep() -> dict:
    return {
        "title": "Books with keys: train at 128, test up to 1,024",
        "config": "configs/passkey.py",
        "product": {"position": ["sinusoidal", "rotary", "t5", "alibi"], "train_length": [128], "seed": [0]},
        "multiples": [1, 2, 4, 8],
    }
