"""Every position method on books with passkeys: a text names a key and later asks for it.

python scripts/sweep.py --sweep=configs/sweeps/passkey.py --workdir=workdirs/passkey --jobs=0

Trained at L = 128, asked at up to 8 times this length by `scripts/passkey.py`. Methods that change
only the test of a trained model are asked on the runs of the method they change.
"""

from configs.sweeps import all_methods

LENGTHS = {"multiples": [1, 2, 4, 8]}
STEPS = 2_000
# After which these find next to no key in windows of 128 either, where the others find all; KERPLE
# power, FIRE and FoX not after 4,000.
LATE = dict.fromkeys(("sandwich", "rotary-frequencies"), 4000) | dict.fromkeys(
    ("kerple-power", "fire", "fox"), 12_000
)


def get_sweep() -> dict:
    return {
        "title": "Books with keys: train at 128, test up to 1,024",
        "config": "configs/passkey.py",
        "runs": [run(name) for name in all_methods.METHODS],
    }


def run(name: str) -> dict:
    """Returns a run of a method, asked for keys under this method and under further ones."""
    keys = {
        "position": name,
        **all_methods.METHODS[name],
        "seed": 0,
        "train.steps": LATE.get(name, STEPS),
    }
    asked = LENGTHS | {"passkey": True}
    others = [asked | {"override": override} for override in all_methods.TESTED_AS.get(name, ())]
    return keys | {"name": f"{name}-seed0", "evaluations": [LENGTHS, asked, *others]}
