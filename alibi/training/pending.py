"""What training writes without waiting for it."""

import concurrent.futures
from collections.abc import Callable


class Pending:
    """Writes, made one after the other by a thread of its own; after one that fails none is made any more.

    What that one raised is raised by each later call of `add` or `wait`.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._last: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._last.set_result(None)

    def add(self, write: Callable[[], object]) -> None:
        """Leaves `write` to be made after those before it."""
        if self._last.done():
            self.wait()
        self._last = self._pool.submit(_made_after, self._last, write)

    def wait(self) -> None:
        """Returns when all writes are made."""
        self._last.result()

    def close(self) -> None:
        """Waits, then ends the thread; raises nothing, so that what ended the training is what is told."""
        self._pool.shutdown()


def _made_after(before: concurrent.futures.Future[None], write: Callable[[], object]) -> None:
    before.result()  # done, since one thread makes all
    write()
