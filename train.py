"""Trains one run: python train.py --config=configs/quickstart.py:position=alibi,length=128 --workdir=DIR

Any key of the config can be overridden: --config.train.steps=1000. The same command,
given again, goes on from the latest checkpoint in DIR. On several hosts give the same
command on each, with --multihost where the cluster describes itself (TPU pods, SLURM),
or with --coordinator_address, --num_processes and --process_id.
"""

import sys

from absl import flags
from ml_collections import config_flags

from alibi import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "FILE.py[:KEY=VALUE,...] with get_config()")
_WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run's checkpoints, metrics and config")
_MULTIHOST = flags.DEFINE_bool("multihost", False, "this process is one of several; the cluster says which")
_COORDINATOR = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of the first process, on every process")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "processes in all")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "this process, from 0")


def main() -> int:
    # Only now, so that a wrong flag is reported at once.
    import jax

    from alibi.training.loop import Interrupted, train

    if _MULTIHOST.value or _COORDINATOR.value:
        jax.distributed.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    try:
        train(_CONFIG.value, _WORKDIR.value)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    command_line.run(main, required=("config", "workdir"))
