"""Every position method, trained at L = 128 with three seeds, tested at up to 16 times this length.

python scripts/sweep.py --sweep=configs/sweeps/all_methods.py --workdir=workdirs/all-methods --jobs=0

The quickstart's model after 3,000 updates. Some methods change only how a trained model is tested, such
as interpolated positions or a sliding window as long as the training sequences. They are tested on runs
of the method that they change. For each, the same tokens' gain from more context is measured too.

T5, FIRE, xPos and YaRN have a length as an option: first the tokens in their source, then, as
"relative", its share of the training length there, which is the default.
"""

SEEDS = (0, 1, 2)
WINDOW = {"window": 128}
# Further tests of a method's runs, by methods with the same parameters.
TESTED_AS = {
    "alibi": ({"position": "alibi_interpolated"}, {"position": "alibi_ntk"}, WINDOW),
    "rotary": (
        {"position": "rotary_interpolated"},
        {"position": "rotary_ntk"},
        {"position": "yarn", "options": {"fast": 32.0}},
        {"position": "yarn", "options": {"fast": 0}},  # in proportion to the training length
        # 1 throughout training
        {"logit_scale": "log_n_beyond"},
        WINDOW,
    ),
    "sinusoidal": (WINDOW,),
}
METHODS = {
    "alibi": {},
    "alibi-learned": {"position": "alibi_learned"},
    "alibi-learned-by-layer": {"position": "alibi_learned", "position_options.per_layer": True},
    # each seed another draw
    "alibi-random": {"position": "alibi", "position_options.slopes": "random"},
    "t5": {"position_options.max_distance": 128},
    "t5-relative": {"position": "t5"},
    "kerple-log": {"position": "kerple_log"},
    "kerple-power": {"position": "kerple_power"},
    "sandwich": {},
    "fire": {"position_options.threshold": 512},
    "fire-relative": {"position": "fire"},
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
    "xpos": {"position_options.scale_base": 512.0},
    "xpos-relative": {"position": "xpos"},
    # below the longest test, and below four times it, as in the source
    "randomised-rotary": {"position": "rotary", "model.max_position": 2048},
    "randomised-rotary-8192": {"position": "rotary", "model.max_position": 8192},
    "rotary-log-n-trained": {"position": "rotary", "model.logit_scale": "log_n"},
    "alibi-ssmax": {"position": "alibi", "model.logit_scale": "ssmax_queries"},
    "alibi-ssmax-logits": {"position": "alibi", "model.logit_scale": "ssmax"},
    "none-log-n": {"position": "none", "model.logit_scale": "log_n_beyond"},
    "none-log-n-trained": {"position": "none", "model.logit_scale": "log_n"},
    "sinusoidal": {},
    "learned": {},
    "none": {},
}


def get_sweep() -> dict:
    return {
        "title": "All position methods: train at 128, test up to 2,048",
        "config": "configs/quickstart.py",
        "runs": [run(name, seed) for seed in SEEDS for name in METHODS],
    }


def run(name: str, seed: int) -> dict:
    """Returns a run of a method with all its tests."""
    keys = {
        "position": name,
        **METHODS[name],
        "seed": seed,
        "train.steps": 3000,
        "data.max_valid_bytes": 262_144,
    }
    if keys.get("position_options.slopes") == "random":
        keys["position_options.draw"] = seed
    lengths = {"multiples": [1, 2, 4, 8, 16], "evaluators": ["perplexity", "context_use"]}
    tested = [lengths | {"override": override} for override in TESTED_AS.get(name, ())]
    return keys | {"name": f"{name}-seed{seed}", "evaluations": [lengths, *tested]}
