"""Every position method, trained at L = 128 with three seeds, tested at up to 16 times that.

python scripts/sweep.py --sweep=configs/sweeps/all_methods.py --workdir=workdirs/all-methods --jobs=0

The quickstart's model after 3,000 updates. Methods that only change how a trained model is tested, such as
interpolated positions, are tested on the runs of the method that they change. Each is also measured by what
the same tokens gain from more context.
"""

SEEDS = (0, 1, 2)
# What else a run of a method is tested as; these have the parameters that it was trained with.
TESTED_AS = {
    "alibi": ("alibi_interpolated", "alibi_ntk"),
    "rotary": ("rotary_interpolated", "rotary_ntk", "yarn"),
}
METHODS = {
    "alibi": {},
    "alibi-learned": {"position": "alibi_learned"},
    "alibi-learned-by-layer": {"position": "alibi_learned", "position_options.per_layer": True},
    "t5": {},
    "kerple-log": {"position": "kerple_log"},
    "kerple-power": {"position": "kerple_power"},
    "sandwich": {},
    "fire": {},
    "fox": {},
    "shaw": {"position_options.max_distance": 64},
    "deberta": {},
    "rotary": {},
    "rotary-partial": {"position": "rotary", "position_options.share": 0.25},
    "rotary-frequencies": {
        "position": "rotary",
        "position_options.share": 0.75,
        "position_options.share_of": "frequencies",
    },
    "xpos": {},
    "randomised-rotary": {"position": "randomised"},
    "rotary-log-n": {"position": "rotary", "position_options.logit_scale": "log_n"},
    "alibi-ssmax": {"position": "alibi", "position_options.logit_scale": "ssmax"},
    "none-log-n": {"position": "none", "position_options.logit_scale": "log_n"},
    "sinusoidal": {},
    "learned": {},
    "none": {},
}


def get_sweep() -> dict:
    lengths = {"multiples": [1, 2, 4, 8, 16], "context_use": True}
    runs = []
    for seed in SEEDS:
        for name, keys in METHODS.items():
            tested = [lengths | {"override": {"position": other}} for other in TESTED_AS.get(name, ())]
            run = {"position": name, **keys, "seed": seed, "train.steps": 3000, "data.max_valid_bytes": 262_144}
            runs.append(run | {"name": f"{name}-seed{seed}", "evaluations": [lengths, *tested]})
    return {
        "title": "All position methods: train at 128, test up to 2,048",
        "config": "configs/quickstart.py",
        "runs": runs,
    }
