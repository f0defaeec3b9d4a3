"""Compares a plan with the training step that XLA compiles for TPUs, which need not be here.

    python scripts/compile_plan.py --config=configs/cc100_1b3.py --topology=v5e:16x16 --config.model.scan_layers

Needs Linux and libtpu (bash scripts/setup.sh --extra=tpu), which compiles without a TPU; the step
of a large model takes minutes. Prints the bytes on one device, planned and compiled: the program's
arguments, and its peak.
"""

import os
import pathlib
import sys
import time

from absl import flags

# A clone works without being installed: python scripts/compile_plan.py has only scripts/ on its
# path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from alibi.cli import command_line

_CONFIG = command_line.define_config_flag()
_TOPOLOGY = flags.DEFINE_string(
    "topology", "v5e:2x4", "generation and shape of the slice, such as v5e:2x4 or v4:2x2x1"
)


def main() -> None:
    import importlib.util

    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs the package libtpu; install it by bash scripts/setup.sh --extra=tpu"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU with metadata
    for name, value in (
        ("ACCELERATOR_TYPE", "v5litepod-8"),
        ("WORKER_ID", "0"),
        ("WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(f"TPU_{name}", value)
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    from alibi.parallel.device_kinds import GIB
    from alibi.planning.plan import make_plan

    devices = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGY.value).devices
    plan = make_plan(_CONFIG.value, len(devices), devices[0].device_kind)
    start = time.perf_counter()
    analysis = compile_step(plan, devices).memory_analysis()
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


def compile_step(plan, devices):
    """Returns the compiled training step of the plan's run on `devices`."""
    import jax
    import numpy as np

    from alibi.attention.call import traced_for
    from alibi.model.decoder import build_model
    from alibi.parallel.sharding import batch_sharding, make_mesh
    from alibi.training.optimizer import make_optimizer
    from alibi.training.step import abstract_state, make_train_step

    config, mesh = plan.config, make_mesh(plan.config.mesh, devices)
    with traced_for(plan.kind.platform, len(devices)):
        model = build_model(config, plan.vocabulary.size, sharding=batch_sharding(mesh))
        optimizer, schedule = make_optimizer(config.optimizer, config.train.steps)
        state = abstract_state(model, optimizer, mesh)
        rows = config.train.batch_tokens // config.train_length // plan.micro_batches
        shape = plan.micro_batches, rows, config.train_length
        batch = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh, leading=1))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        update = make_train_step(
            model, optimizer, config.seed, schedule=schedule, state_shardings=shardings
        )
        return update.lower(state, batch, batch).compile()


if __name__ == "__main__":
    command_line.run(main, required=("config",))
