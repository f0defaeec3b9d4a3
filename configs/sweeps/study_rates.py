"""The learning rate of configs/sweeps/study.py: four rates for alibi, rotary and sinusoidal, a quarter
of the study's tokens, so that no method loses by a rate that suits another.

python scripts/sweep.py --sweep=configs/sweeps/study_rates.py --workdir=workdirs/study-rates --jobs=1

Sinusoidal at 512 is here too: it is the baseline of the short models.
"""

from configs.sweeps import study

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
MODELS = (("alibi", 128), ("rotary", 128), ("sinusoidal", 128), ("sinusoidal", 512))


def get_sweep() -> dict:
    return {
        "title": "Learning rates of the study, 2M tokens",
        "config": "configs/study.py",
        "runs": [run(*model, rate) for model in MODELS for rate in RATES],
    }


def run(name: str, length: int, rate: float) -> dict:
    """Returns a run, tested at its own length."""
    return study.SHARED | {
        "name": f"{name}-L{length}-rate{rate:g}",
        "position": name,
        "train_length": length,
        "data.echoes": length * 3 // 4,
        "seed": 100,  # none of the study's
        "train.steps": 500,
        "optimizer.learning_rate": rate,
        "data.test": "data/long-books/test.txt",
        # by a text whose results decide nothing else
        "multiples": [1],
        "split": "test",
    }
