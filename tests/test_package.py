"""The package as a whole: what it shows, and what it imports."""

import inspect

import alibi
from tests.hosts import ROOT, run_python


def test_help_and_dir_show_what_a_reader_needs():
    """Types by their short names, which took 2,000 characters; nothing that the modules import."""
    shown = str(inspect.signature(alibi.attend))
    assert shown.startswith(
        "(query: 'Queries', key: 'Keys', value: 'Values', *, slopes: 'Slopes | None'"
    )
    assert len(shown) < 1000
    assert dir(alibi) == sorted([*alibi.__all__, "__version__"])


def test_what_reads_text_rows_and_runs_starts_without_jax() -> None:
    """JAX takes seconds to import, and a notebook that reads rows, texts or the state of a sweep
    needs none of it.
    """
    rooms = [
        file
        for room in ("data", "reporting")
        for file in sorted((ROOT / "alibi" / room).glob("*.py"))
    ]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in rooms] + [
        "alibi.sweeps.state"
    ]
    code = (
        f"import sys, {', '.join(modules)}; print(*{{'jax', 'flax', 'optax'}} & {{*sys.modules}})"
    )
    assert run_python("-c", code).stdout == "\n"
