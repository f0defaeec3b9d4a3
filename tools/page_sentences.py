"""Finds the sentences of a page that are too long for a first reading: see check_pages.py."""

import re

WORDS = 35  # the most of a sentence

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A sentence ends before a capital, a digit, code or a mark, but not after these abbreviations.
END = re.compile(r"(?<=[.!?])(?<!\bet al\.)(?<!\be\.g\.)(?<!\bi\.e\.)[\"')*]*\s+(?=[^a-z])")


def long_sentences(text: str) -> list[tuple[int, int, str]]:
    """Returns each sentence with more than 35 words: the line where its paragraph begins, its number of
    words, and the sentence.

    White space divides words, also in `code`. Code blocks, tables, headings, comments and link targets
    don't count. Each list item is a paragraph.
    """
    return [
        (line, len(words), sentence)
        for line, paragraph in _paragraphs(text)
        for sentence in END.split(LINK.sub(r"\1", paragraph))
        if len(words := sentence.split()) > WORDS
    ]


def _paragraphs(text: str) -> list[tuple[int, str]]:
    """Returns paragraphs and list items, each with the number of its first line."""
    text = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    paragraphs: list[tuple[int, str]] = []
    fenced, begins = False, True
    for line_number, line in enumerate(text.splitlines(), start=1):
        mark = line.lstrip().startswith("```")
        fenced ^= mark
        item = ITEM.match(line)
        indented = line.startswith("    ") and begins and not item
        if mark or fenced or indented or not line.strip() or line.startswith(("|", "#")):
            begins = True
        elif begins or item:
            paragraphs.append((line_number, line[item.end() :] if item else line))
            begins = False
        else:
            paragraphs[-1] = (paragraphs[-1][0], f"{paragraphs[-1][1]} {line.strip()}")
    return paragraphs
