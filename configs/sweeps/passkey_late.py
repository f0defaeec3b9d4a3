"""The methods that find keys late, after fewer updates than in configs/sweeps/passkey.py: all of them
after 2,000, where they find next to none, and after 4,000 those that still find none.

python scripts/sweep.py --sweep=configs/sweeps/passkey_late.py --workdir=workdirs/passkey-late --jobs=0
"""

from configs.sweeps import passkey


def get_sweep() -> dict:
    late = [(name, 2_000) for name in passkey.LATE]
    late += [(name, 4_000) for name, steps in passkey.LATE.items() if steps > 4_000]
    return {
        "title": "Books with keys, methods that find them late: train at 128, test up to 1,024",
        "config": "configs/passkey.py",
        "runs": [
            passkey.run(name) | {"train.steps": steps, "name": f"{name}-{steps}-seed0"}
            for name, steps in late
        ],
    }
