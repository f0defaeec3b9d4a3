"""Compares every figure on the results pages with its rows, and finds long sentences.

    python -m tools.check_pages          # one line for each figure that differs, and long sentence
    python -m tools.check_pages --write  # renews the figures

A comment, which GitHub doesn't show, follows the figures in a sentence or in a table's line. It holds
a Python expression for each figure; page_figures.py says what it can name:

    ALiBi is at 4.37 ± 0.05<!-- ppl("alibi", 128) --> at its training length.

Expressions stand for the figures between the previous comment and this one, in order, to the digits
printed. A number after "±" is the half-width of the figure before it. A comparison is a claim: it
prints no figure, and has to hold. `<!-- rows: FILE, MORE -->` names the files for the expressions that
follow. At first this is results.jsonl (in README.md and docs/ none). `<!-- rows: none -->` ends the check.

These need no expression: code, links, dates, names, references to tables and sections. Nor do facts in
the named files' rows: lengths, distances, text sizes, parameters, updates and prompts, and seeds,
strides and multiples of L where the text calls them so.

A sentence in the README or docs/ has at most 35 words: page_sentences.py says how they are counted.
"""

import ast
import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from alibi.cli import command_line
from tools import ROOT
from tools.page_figures import Facts, Figures, PerSeed
from tools.page_sentences import WORDS, long_sentences

_WRITE = flags.DEFINE_bool("write", False, "Writes the rows' figures into the pages.")
command_line.own_flags(__name__)

COMMENT = re.compile(r"<!--\s*(.*?)\s*-->")
# What is no figure, though it has digits.
EXEMPT = re.compile(
    r"`[^`]*`"
    r"|\]\([^)]*\)|\[\d+\](?=\()|https?://\S+"  # targets of links, and texts such as [2](table02.md)
    r"|arXiv \d{4}\.\d{4,5}|\d{4}-\d{2}-\d{2}"
    r"|(?:[Tt]able|[Ss]ection|[Ff]ootnote|[Ff]igure|[Aa]ppendix)s? [\d.]+(?:, \d+)*(?: (?:and|to) \d+)?"
    r"|95%(?= (?:t |Wilson )?intervals?)"
    r"|\b(?!x\d)[A-Za-z][\w-]*\d\w*"  # names: T5, GPT-2
)
NUMBER = re.compile(
    r"(?<![\w.])(?P<times>[x×]?)(?P<sign>[+-]?)"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d+))?)(?P<unit>[%kM]?)(?P<rest>\w*)"
)
UNITS = {"": 1, "%": 0.01, "k": 1e3, "M": 1e6}


@dataclasses.dataclass(frozen=True)
class Printed:
    """A number on a page."""

    match: re.Match
    before: str  # the text in front of it
    after: str

    @property
    def text(self) -> str:
        return self.match[0]

    def like(self, value: float) -> str:
        """Returns `value` with the digits, sign, unit and prefix of this number."""
        sign = "+" if self.match["sign"] == "+" else ""
        decimals = len(self.match["decimals"] or "")
        shown = f"{value / UNITS[self.match['unit']]:{sign},.{decimals}f}"
        return self.match["times"] + shown + self.match["unit"]

    def is_fact(self, facts: Facts) -> bool:
        """Whether the rows' facts, rather than their results, say the number."""
        if self.match["times"] or self.match["sign"] or self.match["rest"]:
            return False
        if re.match(r" L\b", self.after):
            return any(self.like(times) == self.text for times in facts.multiples)
        if re.match(r" seeds\b", self.after):
            return self.text == str(len(facts.seeds))
        if re.search(r"\bseed $", self.before):
            return self.text in map(str, facts.seeds)
        if re.search(r"\bstride $", self.before):
            return self.text in map(str, facts.strides)
        if re.match(r" parameters\b", self.after):
            return any(self.like(number) == self.text for number in facts.parameters)
        return self.text in {f"{number:,}" for number in facts.integers}


def checked(page: pathlib.Path, text: str | None = None) -> tuple[str, int, list[str]]:
    """Returns the page with renewed figures, how many figures it has, and the mismatches.

    Args:
      text: the page's text, defaults to the file's.
    """
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    named_in_page = page.parent == ROOT or page.is_relative_to(ROOT / "docs")
    files = [] if named_in_page else ["results.jsonl"]
    lines, count, wrong, fenced = [], 0, [], False
    for line_number, line in enumerate((text or page.read_text()).splitlines(), start=1):
        fenced ^= line.startswith("```")
        named = re.fullmatch(r"<!-- rows: (.*) -->", line)
        if named:
            files = [] if named[1] == "none" else named[1].split(", ")
        elif files and not fenced and not line.startswith("    "):
            line, figures, mismatches = _line(line, Figures(page.parent, files))
            count += figures
            wrong += [f"{name}:{line_number}: {one}" for one in mismatches]
        lines.append(line)
    return "\n".join(lines) + "\n", count, wrong


