"""The processes of several hosts: who writes and speaks, and what all of them decide alike.

Each function but `is_primary` must be called by every process at the same place of the program. With one process
they cost nothing. What they say goes through the key-value store of `jax.distributed`, not through the devices: so
one may prepare for hours while the others wait.
"""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed  # of its store nothing is public

from alibi.errors import UserError
from alibi.parallel import peers

Result = TypeVar("Result")
_exchanges = itertools.count()


def is_primary() -> bool:
    """Whether this is the first process: the one that writes and speaks."""
    return distributed.global_state.process_id == 0


def gather(value: Any) -> list[Any]:
    """The `value`, anything that JSON can hold, of each process."""
    state = distributed.global_state
    if state.client is None:
        return [value]
    number, me = next(_exchanges), state.process_id
    with peers.when_lost():
        state.client.key_value_set(_key(number, me), json.dumps(value))
        values = [json.loads(_awaited(state.client, _key(number, process))) for process in range(state.num_processes)]
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        state.client.key_value_delete(_key(number - 1, me))  # all have read it, or they would not be here
    return values


def _key(number: int, process: int) -> str:
    return f"alibi/{number}/{process}"


def _awaited(client: Any, key: str) -> str:
    """The value of `key`, however long it takes; in short waits, between which Python answers signals."""
    while True:
        try:
            return client.blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def check_alike(facts: dict[str, Any]) -> None:
    """Raises ValueError on every process, naming what differs, where `facts` are not the same on all of them."""
    found = gather(facts)
    differing = []
    for key in sorted(set().union(*found)):
        said: dict[str, int] = {}
        for process, one in enumerate(found):
            said.setdefault(json.dumps(one.get(key)), process)
        if len(said) > 1:
            differing.append(
                f"  {key}: " + ", ".join(f"{value} on process {process}" for value, process in said.items())
            )
    if differing:
        raise ValueError("the processes differ; start the same command and code on all:\n" + "\n".join(differing))


def any_of(*flags: bool) -> tuple[bool, ...]:
    """Tells of each flag whether it is set on any process."""
    return tuple(map(any, zip(*gather(flags), strict=True)))


def told(ask: Callable[[], Result]) -> Result:
    """What `ask`, which gives what JSON can hold, gives on the first process; raises as `together` does."""
    return cast(Result, gather(on_first(ask))[0])


def on_first(act: Callable[[], Result]) -> Result | None:
    """What `act` gives on the first process, None on the others; raises as `together` does."""
    return together(lambda: act() if is_primary() else None)


def together(act: Callable[[], Result]) -> Result:
    """What `act`, which every process calls, gives here; if it raises on one, this raises on all.

    Raises:
      UserError: it was another process that failed; that one raises what `act` did.
    """
    result, failure = None, None
    try:
        with peers.when_lost():  # here: whom it lost is not to be waited for below
            result = act()
    except Exception as error:
        failure = error
    failures = gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for process, reason in enumerate(failures):
        if reason is not None:
            raise UserError(f"process {process} failed: {reason}")
    return cast(Result, result)  # which it is where nothing failed
