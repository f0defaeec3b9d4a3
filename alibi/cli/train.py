"""Trains one run.

    python train.py --config=configs/quickstart.py:position=alibi,length=128 --workdir=workdirs/alibi-128
    python train.py --config=configs/quickstart.py --config.train.steps=1000 --print_config    # every key, no training
    python train.py --config=configs/quickstart.py --plan    # memory and hours on this machine's CPUs
    python train.py --config=configs/cc100_1b3.py --plan --devices=256 --device_kind="TPU v5e"  # or elsewhere

Behind the colon and in --config.KEY=VALUE stand keys of the config, which alibi/config/tree.py
lists. The same command, given again, goes on from the latest checkpoint in --workdir. The last line
printed is the command that evaluates the run.

    python train.py --config=configs/task.py --seeds=0,1,2 --workdir=workdirs/copy-0,workdirs/copy-1,workdirs/copy-2

trains a run for each seed, all in one program on one device: small models leave most of an accelerator
idle. Each --workdir holds what its run would hold alone.

On several hosts give the same command on each, with --multihost if the cluster describes itself (TPU
pods, SLURM), or with --coordinator_address, --num_processes and --process_id.

SIGTERM, SIGINT, SIGUSR1 or SIGHUP on any host: all processes save after the same update and exit
with code 75: the same command goes on from there (for launchers: requeue). Before the first update
they leave at once. Only a SIGTERM to one of several processes stops them after it. A process that
loses another process leaves at once, with the same code. Code 1: an error to fix before the next
start, with a message that names the cause.

--plan prints the memory and time of the run on --devices of --device_kind, by default on this
machine's CPUs, and --print_config the whole config. Both need no --workdir and no accelerator, and
train nothing. A plan looks at the run of --init_from too.
"""

import dataclasses
import sys

from absl import flags

from alibi.cli import command_line
from alibi.config import Config, as_file

_CONFIG = command_line.define_config_flag()
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "directory of the run's checkpoints, metrics and config; may be gs://BUCKET/PATH",
)
_INIT_FROM = flags.DEFINE_string(
    "init_from",
    None,
    "work directory of a run whose latest parameters this run starts with; give it again when the run goes on",
)
_SEEDS = flags.DEFINE_list(
    "seeds",
    None,
    "seeds that train together in one program on one device; --workdir then names a directory for each",
)
_PLAN = flags.DEFINE_bool(
    "plan",
    False,
    "print memory and time of the run on --devices of --device_kind, by default on this machine's CPUs, and train "
    "nothing",
)
_PRINT_CONFIG = flags.DEFINE_bool(
    "print_config", False, "print the whole config, as a config file, and train nothing"
)
command_line.define_device_flags()
command_line.define_host_flags()
command_line.own_flags(__name__)


def main() -> None:
    config = _CONFIG.value
    if _INIT_FROM.value is not None:
        config = dataclasses.replace(config, init_from=_INIT_FROM.value)
    devices = command_line.planned_devices(_PLAN.value, "--plan")
    if _PLAN.value and _PRINT_CONFIG.value:
        raise ValueError("--plan and --print_config print different things; give one of them")
    if _SEEDS.value is not None and (_PLAN.value or _PRINT_CONFIG.value):
        raise ValueError(
            "--seeds is for training, and --plan and --print_config are of one run; leave it out"
        )
    if _PRINT_CONFIG.value:
        print(as_file(config), end="")
        return
    if _PLAN.value:
        _plan(config, *(devices or (1, "cpu")))
        return
    if _WORKDIR.value is None:
        raise ValueError("give --workdir, the directory of the run, or --plan or --print_config")
    # Imported only now: a wrong flag is reported at once.
    from alibi.training.loop import train, train_seeds

    command_line.join_hosts(keep_sigterm=False)
    if _SEEDS.value is not None:
        workdirs = [path.strip() for path in _WORKDIR.value.split(",")]
        train_seeds(config, _workdirs(_SEEDS.value, workdirs))
    else:
        train(config, _WORKDIR.value)


def _workdirs(seeds: list[str], workdirs: list[str]) -> dict[int, str]:
    """Returns the work directory of each seed."""
    named = {
        int(seed): path for seed, path in zip(seeds, workdirs, strict=False) if seed.isdecimal()
    }
    if not len(named) == len(set(named.values())) == len(seeds) == len(workdirs):
        raise ValueError(
            f"--seeds={','.join(seeds)} must be different whole numbers, and --workdir a directory for each, separated "
            f"by commas; got {len(workdirs)}: {', '.join(workdirs)}"
        )
    return named


def _plan(config: Config, devices: int, device_kind: str) -> None:
    import jax

    # the devices of this machine belong to other processes
    jax.config.update("jax_platforms", "cpu")
    from alibi.model.decoder import UNKNOWN_VOCABULARY, build_model
    from alibi.planning.plan import describe, make_plan
    from alibi.training.parent import Parent

    plan = make_plan(config, devices, device_kind)
    if config.init_from:  # refused as training would refuse it before its first update
        first = config.at(1)
        parent = Parent(first, build_model(first, UNKNOWN_VOCABULARY))
        print(f"would start {parent.describe()}", file=sys.stderr)
    print(describe(plan), end="")


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(
        main,
        required=("config",),
        addresses=("workdir", "init_from"),
        resumes=command_line.RESUMES,
        absent={
            "dry_run": "--plan prints memory and time, --print_config the whole config",
            "output_dir": "the run is kept in --workdir",
        },
    )


if __name__ == "__main__":
    run()
