"""Every position method on books with passkeys: a text names a key and later asks for it.

python scripts/sweep.py --sweep=configs/sweeps/passkey.py --workdir=workdirs/passkey --jobs=0

All are trained at L = 128 with three seeds and equally many updates. The evaluator passkey asks at up to
8 times this length. Methods that change only how a trained model is tested are asked on runs of the
method that they change.
"""

from configs.sweeps import all_methods

LENGTHS = {"multiples": [1, 2, 4, 8]}
SEEDS = (0, 1, 2)
STEPS = 2_000


def get_sweep() -> dict:
    return {
        "title": "Books with keys: train at 128, test up to 1,024",
        "config": "configs/passkey.py",
        "runs": [run(name, seed) for seed in SEEDS for name in all_methods.METHODS],
    }


def run(name: str, seed: int, steps: int = STEPS) -> dict:
    """Returns a run of a method, asked for keys under this method and under further ones."""
    keys = {"position": name, **all_methods.METHODS[name], "seed": seed, "train.steps": steps}
    if keys.get("position_options.slopes") == "random":
        keys["position_options.draw"] = seed
    asked = LENGTHS | {"evaluators": "passkey"}
    others = [asked | {"override": override} for override in all_methods.TESTED_AS.get(name, ())]
    return keys | {"name": f"{name}-seed{seed}", "evaluations": [LENGTHS, asked, *others]}
