"""`scripts/benchmark.py decode`: one token's attention against caches of several lengths, beside the dense formula.

Queries, keys and values are normal, and the cache is full: how much is read depends on
the norms and the slopes. A mask hides what is not written yet, as Flax's cache has it.
"""

import argparse
import dataclasses
import functools
from typing import Any

from benchmarks.attention_contenders import Shape, add_shape_arguments, jax_arrays, shape_of
from benchmarks.processes import Contender, Step
from benchmarks.rounds import Runner, about, measured_on, print_failures, print_table, run_rounds, text, whole_numbers

TURN_SECONDS = 0.3  # of one contender in one round


@dataclasses.dataclass(frozen=True)
class Way:
    """How a token is attended: the backend, what may be lost, and whether the cache knows its largest norms."""

    backend: str
    skip_epsilon: float | None = None
    knows_norms: bool = True


WAYS = {
    "dense": Way("reference"),
    "skip none": Way("decoding"),
    "skip 0": Way("decoding", 0.0),
    "skip 1e-6": Way("decoding", 1e-6),
    "skip 0, norms unknown": Way("decoding", 0.0, knows_norms=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", default="1024,4096,16384,65536", help="keys of a cache, comma-separated")
    add_shape_arguments(parser)
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of a token at each length, and how many times as fast as the dense formula that is."""
    rows = []
    for length in whole_numbers(arguments.lengths, "lengths"):
        shape = shape_of(length, arguments)
        contenders = {name: Contender(_token, (shape, way)) for name, way in WAYS.items()}
        runners, peak = run_rounds(
            contenders, arguments.rounds, turn_seconds=TURN_SECONDS, title=f"a cache of {length:,}"
        )
        rows += [_row(name, runner, runners["dense"], shape) for name, runner in runners.items()]
        for row in rows[-len(runners) :]:
            row.update(matmul_gflops=peak / 1e9, **about(arguments.rounds))
    _print_rows(rows)
    return rows


def _row(name: str, runner: Runner, dense: Runner, shape: Shape) -> dict[str, Any]:
    seconds, of_dense = runner.median("run"), dense.median("run")
    return {
        "benchmark": "decode",
        "contender": name,
        "failed": runner.failed,
        **dataclasses.asdict(shape),
        "seconds": seconds,
        "seconds_of_rounds": runner.seconds.get("run"),
        "of_dense": of_dense / seconds if of_dense and seconds else None,
    }


def _token(shape: Shape, way: Way) -> Step:
    """One call for the last token of a full cache."""
    import jax
    import jax.numpy as jnp

    from alibi import alibi_slopes, attend
    from alibi.attention.cache import norm_of_all

    @jax.jit
    def token(index: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, norm: jax.Array) -> jax.Array:
        slots = jnp.arange(shape.length)
        return attend(
            query,
            key,
            value,
            slopes=alibi_slopes(shape.heads),
            query_positions=index[None],
            key_positions=slots,
            mask=(slots <= index)[None, None, None, :],
            skip_epsilon=way.skip_epsilon,
            key_norm=norm if way.knows_norms else None,
            backend=way.backend,
        )

    query, key, value, _ = jax_arrays(shape)
    arguments = (jnp.asarray(shape.length - 1), query[:, -1:], key, value, norm_of_all(key, value))
    return Step(functools.partial(_repeat, token, arguments))


def _repeat(token: Any, arguments: tuple[Any, ...], steps: int) -> None:
    for _ in range(steps):
        token(*arguments).block_until_ready()  # as the next token waits for it


def _print_rows(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"batch {first['batch']}, {first['heads']} heads of {first['head_dim']}, {first['dtype']}; "
        f"{measured_on(first)}; us a token, and how many times as fast as dense\n"
    )
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {(row["contender"], row["length"]): row for row in rows}
    print_table(
        ["keys", *(f"{length:,}" for length in lengths)],
        [[name, *(_cell(cells[name, length]) for length in lengths)] for name in names],
    )
    print_failures(rows)


def _cell(row: dict[str, Any]) -> str:
    return f"{text(row['seconds'], ',.0f', 1e6)} ({text(row['of_dense'], '.1f')}x)"
