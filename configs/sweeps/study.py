"""What a short-trained model's long context is worth: text with echoes, trained at L = 128 on 8.2M tokens
with three seeds, beside models trained at 512 on as many tokens.

python scripts/sweep.py --sweep=configs/sweeps/study.py --workdir=workdirs/study --jobs=1

results/study/claims.md says what the runs are to decide, and by which tests. All have configs/study.py's
model with 8 heads, so ALiBi has the paper's slopes. Products are of bfloat16, which halves the time on
processors with AMX and gives other digits than float32. The second text's authors wrote nothing in the
train text.
"""

SEEDS = (0, 1, 2)
RATE = 4e-3  # the best of four for each model of configs/sweeps/study_rates.py
SHARED = {
    "model.num_heads": 8,
    "model.dtype": "bfloat16",
    "train.steps": 2_000,
}
UNSEEN = {"text_file": "data/long-books/unseen.txt"}
SAME_TOKENS = {"evaluators": "context_use", "lengths": [128, 512], "context_windows": 1_024}
FAR_TOKENS = {"evaluators": "context_use", "lengths": [128, 2_048], "context_windows": 256}
ECHO = {"evaluators": "echo", "echoes": 128}
FAR_ECHO = ECHO | {"lengths": [2_048], "echo_gap": 1_024}
BLOCKS = {"lengths": [128, 512, 2_048]}
MEASURES = (
    {"lengths": [128, 256, 512, 1_024, 2_048], "dump_nll": True},
    BLOCKS | UNSEEN,
    SAME_TOKENS,
    SAME_TOKENS | UNSEEN,
    FAR_TOKENS,
    ECHO | {"lengths": [512]},
    ECHO | {"lengths": [2_048], "echo_gap": 256},
    FAR_ECHO,
)
SLIDING = ({"lengths": [128, 512], "stride": 32, "dump_nll": True},)
# Further tests of a method's runs, by methods with the same parameters.
WINDOW = {"window": 128}
TESTED_AS = {
    "alibi": ({"position": "alibi_ntk"}, WINDOW),
    "rotary": ({"position": "yarn"}, WINDOW),
    "sinusoidal": (WINDOW,),
}
BIASED = ("alibi", "alibi_learned", "kerple_log")
# Seed by seed in this order, so that the models of a seed, which are compared, share a processor.
MODELS = (
    ("alibi", 128),
    ("sinusoidal", 128),
    ("alibi", 512),
    ("sinusoidal", 512),
    ("rotary", 128),
    ("kerple_log", 128),
    ("alibi_learned", 128),
)


def get_sweep() -> dict:
    return {
        "title": "Text with echoes: trained at 128 and at 512, tested up to 2,048",
        "config": "configs/study.py",
        "runs": [run(*model, seed) for seed in SEEDS for model in MODELS],
    }


def heads(name: str, lengths: list[int]) -> dict:
    """Returns the measures of a method's heads: their attention, and their bias if they have one."""
    return {"evaluators": ["heads", *["head_bias"] * (name in BIASED)], "lengths": lengths}


def run(name: str, length: int, seed: int) -> dict:
    """Returns a run of a method with all its tests."""
    evaluations = [*MEASURES, heads(name, [128, 512, 2_048])]
    if length == 128:
        evaluations += SLIDING * (name == "alibi")
        for override in TESTED_AS.get(name, ()):
            evaluations += [
                evaluation | {"override": override} for evaluation in (BLOCKS, FAR_ECHO)
            ]
    return SHARED | {
        "name": f"{name}-L{length}-seed{seed}",
        "position": name,
        "train_length": length,
        "data.echoes": length * 3 // 4,
        "seed": seed,
        "eval.dtype": "bfloat16",
        "optimizer.learning_rate": RATE,
        "evaluations": evaluations,
    }
