"""Progress on stderr: a bar on a terminal, elsewhere a line every half minute."""

import contextlib
import sys
import time

from alibi.extras import needs

needs(__name__, "tqdm")

import tqdm

LINE_SECONDS = 30.0  # between two lines if stderr is no terminal
DELAY_SECONDS = 0.5  # before a bar appears, if the work may be quick or fail at once


class Progress(contextlib.AbstractContextManager["Progress", None]):
    """Shows progress, as a context. Log files, pipes and batch systems get whole lines.

    Args:
      title: the work. Each line begins with it.
      total: units in all, or None if unknown.
      unit: a unit's name, such as update. Bytes are shown with a prefix, such as 1.50M.
      done: units done before.
      show: whether to show anything.
      last: whether to show the end too, and leave it on a terminal.

    Attributes:
      done: units done.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        *,
        done: int = 0,
        show: bool = True,
        last: bool = False,
    ):
        self.title, self.total, self.done = title, total, done
        self._unit, self._show, self._last, self._note = unit, show, last, ""
        self._begun = self._line_time = time.monotonic()
        self._first = self._shown = done
        self._bar = None
        if show and is_terminal():
            ending = "{n_fmt}, {elapsed}"
            if total is not None:
                ending = (
                    "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
                )
            self._bar = tqdm.tqdm(
                desc=title, initial=done, total=total, leave=last, mininterval=0.2, delay=0 if last else DELAY_SECONDS,
                unit_scale=not last, bar_format=f"{{desc}}: {unit} {ending}",
            )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, units: int, note: str = "") -> None:
        """Adds `units` to the units done, and shows `note` behind the numbers."""
        self.done += units
        self._note = note
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(units)
        elif self._show and (now := time.monotonic()) - self._line_time >= LINE_SECONDS:
            self._line_time = now
            self._print()

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        if self._bar is not None:
            self._bar.close()
        elif self._show and self._last and self.done != self._shown:
            self._print()
        self._show = False

    def _print(self) -> None:
        self._shown = self.done
        text = self._amount(self.done)
        if self.total:
            worked, left = self.done - self._first, self.total - self.done
            seconds = (time.monotonic() - self._begun) / worked * left if worked else 0
            text += f" of {self._amount(self.total)} ({min(self.done / self.total, 1.0):.0%})"
            text += f", {tqdm.tqdm.format_interval(seconds)} left" if left > 0 else ""
        print_line(", ".join(filter(None, [f"{self.title}: {self._unit} {text}", self._note])))

    def _amount(self, units: int) -> str:
        return tqdm.tqdm.format_sizeof(units) if self._unit == "bytes" else f"{units:,}"


def print_line(line: str) -> None:
    """Writes a whole line to stderr, above the bars if there are any."""
    if is_terminal():
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        # in one piece, unlike print: other processes write to stderr too
        sys.stderr.write(line + "\n")


def is_terminal() -> bool:
    """Returns whether stderr is a terminal, which can redraw a line."""
    return sys.stderr.isatty()
