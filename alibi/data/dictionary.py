"""The paper's word dictionary: fairseq's rule for building it, and fairseq's dict.txt."""

import itertools
import os
import pathlib
from collections import Counter
from collections.abc import Iterable

from alibi.data.pieces import Piece

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_MULTIPLE = 8


def count_words(pieces: Iterable[Piece]) -> Counter[str]:
    """How often each word is in a text."""
    counter: Counter[str] = Counter()
    for piece in pieces:
        counter.update(piece.text.split())
    return counter


def make_dictionary(counter: Counter[str]) -> dict[str, int]:
    """Counts by symbol: the specials, then words by falling count (ties by symbol), padded to a multiple of 8.

    A special's own name in the text counts for the special. Raises ValueError when there is no word.
    """
    if not counter:
        raise ValueError("the train split has no word to make a dictionary of; check data.train")
    words = sorted(counter.keys() - set(SPECIALS), key=lambda word: (-counter[word], word))
    return _padded({symbol: counter[symbol] for symbol in (*SPECIALS, *words)})


def read_dictionary(path: str | os.PathLike) -> dict[str, int]:
    """The counts of a dict.txt: one "symbol count" a line, without the specials; padded where it isn't yet.

    Raises ValueError, with the line, for a file that is none.
    """
    try:
        # Only "\n" ends a line: words may hold other characters that Python calls line breaks.
        lines = pathlib.Path(path).expanduser().read_bytes().decode("utf-8").rstrip("\n").split("\n")
    except OSError as error:
        raise ValueError(f"the dictionary {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the dictionary {path} is not UTF-8: {error.reason} at offset {error.start}") from error
    counts = dict.fromkeys(SPECIALS, 0)
    for number, line in enumerate(lines, start=1):
        symbol, _, count = line.rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f'{path}, line {number}: {line[:60]!r} is not "symbol count" as in fairseq\'s dict.txt')
        if symbol in counts:
            raise ValueError(f"{path} holds {symbol!r} twice, or it is one of {', '.join(SPECIALS)}; remove that line")
        counts[symbol] = int(count)
    return _padded(counts)


def write_dictionary(path: str | os.PathLike, counts: dict[str, int]) -> None:
    """Writes a dict.txt that fairseq reads too: without the specials, with the padding."""
    lines = [f"{symbol} {count}\n" for symbol, count in counts.items()][len(SPECIALS) :]
    pathlib.Path(path).write_bytes("".join(lines).encode("utf-8"))


def _padded(counts: dict[str, int]) -> dict[str, int]:
    """The dictionary with words that fairseq makes up; one that the text holds already is no second one."""
    made_up = (f"madeupword{number:04d}" for number in itertools.count())
    while len(counts) % _MULTIPLE:
        counts.setdefault(next(made_up), 0)
    return counts
