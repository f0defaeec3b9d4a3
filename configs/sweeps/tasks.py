"""Flip-flop, copy and recall: four position methods trained at L = 64 with three seeds, tested at up to
16 times this length.

python scripts/sweep.py --sweep=configs/sweeps/tasks.py --workdir=workdirs/tasks --jobs=2

results/tasks/claims.md says what is asked, and was written before the runs.
"""

SEEDS = (0, 1, 2)
METHODS = ("alibi", "kerple_log", "rotary", "none")
STEPS = {"flip_flop": 200, "copy": 600, "recall_few": 1000}  # updates of 1,024 tokens
TASK_EVALUATIONS = {
    "multiples": [1, 2, 4, 8, 16],
    "evaluators": ["task", "task_gaps"],
    "examples": 100,
}


def get_sweep() -> dict:
    return {
        "title": "Flip-flop, copy and recall: train at 64, test up to 1,024",
        "config": "configs/task.py",
        "runs": [
            {
                "name": f"{task}-{position}-seed{seed}",
                "data.task": task,
                "position": position,
                "seed": seed,
                "train_length": 64,
                "model.num_layers": 2,
                "model.num_heads": 8,
                "train.batch_tokens": 1024,
                "train.steps": steps,
                "eval.every_steps": 0,
                "checkpoint.every_steps": 0,
            }
            for task, steps in STEPS.items()
            for seed in SEEDS
            for position in METHODS
        ],
        "evaluations": [TASK_EVALUATIONS],
    }
