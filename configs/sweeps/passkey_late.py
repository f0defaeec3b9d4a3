"""The methods that found next to no key after the 2,000 updates of configs/sweeps/passkey.py when they
were first trained, trained for longer: until they find keys, or for 12,000.

python scripts/sweep.py --sweep=configs/sweeps/passkey_late.py --workdir=workdirs/passkey-late --jobs=0
"""

from configs.sweeps import passkey

STEPS = {
    "sandwich": (4_000,),
    "rotary-frequencies": (4_000,),
    "kerple-power": (4_000, 12_000),
    "fire": (4_000, 12_000),
    "fox": (4_000, 12_000),
}


def get_sweep() -> dict:
    return {
        "title": "Books with keys, methods that find them late: train at 128, test up to 1,024",
        "config": "configs/passkey.py",
        "runs": [
            passkey.run(name, seed=0, steps=steps) | {"name": f"{name}-{steps}-seed0"}
            for name, steps_of_method in STEPS.items()
            for steps in steps_of_method
        ],
    }
