"""Progress on stderr: a bar on a terminal, elsewhere a line every half minute."""

import contextlib
import io
import sys

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
        self.done, terminal = done, is_terminal()
        numbers = "{n_fmt}, {elapsed}{postfix}"
        if total is not None:
            bar = "|{bar:20}| " if terminal else ", "
            numbers = (
                f"{{percentage:3.0f}}%{bar}{{n_fmt}}/{{total_fmt}}, {{remaining}} left{{postfix}}"
            )
        kind, seconds = (tqdm.tqdm, 0.2) if terminal else (_Lines, LINE_SECONDS)
        delay = DELAY_SECONDS if terminal and not last else 0
        self._bar = kind(
            desc=title, initial=done, total=total, leave=last, mininterval=seconds, miniters=1, disable=not show,
            delay=delay, unit_scale=not last, bar_format=f"{{desc}}: {unit} {numbers}",
            file=None if terminal else io.StringIO(),
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, units: int, note: str = "") -> None:
        """Adds `units` to the units done, and shows `note` behind the numbers."""
        self.done += units
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(units)

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        self._bar.close()


class _Lines(tqdm.tqdm):
    """Lines in place of a bar."""

    monitor_interval = 0  # else a thread sees to bars that stand still
    _printed = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Prints a line, unless it would be the last one again, or the empty line at a bar's end."""
        if msg is None and self.n not in (self.initial, self._printed):
            self._printed = self.n
            print_line(str(self))


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
