"""Trains one run: python train.py --config=configs/quickstart.py:position=alibi,length=128 --workdir=DIR

Any key of the config can be overridden: --config.train.steps=1000. The same command,
given again, goes on from the latest checkpoint in DIR. On several hosts give the same
command on each, with --multihost where the cluster describes itself (TPU pods, SLURM),
or with --coordinator_address, --num_processes and --process_id.

SIGTERM, SIGINT, SIGUSR1 or SIGHUP on any of them: all save after the same update, or leave at once what comes before
the first one, and exit with code 75, which says that the same command goes on from there (for launchers: requeue). So
do those that lose another process. Code 1: an error that the message names, which starting again won't mend.
"""

from absl import flags

from alibi import command_line

_CONFIG = command_line.define_config_flag()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "place of the run's checkpoints, metrics and config; may be gs://BUCKET/PATH"
)
_INIT_FROM = flags.DEFINE_string(
    "init_from", None, "work directory of a run whose latest parameters this one starts with; the same when it goes on"
)
command_line.define_host_flags()


def main() -> None:
    # Only now, so that a wrong flag is reported at once.
    from alibi.training.loop import train

    if _INIT_FROM.value is not None:
        _CONFIG.value.init_from = _INIT_FROM.value
    command_line.join_hosts()
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    command_line.run(
        main,
        required=("config", "workdir"),
        addresses=("workdir", "init_from"),
        resumes=command_line.RESUMES,
    )
