"""Compares a plan with the training step that XLA compiles for TPUs, which need not be here.

    python -m benchmarks.compile_plan --config=configs/cc100_1b3.py --topology=v5e:16x16 --config.model.scan_layers

Needs Linux and libtpu (bash scripts/setup.sh --extra=tpu), which compiles without a TPU. A large
model's step takes minutes. Prints the bytes on a device, planned and compiled: the program's
arguments, and its peak.
"""

import time

from absl import flags

from alibi.cli import command_line

_CONFIG = command_line.define_config_flag()
_TOPOLOGY = flags.DEFINE_string(
    "topology", "v5e:2x4", "generation and shape of the slice, such as v5e:2x4 or v4:2x2x1"
)
command_line.own_flags(__name__)


def main() -> None:
    from benchmarks.compiled import tpu_devices

    devices = tpu_devices(_TOPOLOGY.value)
    from alibi.devices.kinds import GIB
    from alibi.numerics.target import traced_for
    from alibi.parallel.sharding import make_mesh
    from alibi.planning.plan import make_plan
    from benchmarks.training_contenders import compile_step

    plan = make_plan(_CONFIG.value, len(devices), devices[0].device_kind)
    start = time.perf_counter()
    with traced_for(plan.kind.platform, len(devices)):
        *_, step = compile_step(
            plan.config, plan.vocabulary.size, make_mesh(plan.config.mesh, devices)
        )
    analysis = step.memory_analysis()
    seconds = time.perf_counter() - start
    state = plan.memory.parameters + plan.memory.optimizer
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    print(f"{len(devices)} x {plan.kind.name}, compiled in {seconds:.0f} s; GiB a device:")
    print(
        f"  state     planned {state / GIB:.3f}   compiled {arguments / GIB:.3f}, with the batch and padding"
    )
    print(
        f"  at most   planned {plan.memory.total / GIB:.3f}   compiled {(arguments + temporaries) / GIB:.3f}"
    )


if __name__ == "__main__":
    command_line.run(main, required=("config",))
