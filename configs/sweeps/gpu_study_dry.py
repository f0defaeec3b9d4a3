"""A trial of configs/sweeps/gpu_study.py at tiny sizes, on any machine.

bash scripts/gpu_study.sh --dry FOLDER
"""

from configs.sweeps import gpu_study

SMALL = {
    "model.num_layers": 1,
    "model.width": 32,
    "model.num_heads": 2,
    "model.feed_forward": 64,
    "data.corpus": "books",
    "data.train": "train",
    "data.valid": "valid",
    "data.tokenizer": "bytes",
    "data.max_valid_bytes": 2_048,
    "train.batch_tokens": 256,
    "train.steps": 2,
    "eval.every_steps": 2,
    "eval.max_tokens": 256,
    "checkpoint.every_steps": 2,
    "optimizer.warmup_steps": 1,
}
SCORED = gpu_study.SCORED | {"context_windows": 2, "echoes": 2, "dump_nll": True}


def get_sweep() -> dict:
    runs = [gpu_study.run(name, length // 8, seed) for name, length, seed in gpu_study.RUNS[:2]]
    return gpu_study.get_sweep() | {
        "runs": [run | SMALL | {"evaluations": [{"lengths": [64, 256], **SCORED}]} for run in runs]
    }
