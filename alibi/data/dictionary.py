"""The paper's word dictionary: fairseq's rule for building it, and fairseq's dict.txt."""

import os
import pathlib
from collections import Counter
from collections.abc import Iterable

from alibi.data.pieces import Piece

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_MULTIPLE = 8


def count_words(pieces: Iterable[Piece]) -> tuple[list[str], list[int]]:
    """Symbols and counts: the specials, then words by falling count (ties by symbol), padded to a multiple of 8.

    A special's own name in the text counts for the special. Raises ValueError when there is no word.
    """
    counter: Counter[str] = Counter()
    for piece in pieces:
        counter.update(piece.text.split())
    if not counter:
        raise ValueError("the train split has no word to make a dictionary of; check data.train")
    words = sorted(counter.keys() - set(SPECIALS), key=lambda word: (-counter[word], word))
    symbols = [*SPECIALS, *words]
    return _pad(symbols, [counter[symbol] for symbol in symbols])


def read_dictionary(path: str | os.PathLike) -> tuple[list[str], list[int]]:
    """Symbols and counts of a dict.txt: one "symbol count" a line, without the specials; padded where it isn't yet.

    Raises ValueError, with the line, for a file that is none.
    """
    symbols, counts = list(SPECIALS), [0] * len(SPECIALS)
    try:
        # Only "\n" ends a line: words may hold other characters that Python calls line breaks.
        lines = pathlib.Path(path).expanduser().read_bytes().decode("utf-8").rstrip("\n").split("\n")
    except OSError as error:
        raise ValueError(f"the dictionary {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the dictionary {path} is not UTF-8: {error.reason} at offset {error.start}") from error
    for number, line in enumerate(lines, start=1):
        symbol, _, count = line.rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f'{path}, line {number}: {line[:60]!r} is not "symbol count" as in fairseq\'s dict.txt')
        symbols.append(symbol)
        counts.append(int(count))
    repeated = [symbol for symbol, number in Counter(symbols).items() if number > 1]
    if repeated:
        raise ValueError(f"{path} holds {repeated[0]!r} twice, or it is one of {', '.join(SPECIALS)}; remove that line")
    return _pad(symbols, counts)


def write_dictionary(path: str | os.PathLike, symbols: list[str], counts: list[int]) -> None:
    """Writes a dict.txt that fairseq reads too: without the specials, with the padding."""
    pairs = zip(symbols[len(SPECIALS) :], counts[len(SPECIALS) :], strict=True)
    pathlib.Path(path).write_bytes("".join(f"{symbol} {count}\n" for symbol, count in pairs).encode("utf-8"))


def _pad(symbols: list[str], counts: list[int]) -> tuple[list[str], list[int]]:
    missing = -len(symbols) % _MULTIPLE
    padding = [f"madeupword{i:04d}" for i in range(missing)]
    return [*symbols, *padding], [*counts, *[0] * missing]
