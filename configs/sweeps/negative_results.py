"""What the paper says does not work (section 3, appendix): trained and random slopes, and a window for the others.

python scripts/sweep.py --sweep=configs/sweeps/negative_results.py --workdir=workdirs/negative-results

The quickstart's model, trained at L = 128. A window of 128 tokens changes nothing in its
training; beyond it, no query then meets a key at a distance that it hasn't been trained on.
"""


def get_sweep() -> dict:
    window = {"model.window": 128}
    return {
        "title": "Learned and random slopes; a sliding window of 128 tokens",
        "config": "configs/quickstart.py",
        "runs": [
            {"position": "alibi", "name": "alibi"},
            {"position": "alibi_learned", "name": "alibi-learned"},
            *(
                {
                    "position": "alibi",
                    "position_options.slopes": "random",
                    "position_options.slopes_seed": seed,
                    "name": f"alibi-random-{seed}",
                }
                for seed in range(3)
            ),
            {"position": "sinusoidal", "name": "sinusoidal"},
            {"position": "sinusoidal", **window, "name": "sinusoidal-window"},
            {"position": "rotary", **window, "name": "rotary-window"},
            {"position": "alibi", **window, "name": "alibi-window"},
        ],
        "multiples": [1, 2, 4, 8, 16],
    }
