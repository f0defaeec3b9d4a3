"""How far a piece of work is, on stderr: a bar where a terminal can redraw it, elsewhere a whole line now and then."""

import sys
import time
from types import TracebackType

import tqdm

LINE_SECONDS = 30.0  # between two lines where there is no terminal
DELAY_SECONDS = 0.5  # before a bar of what may be quick, or fail at once, appears


class Progress:
    """The progress of one piece of work, as a context that ends with it.

    A log file, a pipe or a batch system's output gets whole lines and no carriage return; other lines go between
    these by `say`.

    Args:
      title: what is done; each line begins with it.
      total: units of work in all; None where that is not known.
      unit: what stands before their number, such as update; bytes are written with a prefix, such as 1.50M.
      done: units that were done before.
      show: whether anything is shown.
      last: whether the end is shown too, and on a terminal stays; else its result is told otherwise.

    Attributes:
      done: units that are done.
    """

    def __init__(
        self, title: str, total: int | None, unit: str, *, done: int = 0, show: bool = True, last: bool = False
    ):
        self.title, self.total, self.done = title, total, done
        self._unit, self._show, self._last, self._note = unit, show, last, ""
        self._begun = self._told = time.monotonic()
        self._first = self._shown = done
        self._bar = None
        if show and is_terminal():
            ending = "{n_fmt}, {elapsed}"
            if total is not None:
                ending = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
            self._bar = tqdm.tqdm(
                desc=title, initial=done, total=total, leave=last, mininterval=0.2, delay=0 if last else DELAY_SECONDS,
                unit_scale=not last, bar_format=f"{{desc}}: {unit} {ending}",
            )  # fmt: skip

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, units: int, note: str = "") -> None:
        """Notes that so many more `units` are done; `note` stands behind the numbers."""
        self.done += units
        self._note = note
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(units)
        elif self._show and (now := time.monotonic()) - self._told >= LINE_SECONDS:
            self._told = now
            self._line()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._show and self._last and self.done != self._shown:
            self._line()
        self._show = False

    def _line(self) -> None:
        self._shown = self.done
        text = self._amount(self.done)
        if self.total:
            worked, left = self.done - self._first, self.total - self.done
            seconds = (time.monotonic() - self._begun) / worked * left if worked else 0
            text += f" of {self._amount(self.total)} ({min(self.done / self.total, 1.0):.0%})"
            text += f", {tqdm.tqdm.format_interval(seconds)} left" if left > 0 else ""
        say(", ".join(filter(None, [f"{self.title}: {self._unit} {text}", self._note])))

    def _amount(self, units: int) -> str:
        return tqdm.tqdm.format_sizeof(units) if self._unit == "bytes" else f"{units:,}"


def say(line: str) -> None:
    """Writes a line to stderr, whole, and above the bars where there are any."""
    if is_terminal():
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        sys.stderr.write(line + "\n")  # at once: print writes the line's end by itself, and others write here too


def is_terminal() -> bool:
    """Whether stderr is a terminal, which can redraw a line."""
    return sys.stderr.isatty()
