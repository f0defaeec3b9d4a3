"""The study in a larger model, for one GPU: 25M parameters trained at L = 512 and at 2,048 on 92M tokens,
bfloat16, tested at 512 to 8,192.

bash scripts/gpu_study.sh FOLDER

Each token of the train text is read four times. results/study/claims.md has the questions.
"""

from configs.sweeps import study

RUNS = (
    ("alibi", 512, 0),
    ("alibi", 2_048, 0),
    ("sinusoidal", 2_048, 0),
    ("rotary", 512, 0),
    ("kerple_log", 512, 0),
    ("sinusoidal", 512, 0),
    ("alibi", 2_048, 1),
    ("alibi", 512, 1),
    ("rotary", 512, 1),
)
MODEL = {
    "model.num_layers": 8,
    "model.width": 512,
    "model.num_heads": 8,
    "model.feed_forward": 2_048,
    "model.dtype": "bfloat16",
    "train.batch_tokens": 65_536,
    "train.steps": 1_404,
    "optimizer.learning_rate": 1e-3,
    "eval.every_steps": 1_404,
    "eval.batch_tokens": 131_072,
    "eval.dtype": "bfloat16",  # as the models were trained, and as the fast kernels on GPUs need it
    "checkpoint.every_steps": 1_404,
}
LENGTHS = {"lengths": [512, 1_024, 2_048, 4_096, 8_192]}
# In one process, since each compiles anew.
SCORED = {"evaluators": ["perplexity", "context_use", "echo"], "context_windows": 512}
EVALUATIONS = (
    {"lengths": [512, 2_048, 8_192], **SCORED, "echoes": 64, "dump_nll": True},
    LENGTHS | study.UNSEEN,
)


def get_sweep() -> dict:
    return {
        "title": "25M parameters: trained at 512 and at 2,048, tested up to 8,192",
        "config": "configs/study.py",
        "runs": [run(*one) for one in RUNS],
    }


def run(name: str, length: int, seed: int) -> dict:
    """Returns a run of a method with all its tests."""
    return MODEL | {
        "name": f"{name}-L{length}-seed{seed}",
        "position": name,
        "train_length": length,
        "seed": seed,
        "data.echoes": length * 3 // 4,
        "evaluations": [*EVALUATIONS, study.heads(name, [512, 8_192])],
    }
