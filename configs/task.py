"""The quickstart's model on a task: copy, flip_flop, recall and others of docs/tasks.md.

`python eval_extrapolation.py --evaluators=task,task_gaps` measures the answers on longer examples.

python train.py --config=configs/task.py:position=alibi,length=64 --config.data.task=copy --workdir=workdirs/copy-alibi
"""

import ml_collections

from configs import base, quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = quickstart.get_config()
    config.objective.name = "answers"
    config.data.corpus = "tasks"
    config.data.task = "copy"
    config.data.isolate_documents = "restart"  # an example does not see the one before it
    config.train_length = 64
    config.data.task_length = config.get_ref("train_length")
    config.data.max_train_bytes = 6_400_000
    config.data.max_valid_bytes = config.eval.max_tokens = 16_384
    config.train.steps = 3000
    config.eval.every_steps = config.checkpoint.every_steps = 500
    return base.apply(config, arg)
