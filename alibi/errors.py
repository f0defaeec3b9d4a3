"""How a process ends: exit codes, errors in a line on stderr, and signals."""

import contextlib
import errno
import os
import pathlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from alibi.extras import MissingPackageError

# Exit codes of the entry points.
FAILED = 1  # somebody must fix the cause: starting again is no use
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped with all work saved; the same command goes on
# environment variable: the file that `print_error` writes to as well
ERROR_FILE = "ALIBI_ERROR_FILE"
OF_SWEEP = "ALIBI_OF_SWEEP"  # environment variable: set if a sweep started the process
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# User and password of an address, a key or token in its query, and a token of the hub.
_SECRETS = re.compile(
    r"(:/{1,2})[^/\s]+(?=@)|(://)[^/\s:@]*:(?!\d+/)[^\s@]+(?=@)"  # a slash in it, but no port
    r"|\b((?-i:hf_))[a-z0-9]{20,}"
    r"|([?&#;][\w.-]*(?:key|token|secret|password|credential|signature|sig)[\w.-]*=)[^&#,;\s'\")]+",
    re.IGNORECASE,
)
# From terminals, from launchers and clusters that take a machine back, and from a terminal that is
# gone.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ANSWER_SECONDS = 1.0  # in which Python answers a signal, unless a library computes


def masked(text: str) -> str:
    """Returns `text` with *** in place of secrets in addresses, for messages and records.

    Example:
      >>> masked("s3://user:word@bucket/x?token=abc")
      's3://***@bucket/x?token=***'
    """
    return _SECRETS.sub(lambda match: f"{match[match.lastindex or 0]}***", text)


class UserError(RuntimeError):
    """An error for the user to fix: the message names the cause, the need and the remedy."""


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to stop. All work is saved, and the same command goes on."""


def is_disk_full(error: Exception) -> bool:
    """Returns whether an error, from Python or a library, is a full disk or quota."""
    return "no space left on device" in str(error).lower() or (
        isinstance(error, OSError) and error.errno in NO_SPACE
    )


@contextlib.contextmanager
def disk_errors_named(path: object) -> Iterator[None]:
    """Turns a full disk's error into a UserError with the remedy."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"no space left to write {path}; what was saved before is whole: make space and repeat the command"
        ) from error


def is_watched() -> bool:
    """Returns whether a sweep started this process, and prints its output among others'."""
    return OF_SWEEP in os.environ


def print_error(reason: str) -> None:
    """Prints why something failed to stderr, and the first time to the file in `ERROR_FILE` too."""
    reason = masked(reason)
    print(f"error: {reason}", file=sys.stderr, flush=True)
    if file := os.environ.pop(ERROR_FILE, None):
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as kept:
            kept.write(reason)


def cause(error: OSError) -> str:
    """Returns why reading or writing failed, such as a file in a folder's place."""
    if isinstance(error, NotADirectoryError | FileExistsError) and error.filename:
        path = pathlib.Path(error.filename)
        if file := next(filter(pathlib.Path.is_file, (path, *path.parents)), None):
            return f"{file} is a file, not a directory"
    return error.strerror or str(error)


def explain(error: Exception) -> str | None:
    """Returns a line with cause and remedy, or None for a bug in this project."""
    text = str(error)
    first_line = text.strip().partition("\n")[0][:300]
    if "too many open files" in text.lower():
        return f"no more files can be opened; allow more (ulimit -n 4096) and repeat the command: {first_line}"
    if not isinstance(error, ValueError | UserError) and is_disk_full(error):
        return f"{text}: make space and repeat the command; what was written before is whole"
    if isinstance(error, BrokenPipeError):
        return "the reader of the output ended before all was printed; all files are written"
    # JAX asserts that there is a backend: with JAX_PLATFORMS=cuda there is none without a GPU.
    asserted = isinstance(error, AssertionError) and traceback.format_tb(error.__traceback__)[-1:]
    if re.search("Unable to initialize backend|No visible|_default_backend", f"{text}{asserted}"):
        wanted = os.environ.get("JAX_PLATFORMS", "")
        return (
            f"JAX_PLATFORMS={wanted} names a platform that isn't here; unset it, set it to cpu, or install "
            f"JAX for that platform: {first_line or 'no device was found'}"
        )
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return (
            "there is not enough memory; use a smaller train.max_device_tokens, train.batch_tokens or "
            f"eval.batch_tokens, a smaller model, or more devices with mesh.fsdp: {first_line or type(error).__name__}"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename2 or error.filename}: {cause(error)}; give another path"
    told = isinstance(error, ValueError | OSError | UserError | MissingPackageError)
    return text if told else None


@contextlib.contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], None], signals: Iterable[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Lets `handler` handle `signals` inside. A hangup that `nohup` ignores stays ignored."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {each: signal.signal(each, handler) for each in signals if each not in ignored}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


def ignore_signals() -> None:
    """Ignores SIGNALS in a process at its end: launchers signal a job twice."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextlib.contextmanager
def signals_raised(signals: Iterable[signal.Signals] = SIGNALS) -> Iterator[list[int]]:
    """Lets the first of `signals` raise Interrupted in the main thread inside. Later ones don't,
    except Ctrl-C.

    If the main thread doesn't answer within ANSWER_SECONDS, as in a compilation, the process ends
    with REQUEUE. If a destructor or a library's callback loses the exception, the signal is sent
    again. Yields the list of received signals.
    """
    received: list[int] = []

    def handler(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1 or signum == signal.SIGINT:
            raise Interrupted

    def send_again(lost: Any) -> None:
        if isinstance(lost.exc_value, Interrupted):
            threading.Timer(0.1, os.kill, [os.getpid(), received.pop()]).start()
        else:
            hook(lost)

    def end_if_unanswered() -> None:
        with open(reader, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                is_answered = signal.getsignal(byte[0]) is not handler  # by another handler
                time.sleep(ANSWER_SECONDS)
                if not (is_answered or received) and signal.getsignal(byte[0]) is handler:
                    os.write(2, b"\nstopped; all work is saved, and the same command goes on\n")
                    os._exit(REQUEUE)

    hook, sys.unraisablehook = sys.unraisablehook, send_again
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=end_if_unanswered, daemon=True).start()
    try:
        with signals_handled(handler, signals):
            yield received
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread
