"""`python -m benchmarks compiled`: a training step as libtpu compiles it for TPUs, with its own
estimate of the cycles. Nothing is run, and no TPU is needed.
"""

import argparse
import collections
import importlib.util
import os
import re
import time
from typing import Any

import numpy as np

from alibi.config import Config, make_config
from benchmarks.profile import PARTS
from benchmarks.rounds import Row, chosen_names, conditions, print_table

SHAPE = (
    "model.num_layers=2,model.width=1024,model.num_heads=8,model.feed_forward=4096,"
    "model.dtype=bfloat16,length=2048,train.batch_tokens=65536"
)
FLAX = "flax"  # the peer
CYCLES = 1.5e9, 1.75e9  # a second, of TPU v5e and of v5p and v6e, from their peaks
NOTE = """
An estimate of the compiler, not a measurement. Cycles are those of libtpu's cost model, loops times
their rounds where the program tells them; kernels (Pallas) have none: their products are counted
here and taken at the peak, so that the seconds are the least that they can be, and the share of the
peak the most. Waiting for other chips and for memory is left out, and bytes count loops once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", default="v5e:2x2", help="generation and shape of the slice")
    parser.add_argument(
        "--positions", default=f"none,alibi,t5,{FLAX}", help=f"methods; {FLAX}: plain Flax, as peer"
    )
    parser.add_argument("--config", default=SHAPE, help="config keys of the model and the batch")
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.set_defaults(command=compile_all)


def tpu_devices(topology: str) -> list[Any]:
    """Returns the devices of a TPU slice, which need not be here, and sets JAX to compile for them.

    Raises:
      ValueError: libtpu is missing, or there is no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs the package libtpu; install it by bash scripts/setup.sh --extra=tpu"
        )
    for name, value in (
        ("SKIP_MDS_QUERY", "1"),  # there is no TPU with metadata
        ("ACCELERATOR_TYPE", "v5litepod-8"),
        ("WORKER_ID", "0"),
        ("WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(f"TPU_{name}", value)
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # of the compiler, of no class of its own
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--topology={topology} is no slice that libtpu knows ({reason}); use one such as v5e:2x2, v5p:2x2x1 or "
            "v6e:2x2"
        ) from None
    return list(description.devices)


def compile_all(arguments: argparse.Namespace) -> list[Row]:
    from alibi.positions import METHODS

    names = chosen_names(arguments.positions, [*METHODS, FLAX], "position method")
    devices = tpu_devices(arguments.topology)
    rows = [_compiled(name, devices, arguments) for name in names]
    _print(rows)
    print(NOTE)
    return rows


def _compiled(name: str, devices: list[Any], arguments: argparse.Namespace) -> Row:
    """Returns what the compiler says about a step with a method."""
    from alibi.devices.kinds import known_device_kind
    from alibi.model.flops import TRAIN_PASSES, forward_flops
    from alibi.numerics.target import traced_for

    position = "none" if name == FLAX else name
    config = make_config(f"{arguments.config},position={position}")
    kind = known_device_kind(devices[0].device_kind)
    start = time.perf_counter()
    with traced_for("tpu", len(devices)):
        build = _flax if name == FLAX else _train
        program = build(config, arguments.vocab_size, devices)
    seconds, text = time.perf_counter() - start, program.as_text()
    cycles, unknown = cycles_by_part(text)
    memory, cost = program.memory_analysis(), program.cost_analysis()
    flops = forward_flops(config, arguments.vocab_size, config.train_length) * TRAIN_PASSES
    kernels = text.count('custom_call_target="tpu_custom_call"')
    # Tiles of 512 on the diagonal are whole. The forward pass has two products, and again with
    # remat that does not keep its result; the two kernels of the backward pass have seven.
    attention = 4 * config.model.width * (config.train_length + 512) / 2 * config.model.num_layers
    passes = 4.5 + (config.model.remat and "attention" not in config.model.kept)
    tokens = config.train.batch_tokens / len(devices)
    of_kernels = attention * passes * tokens / kind.bfloat16 if kernels else 0.0
    clock = CYCLES[0] if kind.name == "TPU v5e" else CYCLES[1]
    estimate = sum(cycles.values()) / clock + of_kernels
    return {
        "contender": name,
        "device": kind.name,
        "devices": len(devices),
        "compile_seconds": seconds,
        "cycles": cycles,
        "loops_of_unknown_rounds": unknown,
        "kernels": kernels,
        "kernel_seconds": of_kernels,
        "seconds": estimate,
        "of_peak": flops * tokens / kind.bfloat16 / estimate,
        "bytes": cost["bytes accessed"],
        "memory_bytes": memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        **conditions(1),
    }


def _train(config: Config, vocab_size: int, devices: list[Any]) -> Any:
    from alibi.parallel.sharding import make_mesh
    from benchmarks.training_contenders import compile_step

    return compile_step(config, vocab_size, make_mesh(config.mesh, devices))[-1]


def _flax(config: Config, vocab_size: int, devices: list[Any]) -> Any:
    """Returns the plain way to write the same model without positions."""
    import jax

    from alibi.parallel.sharding import batch_sharding, make_mesh
    from benchmarks.training_contenders import flax_program

    model, optimizer, update = flax_program(config, vocab_size)
    sharding = batch_sharding(make_mesh(config.mesh, devices))
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    shape = config.train.batch_tokens // config.train_length, config.train_length
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    both = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        (params, jax.eval_shape(optimizer.init, params)),
    )
    return jax.jit(update, donate_argnums=0).lower(both, tokens, tokens).compile()


