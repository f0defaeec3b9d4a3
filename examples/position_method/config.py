"""The smallest run with the method, on the included books.

alibi-train --config=config.py --workdir=workdirs/root
"""

from alibi.config import base


def get_config(arg=""):
    config = base.get_config()
    config.position = "root"
    config.train_length = 64
    config.train.steps = 100
    config.optimizer.warmup_steps = 10
    return base.apply(config, arg)
