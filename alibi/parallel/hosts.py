"""The processes of several hosts: who writes and speaks, and what all of them decide alike.

Each function but `is_primary` must be called by every process at the same place of the program. With one process
they cost nothing. What they say goes through the key-value store of `jax.distributed`, not through the devices: so
one may prepare for hours while the others wait.
"""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed  # of its store nothing is public

from alibi.errors import FAILED, UserError, tell
from alibi.parallel import peers

Result = TypeVar("Result")

ALIKE_SECONDS = 60.0  # that a process which failed waits for the others to fail too


class _Said:
    """How often the processes have exchanged something, which all count alike: keys of the store are named by it."""

    gathered = told = failed = 0


def is_primary() -> bool:
    """Whether this is the first process: the one that writes and speaks."""
    return distributed.global_state.process_id == 0


def gather(value: Any) -> list[Any]:
    """The `value`, anything that JSON can hold, of each process; the first one reads them all and tells the others."""
    state = distributed.global_state
    if state.client is None:
        return [value]
    place, values = f"alibi/{_Said.gathered}", [value]
    with peers.when_lost():
        if is_primary():
            values += [json.loads(peers.awaited(f"{place}/of/{one}")) for one in range(1, state.num_processes)]
        else:
            state.client.key_value_set(f"{place}/of/{state.process_id}", json.dumps(value))
    values = _spread(values)
    if is_primary() and _Said.gathered:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # all have read what was said there, or not come here
            state.client.key_value_delete(f"alibi/{_Said.gathered - 1}")
    _Said.gathered += 1
    return values


def _spread(value: Result) -> Result:
    """The `value` of the first process, which does not wait for the others to read it."""
    client = distributed.global_state.client
    if client is None:
        return value
    key = f"alibi/{_Said.gathered}/{_Said.told}"
    _Said.told += 1
    with peers.when_lost():
        if is_primary():
            client.key_value_set(key, text := json.dumps(value))
        else:
            text = peers.awaited(key)
    return json.loads(text)


def check_alike(facts: dict[str, Any]) -> None:
    """Raises ValueError on every process, naming what differs, where `facts` are not the same on all of them."""
    facts = json.loads(json.dumps(facts))
    first = told(lambda: facts)
    others = gather({key: facts.get(key) for key in facts | first if facts.get(key) != first.get(key)})
    differing = []
    for key in sorted(set().union(*others)):
        said = {json.dumps(first.get(key)): 0}
        for process, one in enumerate(others):
            if key in one:
                said.setdefault(json.dumps(one[key]), process)
        differing.append(f"  {key}: " + ", ".join(f"{value} on process {process}" for value, process in said.items()))
    if differing:
        raise ValueError("the processes differ; start the same command and code on all:\n" + "\n".join(differing))


def any_of(*flags: bool) -> tuple[bool, ...]:
    """Tells of each flag whether it is set on any process."""
    return tuple(map(any, zip(*gather(flags), strict=True)))


def told(ask: Callable[[], Result]) -> Result:
    """What `ask`, which gives what JSON can hold, gives on the first process; raises as `together` does.

    The others wait for the first one, and it for none of them.
    """
    result, failure = _tried(ask) if is_primary() else (None, None)
    result, reason = _spread((result, _reason(failure)))
    _raise(failure, [reason])
    return cast(Result, result)


def on_first(act: Callable[[], Result]) -> Result | None:
    """What `act` gives on the first process, None on the others; raises as `together` does."""
    return together(lambda: act() if is_primary() else None)


def together(act: Callable[[], Result]) -> Result:
    """What `act`, which every process calls, gives here; if it raises on one, this raises on all.

    A program that the devices of all processes compute must stand in `alike` within `act`.

    Raises:
      UserError: it was another process that failed; that one raises what `act` did.
    """
    result, failure = _tried(act)
    _raise(failure, gather(_reason(failure)))
    return cast(Result, result)  # which it is where nothing failed


def alike(compute: Callable[[], Result]) -> Result:
    """What `compute`, which the devices of all processes do together, gives here; if it raises, then on all.

    Where it fails on some processes only, all end: the others are in it, and would wait for these for ever.
    """
    result, failure = _tried(compute)
    if failure is None:
        return cast(Result, result)
    state, place = distributed.global_state, f"alibi/failed/{_Said.failed}"
    _Said.failed += 1
    if state.client is not None:
        until = time.monotonic() + ALIKE_SECONDS
        try:
            with peers.when_lost():
                state.client.key_value_set(f"{place}/{state.process_id}", "")
                for one in range(state.num_processes):
                    peers.awaited(f"{place}/{one}", until - time.monotonic())
        except TimeoutError:
            tell(f"what all processes compute failed on this one alone: {_reason(failure)}")
            peers.end(f"failed alone: {_reason(failure)}", FAILED)
    raise failure


def _tried(act: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        with peers.when_lost():  # here: whom it lost is not to be waited for afterwards
            return act(), None
    except Exception as error:
        return None, error


def _reason(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _raise(failure: Exception | None, reasons: list[str | None]) -> None:
    """Raises this process's own failure, or else the first of the `reasons` that the processes gave for theirs."""
    if failure is not None:
        raise failure
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise UserError(f"process {process} failed: {reason}")
