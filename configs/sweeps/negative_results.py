"""What the paper tried beside ALiBi: slopes that are trained or drawn at random, and a window for other methods.

python scripts/sweep.py --sweep=configs/sweeps/negative_results.py --workdir=workdirs/negative-results

The quickstart's model, trained at L = 128. A window of 128 tokens changes nothing in its
training; beyond it, no query then meets a key at a distance that it hasn't been trained on.
The paper says that trained slopes extrapolate worse (footnote 11), that random ones work at
times (section 3), and that a window rescues neither sinusoidal nor learned embeddings
(the latter aren't defined beyond their table, so they are not here). Rotary and ALiBi with
a window are for comparison.
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
                    "position_options.draw": draw,
                    "name": f"alibi-random-{draw}",
                }
                for draw in range(3)
            ),
            {"position": "sinusoidal", "name": "sinusoidal"},
            {"position": "sinusoidal", **window, "name": "sinusoidal-window"},
            {"position": "rotary", "name": "rotary"},
            {"position": "rotary", **window, "name": "rotary-window"},
            {"position": "alibi", **window, "name": "alibi-window"},
        ],
        "multiples": [1, 2, 4, 8, 16],
    }
