"""What training writes without waiting for it."""

import concurrent.futures
import threading
from collections.abc import Callable

MOST = 8  # writes, three or four rows with their statuses: what a run that is stopped may have to wait for


class Pending:
    """Writes, made one after the other by a thread of its own; after one that fails none is made any more.

    What that one raised is raised by each later call of `add` or `wait`. At most `MOST` are left to be made.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._last: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._last.set_result(None)
        self._room = threading.Semaphore(MOST)

    def add(self, write: Callable[[], object]) -> None:
        """Leaves `write` to be made after those before it; waits while there are too many of them."""
        if self._last.done():
            self.wait()
        self._room.acquire()
        self._last = self._pool.submit(self._make, self._last, write)

    def wait(self) -> None:
        """Returns when all writes are made."""
        self._last.result()

    def close(self) -> None:
        """Waits, then ends the thread; raises nothing, so that what ended the training is what is told."""
        self._pool.shutdown()

    def _make(self, before: concurrent.futures.Future[None], write: Callable[[], object]) -> None:
        try:
            before.result()  # done, since one thread makes all
            write()
        finally:
            self._room.release()
