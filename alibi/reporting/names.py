"""Names of runs in tables and charts: runs that differ in their seed only share one."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from alibi.reporting.rows import Row

Item = TypeVar("Item")
Key = TypeVar("Key")

_KEYS = re.compile(r"-(?=L\d+(?:-|$)|[A-Za-z_]\w*=)")  # before each key of a run's name


def series_names(rows: Iterable[Row]) -> dict[tuple[str, int, str], str]:
    """Returns the name for each `Row.tested` in tables and charts. Runs that differ only in their seed
    share a name.

    Runs with the same seed are no sample: they share a name neither with each other nor, if their own
    names differ, with runs of other seeds. Where a name would stand for several series, each also
    shows its step, or the names of its runs.
    """
    tested = {row.tested: row for row in rows}
    groups = [*grouped(tested.values(), lambda row: row.but_seed).values()]
    for key in (lambda row: row.series), (lambda row: row.run):
        groups = [
            subgroup
            for group in groups
            for subgroup in (
                [group]
                if len({row.seed for row in group}) == len(group)
                else grouped(group, key).values()
            )
        ]
    short = _short_names(tested.values())
    called = [dict.fromkeys(short[row.series] for row in group) for group in groups]
    names: dict[tuple[str, int, str], str] = {}
    for group, short_names in zip(groups, called, strict=True):
        alike = [
            one for one, of in zip(groups, called, strict=True) if short_names.keys() & of.keys()
        ]
        steps = {one[0].step for one in alike}
        only_steps = len(steps) == len(alike) and len({one[0].but_seed[0] for one in alike}) == 1
        _, step, override = group[0].tested
        runs = ", ".join(row.run for row in group) + f" {override}".rstrip()
        label = ", ".join(short_names) if only_steps else runs
        label += f" (step {step:,})" if len(steps) > 1 else ""
        names |= {row.tested: label for row in group}
    return names


def _short_names(rows: Collection[Row]) -> dict[str, str]:
    """Returns each `Row.series` without the keys that all runs share.

    Sweeps name runs METHOD-L128-KEY=VALUE: the train length is left out if all have the same, and
    each key with the same value in all runs. Other names stay whole, and so do all names if the
    short ones would not be distinct. N-grams are no runs of the sweep.
    """
    names = {row.series: _KEYS.split(row.series.partition(" ")[0]) for row in rows}
    trained = [row for row in rows if row.is_trained]
    parts = [set(names[series]) for series in {row.series for row in trained}]
    shared = set.intersection(*parts) if len(parts) > 1 else set()
    if len({row.train_length for row in trained}) == 1:
        shared |= {f"L{row.train_length}" for row in trained}
    short = {}
    for series, (method, *keys) in names.items():
        _, space, override = series.partition(" ")
        short[series] = (
            "-".join([method, *(key for key in keys if key not in shared)]) + space + override
        )
    return short if len({*short.values()}) == len(short) else {series: series for series in short}


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Returns the items for each key, in order of first appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