def cycles_by_part(program: str) -> tuple[dict[str, int], int]:
    """Returns the estimated cycles in each part of the model, for a program compiled for a TPU, and how many
    loops don't tell their rounds. These count once.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.\-]+) [^\n]*\{\n(.*?)^\}$", program, re.M | re.S))
    (entry,) = re.findall(r"^ENTRY %([\w.\-]+) ", program, re.M)
    cycles: collections.Counter[str] = collections.Counter(dict.fromkeys(PARTS, 0))
    unknown = 0

    def add(name: str, times: int) -> None:
        nonlocal unknown
        for line in bodies[name].splitlines():
            if loop := re.search(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)", line):
                rounds = _rounds(bodies[loop[1]])
                unknown += rounds is None
                add(loop[2], times * (rounds or 1))
            elif estimate := re.search(r'"estimated_cycles":"(\d+)"', line):
                scope = re.search(r'op_name="([^"]*)"', line)
                path = scope[1] if scope else ""
                part = next(part for part, of in PARTS.items() if re.search(of, path))
                cycles[part] += times * int(estimate[1])

    add(entry, 1)
    return dict(cycles), unknown


def _rounds(condition: str) -> int | None:
    """Returns how often a loop that counts from 0 runs, from its condition, or None for another condition."""
    limits = re.findall(r"= s32\[\]\S* constant\((\d+)\)", condition)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in condition else None


def _print(rows: list[Row]) -> None:
    parts = list(PARTS)
    first = rows[0]
    print(
        f"\na training step, {first['devices']} x {first['device']}, millions of cycles a device by part:\n"
    )
    titles = ["", *parts, "kernels, ms", "ms", "of peak", "GB", "GiB", "compiled, s"]
    cells = [
        [
            row["contender"],
            *(f"{row['cycles'][part] / 1e6:.1f}" for part in parts),
            f"{row['kernel_seconds'] * 1e3:.1f}" if row["kernels"] else "-",
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['of_peak']:.2f}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['memory_bytes'] / 2**30:.2f}",
            f"{row['compile_seconds']:.0f}",
        ]
        for row in rows
    ]
    print_table(titles, cells)
    if unknown := sum(row["loops_of_unknown_rounds"] for row in rows):
        print(f"\n{unknown} loops do not tell their rounds, and count once")
