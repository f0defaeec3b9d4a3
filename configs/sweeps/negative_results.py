"""The paper's other attempts: slopes trained or drawn at random, and a window for other methods.

python scripts/sweep.py --sweep=configs/sweeps/negative_results.py --workdir=workdirs/all-methods

In the paper trained slopes extrapolate worse (footnote 11), random slopes work at times (section 3), and
a window rescues neither sinusoidal nor learned embeddings (the latter aren't defined beyond their table,
so they are not here). A window of 128 tokens changes nothing in training at L = 128. Beyond it, no query
then meets a key at a distance unknown from training. Rotary and ALiBi with a window are for comparison.

configs/sweeps/all_methods.py has these runs too. In one --workdir each is trained once.
"""

from configs.sweeps import all_methods


def get_sweep() -> dict:
    names = (
        "alibi",
        "alibi-learned",
        "alibi-learned-by-layer",
        "alibi-random",
        "sinusoidal",
        "rotary",
    )
    return {
        "title": "Learned and random slopes; a sliding window of 128 tokens",
        "config": "configs/quickstart.py",
        "runs": [all_methods.run(name, seed) for seed in all_methods.SEEDS for name in names],
    }
