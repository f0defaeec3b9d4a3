"""What the cells of the paper's tables measure: how a number is printed there, read back and compared."""

import dataclasses
import re
from collections.abc import Callable

from alibi.reporting.tables import format_perplexity

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "GB": 1e9}


@dataclasses.dataclass(frozen=True)
class Measure:
    """A quantity of a table; `relative`: its difference is a share of the paper's value, not a number of its unit."""

    format: Callable[[float], str]
    relative: bool = True

    def difference(self, paper: float, ours: float) -> float:
        """How far `ours` is from `paper`: in its unit, or as a share of the paper's value."""
        return ours / paper - 1 if self.relative else ours - paper

    def format_difference(self, value: float) -> str:
        """Signed: +0.07, or +3% where it is a share."""
        return f"{100 * value:+,.0f}%" if self.relative else format_signed(value)


def format_thousands(value: float) -> str:
    """28.5k from a thousand on, as the paper prints words per second, updates and hours; else three digits."""
    return f"{value / 1e3:,.1f}k" if value >= 1e3 else f"{value:.3g}"


def format_gigabytes(value: float) -> str:
    """15.3 GB of 1e9 bytes."""
    return f"{value / 1e9:.1f} GB"


def format_millions(value: float) -> str:
    """247M; a decimal below ten."""
    return f"{value / 1e6:.0f}M" if value >= 1e7 else f"{value / 1e6:.1f}M"


def format_signed(value: float) -> str:
    """Two decimals with a sign, none from a hundred on: +0.07, -1,234."""
    return f"{value:+.2f}" if abs(value) < 99.995 else f"{value:+,.0f}"


PERPLEXITY = Measure(format_perplexity, relative=False)
WORDS_PER_SECOND = Measure("{:.0f}".format)
THOUSANDS = Measure(format_thousands)
MEMORY = Measure(format_gigabytes)
PARAMETERS = Measure(format_millions)


def parse_printed(text: str) -> float | None:
    """The number of a printed cell such as 19.73, 28.5k, 247M or 15.3 GB; None for one without (OOM)."""
    found = re.fullmatch(r"([\d.]+) ?(k|M|GB|)", text)
    return float(found[1]) * UNITS[found[2]] if found else None
