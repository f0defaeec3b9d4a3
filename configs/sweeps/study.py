"""What a short-trained model's long context is worth: text with echoes, trained at L = 128 on 8.2M tokens
with three seeds, beside models trained at 512 on as many tokens.

python scripts/sweep.py --sweep=configs/sweeps/study.py --workdir=workdirs/study --jobs=1

results/study/claims.md says what the runs are to decide, and by which tests. All have configs/study.py's
model with 8 heads, so ALiBi has the paper's slopes. Products are of bfloat16, which halves the time on
processors with AMX and gives other digits than float32. The second text's authors wrote nothing in the
train text.
"""

SEEDS = (0, 1, 2)
# the learning rate of each method at each length, as configs/sweeps/study_rates.py found it
RATES: dict[tuple[str, int], float] = {}
RATE = 2e-3
SHARED = {
    "model.num_heads": 8,
    "model.dtype": "bfloat16",
    "train.steps": 2_000,
}
UNSEEN = {"text_file": "data/long-books/unseen.txt"}
SAME_TOKENS = {
    "evaluators": "context_use",
    "lengths": [128, 512, 2_048],
    "context_windows": 1_024,
}
ECHOES = {"evaluators": "echo", "lengths": [512, 2_048], "echoes": 128}
BLOCKS = {"lengths": [128, 512, 2_048]}
MEASURES = (
    {"lengths": [128, 256, 512, 1_024, 2_048], "dump_nll": True},
    BLOCKS | UNSEEN,
    SAME_TOKENS,
    SAME_TOKENS | UNSEEN,
    ECHOES,
)
SLIDING = ({"lengths": [128, 512], "stride": 16, "dump_nll": True},)
# Further tests of a method's runs, by methods with the same parameters.
WINDOW = {"window": 128}
TESTED_AS = {
    "alibi": ({"position": "alibi_ntk"}, WINDOW),
    "rotary": ({"position": "yarn"}, WINDOW),
    "sinusoidal": (WINDOW,),
}
BIASED = ("alibi", "alibi_learned", "kerple_log")
METHODS = ("alibi", "alibi_learned", "kerple_log", "rotary", "sinusoidal")
TRAINED_LONG = ("alibi", "sinusoidal")


def get_sweep() -> dict:
    short = [run(name, 128, seed) for seed in SEEDS for name in METHODS]
    long = [run(name, 512, seed) for seed in SEEDS for name in TRAINED_LONG]
    return {
        "title": "Text with echoes: trained at 128 and at 512, tested up to 2,048",
        "config": "configs/study.py",
        "runs": short + long,
    }


def heads(name: str, lengths: list[int]) -> dict:
    """Returns the measures of a method's heads: their attention, and their bias if they have one."""
    return {"evaluators": ["heads", *["head_bias"] * (name in BIASED)], "lengths": lengths}


def run(name: str, length: int, seed: int) -> dict:
    """Returns a run of a method with all its tests."""
    evaluations = [*MEASURES, heads(name, [128, 512, 2_048])]
    if name == "alibi":
        evaluations += SLIDING
    if length == 128:
        for override in TESTED_AS.get(name, ()):
            tested = {"override": override}
            evaluations += [part | tested for part in (BLOCKS, SAME_TOKENS, ECHOES)]
    return SHARED | {
        "name": f"{name}-L{length}-seed{seed}",
        "position": name,
        "train_length": length,
        "data.echoes": length * 3 // 4,
        "seed": seed,
        "optimizer.learning_rate": RATES.get((name, length), RATE),
        "evaluations": evaluations,
    }