def _line(line: str, figures: Figures) -> tuple[str, int, list[str]]:
    """Returns the line with its figures renewed, their number, and the mismatches."""
    hidden = COMMENT.sub(lambda match: " " * len(match[0]), line)
    hidden = EXEMPT.sub(lambda match: " " * len(match[0]), hidden)
    numbers = [
        Printed(match, hidden[: match.start()], hidden[match.end() :])
        for match in NUMBER.finditer(hidden)
    ]
    numbers = [number for number in numbers if not number.is_fact(figures.facts)]
    wrong, new, start = [], {}, 0
    for comment in COMMENT.finditer(line):
        here = [number for number in numbers if start <= number.match.start() < comment.start()]
        start = comment.end()
        try:
            for number, expression, value in [*_pairs(here, comment[1], figures)]:
                new[number] = number.like(value)
                if new[number] != number.text:
                    wrong.append(f"{expression}: {number.text} is printed, not {new[number]}")
        except LookupError as error:
            wrong.append(str(error.args[0]))
    for number in numbers:
        if number.match.start() >= start:
            wrong.append(f"{number.text}: no expression says where it comes from")
    for number in sorted(new, key=lambda one: -one.match.start()):
        line = line[: number.match.start()] + new[number] + line[number.match.end() :]
    return line, len(new), wrong


def _pairs(
    numbers: list[Printed], source: str, figures: Figures
) -> Iterator[tuple[Printed, str, float]]:
    """Yields each number with its expression and value. Raises LookupError if one lacks the other."""
    values: list[tuple[str, Any]] = []
    for expression, value in _values(source, figures):
        if value is False:
            raise LookupError(f"{expression}: the rows don't show it")
        values += [(expression, one) for one in _flat(value) if one is not True]
    last = None
    for number in numbers:
        if number.before.endswith("± ") and isinstance(last, PerSeed):
            yield number, expression, last.half
            continue
        if not values:
            raise LookupError(f"{number.text}: no expression says where it comes from")
        expression, last = values.pop(0)
        yield number, expression, last.mean if isinstance(last, PerSeed) else last
    if values:
        raise LookupError(f"{values[0][0]}: no number is printed for it")


def _flat(value: Any) -> list[Any]:
    """Returns the values of nested tuples and lists."""
    if isinstance(value, tuple | list):
        return [one for several in value for one in _flat(several)]
    return [value]


def _values(source: str, figures: Figures) -> Iterator[tuple[str, Any]]:
    """Yields the expressions of a comment with their values."""
    try:
        parsed = ast.parse(f"({source},)", mode="eval").body
    except SyntaxError:
        raise LookupError(f"{source}: no Python expression") from None
    for node in parsed.elts:
        expression = ast.get_source_segment(f"({source},)", node)
        try:
            yield expression, eval(expression, figures.namespace())  # of our own pages
        except (
            LookupError,
            TypeError,
            ValueError,
            NameError,
            AttributeError,
            SyntaxError,
        ) as error:
            raise LookupError(f"{expression}: {error.args[0]}") from None


def pages() -> list[pathlib.Path]:
    """Returns the results pages, and others that name files with rows."""
    named = [page for page in prose() if "<!-- rows: " in page.read_text()]
    return [*named, *sorted((ROOT / "results").glob("**/README.md"))]


def prose() -> list[pathlib.Path]:
    """Returns the pages in which sentences must be short."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("**/*.md")),
    ]


def too_long(page: pathlib.Path) -> list[str]:
    """Returns a line for each sentence of a page that is too long."""
    return [
        f"{page.relative_to(ROOT)}:{line}: {words} words, at most {WORDS}: {sentence}"
        for line, words, sentence in long_sentences(page.read_text())
    ]


def main() -> None:
    counts, wrong = 0, []
    for page in pages():
        text, count, mismatches = checked(page)
        counts += count
        if _WRITE.value and text != page.read_text():
            page.write_text(text)
            mismatches = checked(page)[2]
        wrong += mismatches
    sentences = [one for page in prose() for one in too_long(page)]
    for one in wrong + sentences:
        print(one)
    print(f"{counts} figures on {len(pages())} pages were checked, {len(wrong)} differ")
    print(f"{len(sentences)} sentences on {len(prose())} pages are too long")
    if wrong or sentences:
        sys.exit(1)


if __name__ == "__main__":
    command_line.run(main)
