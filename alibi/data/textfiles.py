"""Text files, plain or packed, read in bounded memory. A file is a document, or lines or blank
lines end documents.
"""

import bz2
import codecs
import dataclasses
import glob
import gzip
import hashlib
import itertools
import lzma
import mmap
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from alibi.data.booklist import JOINED
from alibi.data.corpus import (
    BORDER,
    PIECE_BYTES,
    SHARD_BYTES,
    Corpus,
    Piece,
    Shard,
    limit_bytes,
    one_document,
)
from alibi.data.datafiles import DATA_FILES, read_column, row_documents
from alibi.extras import needs
from alibi.storage.cache import file_sha256

# A larger file is identified by its size, its time of change and the hash of its two ends.
WHOLE_HASH_BYTES = 256 << 20
END_BYTES = 1 << 20
_ZST_WINDOW = 1 << 31  # the longest, that of `zstd --long=31`; the library's own limit is 1 << 27
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
MARK = codecs.BOM_UTF8  # at the beginning of files of some editors; no part of the text
# First bytes of other files, with the remedy.
_FOREIGN = {
    codecs.BOM_UTF32_LE: "UTF-32; convert it by iconv -f utf-32 -t utf-8",
    codecs.BOM_UTF32_BE: "UTF-32; convert it by iconv -f utf-32 -t utf-8",
    codecs.BOM_UTF16_LE: "UTF-16; convert it by iconv -f utf-16 -t utf-8",
    codecs.BOM_UTF16_BE: "UTF-16; convert it by iconv -f utf-16 -t utf-8",
    b"PK\x03\x04": "a zip archive; unzip it, and name its text files",
    b"%PDF-": "a PDF; convert it by pdftotext",
    b"\x1f\x8b": "a gzip file; name it with .gz at its end",
    b"BZh91AY&SY": "a bzip2 file; name it with .bz2 at its end",
    b"\xfd7zXZ": "an xz file; name it with .xz at its end",
    b"\x28\xb5\x2f\xfd": "a Zstandard file; name it with .zst at its end",
}
_NO_TEXT = "no text, since it holds a NUL byte, as archives do; if it is UTF-16, use iconv -f utf-16le -t utf-8"
_PACKED = (*_OPENERS, ".zst")
_LINE_END = re.compile(rb"\r?\n")
# Blank lines belong to the document before them. They may hold white space, as in WikiText. The
# expression begins with a literal, which makes the search fast, and no match begins within a run of
# empty lines, whose end may lie in the next text: the time would grow with the square of the run.
_BLANK_LINES = re.compile(rb"\n(?<!\n\n)(?<!\n\r\n)(?:[ \t\r]*\n)+(?=[ \t\r]*[^ \t\r\n])")


@dataclasses.dataclass(frozen=True)
class _Range:
    """A file, or a plain file's bytes from `start` to `stop`."""

    path: pathlib.Path
    start: int = 0
    stop: int = sys.maxsize
    ends_file: bool = True


class TextFiles(Corpus):
    """UTF-8 files, plain, .gz, .xz, .bz2 or .zst. A split names them: paths and globs with commas
    between them, or a list.

    Each file is a document. With `document_end` "blank_line" or "line" it holds several. Blank lines
    belong to the document before them. A line's end belongs to none. Each row of a .jsonl, .csv or
    .parquet file is a document with the text in `column`.
    """

    name = "text"
    splits_are_files = True

    def __init__(self, data: Any):
        """`data`: the config section, or a mapping that may lack `document_end` and `column`.

        Raises ValueError if the end is unknown.
        """
        super().__init__(data)
        keys = {"document_end": "file", "column": "text"}
        keys |= data if isinstance(data, Mapping) else vars(data)
        self._end, self._column = keys["document_end"], keys["column"]
        if self._end not in ("file", "blank_line", "line"):
            raise ValueError(
                f"data.document_end={self._end!r} is unknown; use file, blank_line or line"
            )
        self._identities: dict[pathlib.Path, dict[str, Any]] = {}

    def files(self, split: str) -> list[pathlib.Path]:
        """Returns the split's files in their order. A glob's files are sorted.

        Raises ValueError if there is none.
        """
        if not (named := self.data[split]):
            raise ValueError(
                f"data.{split} is empty, but corpus=text needs the files of this split; set data.{split}"
            )
        if isinstance(named, str):  # a name may hold a comma
            named = [named] if os.path.isfile(named) else filter(str.strip, named.split(","))
        return [
            pathlib.Path(file)
            for name in map(os.fspath, named)
            for file in _find_files(os.path.expanduser(name.strip()), split)
        ]

    def pieces(self, split: str) -> Iterator[Piece]:
        """Returns the documents. Raises ValueError for a file that is empty, damaged or not UTF-8."""
        return self._read(_Range(path) for path in self.files(split))

    def shards(self, split: str, max_bytes: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Shard]:
        """Yields the shards. Of plain files only the shard's pieces are read. Packed files are read
        from their beginning.
        """
        if self.size(split) is None:
            yield from super().shards(split, max_bytes, shard_bytes)
            return
        left, line_open = max_bytes, False
        for ranges in self._ranges(split, shard_bytes):
            if left == 0:
                return
            yield Shard(limit_bytes(self._read(ranges), left), line_open)
            line_open = ranges[-1].ends_file and not _ends_line(ranges[-1].path)
            if left > 0:
                left = max(left - sum(span.stop - span.start for span in ranges), 0)

    def sample(self, split: str, max_bytes: int, sample_bytes: int) -> Iterator[Piece]:
        """Yields about `sample_bytes`: each shard's beginning in plain files, or the first
        packed file's.
        """
        if self.size(split) is None:
            return super().sample(split, max_bytes, sample_bytes)
        shards = list(self.shards(split, max_bytes))
        each = -(-sample_bytes // len(shards))
        return (piece for shard in shards for piece in limit_bytes(shard.pieces, each))

    def description(self, split: str) -> dict[str, Any]:
        """Returns the files' hashes, without their names, and how documents end."""
        files = self.files(split)
        for path in files:  # kept: hashing takes time
            self._identities[path] = self._identities.get(path) or _identity(path)
        content = {"corpus": self.name, "files": [self._identities[path] for path in files]}
        if self._end != "file":  # in earlier tokens blank lines were empty
            content |= {"document_end": self._end, "blank_lines": "may hold white space"}
        return content | ({"column": self._column} if any(map(_data_kind, files)) else {})

    def title(self, split: str) -> str:
        """Returns the files' names without their folders, globs as they are written."""
        named = self.data[split]
        names = named.split(",") if isinstance(named, str) else named
        return ",".join(pathlib.PurePath(name).name for name in names)

    def source(self, split: str) -> str:
        """Returns the paths."""
        return "text: " + ", ".join(map(str, self.files(split)))

    def size(self, split: str) -> int | None:
        """Returns the files' bytes, or None if some are no text."""
        files = self.files(split)
        if self._end == "line" or any(path.suffix in _PACKED or _data_kind(path) for path in files):
            return None
        return sum(path.stat().st_size for path in files)

    def _read(self, ranges: Iterable[_Range]) -> Iterator[Piece]:
        for span in ranges:
            texts = _texts(span)
            if kind := _data_kind(span.path):
                values = read_column(span.path, kind, texts, self._column)
                yield from row_documents(values, self._column, f"text: {span.path}")
            elif self._end == "file":
                yield from one_document(texts, ends=span.ends_file)
            else:
                yield from _at_ends(texts, lines=self._end == "line")

    def _ranges(self, split: str, shard_bytes: int) -> Iterator[list[_Range]]:
        """Yields the ranges in plain files that make each shard."""
        shard, room = list[_Range](), shard_bytes
        cuts = self.cuts_documents or self._end == "blank_line"
        for path in self.files(split):
            size, start, stop = path.stat().st_size, 0, -1
            while stop < size:  # an empty file is a range too: its reader raises an error
                is_last = start + room >= size or not cuts
                stop = size if is_last else self._border(path, start + room)
                shard.append(_Range(path, start, stop, stop == size))
                room -= stop - start
                start = stop
                if room <= 0:
                    yield shard
                    shard, room = [], shard_bytes
        if shard:
            yield shard

    def _border(self, path: pathlib.Path, position: int) -> int:
        """Returns the first byte from `position` on where a file may be cut, or its size."""
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if self._end == "file":
                border = BORDER.search(content, position)
                return border.start() if border else len(content)
            blank = _BLANK_LINES.search(content, position)
            return blank.end() if blank else len(content)


def _ends_line(path: pathlib.Path) -> bool:
    """Returns whether a file is empty or its last line has an end."""
    with path.open("rb") as stream:
        stream.seek(max(path.stat().st_size - 1, 0))
        return stream.read() in (b"\n", b"")


def _data_kind(path: pathlib.Path) -> str:
    """Returns a data file's suffix before that for its packing, or an empty text."""
    suffix = path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix
    return suffix if suffix in DATA_FILES else ""


def _find_files(name: str, split: str) -> list[str]:
    """Returns the file `name`, or the files that match it."""
    if os.path.isdir(name):
        raise ValueError(
            f"{name} is a directory; name its files, for example {os.path.join(name, '*.txt')}"
        )
    if os.path.exists(name):
        return [name]
    files = sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
    if not files:
        missing = "no file matches" if glob.has_magic(name) else "there is no file"
        is_unset = name == split  # the splits of other corpora are the defaults
        remedies = {
            "train": "set data.train" if is_unset else "correct data.train",
            "file": "correct the path",
        }
        remedy = remedies.get(split, f"set data.{split}, or leave it empty for none")
        if name.startswith(JOINED):
            remedy += (
                f", or make the file by scripts/join_books.py --books=FOLDER --output_dir={JOINED}"
            )
        unset = f"data.{split} is not set, and " if is_unset else ""
        raise ValueError(f"{unset}{missing} {name!r} (seen from {os.getcwd()}); {remedy}")
    return files


def _at_ends(texts: Iterable[bytes], *, lines: bool) -> Iterator[Piece]:
    """Yields a text's documents: lines without their ends, or each document with the blank
    lines after it.
    """
    rest, is_open = b"", False
    for text in texts:
        rest, start = rest + text, 0
        for end in (_LINE_END if lines else _BLANK_LINES).finditer(rest):
            yield Piece(rest[start : end.start() if lines else end.end()], ends_document=True)
            start, is_open = end.end(), False
        rest = rest[start:]
        # the end may continue in the next text
        if len(rest) > PIECE_BYTES and (head := rest.rstrip(b" \t\r\n")):
            yield Piece(head, ends_document=False)
            rest, is_open = rest[len(head) :], True
    if rest or is_open:
        yield Piece(rest, ends_document=True)


def _texts(span: _Range) -> Iterator[bytes]:
    """Yields a range as successive texts, cut after a line end, else after a space or a
    character.
    """
    path, offset, rest = span.path, span.start, b""
    for block in itertools.chain(_blocks(span), [b""]):  # the last one leaves no character open
        if offset == 0 and not rest:
            block = _without_mark(path, block)
        rest += block
        cut = rest.rfind(b"\n") + 1 if block else len(rest)
        if not cut and len(rest) >= PIECE_BYTES:
            cut = rest.rfind(b" ") + 1 or len(rest)
        text = rest[:cut]
        try:
            if not _is_utf8(text):
                _, cut = codecs.utf_8_decode(text, "strict", not block)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8: byte 0x{rest[error.start]:02x} at offset {offset + error.start:,} of the "
                f"text ({error.reason}); convert it from its encoding, by iconv -f latin1 -t utf-8 if that is Latin-1"
            ) from None
        yield text[:cut]
        offset, rest = offset + cut, rest[cut:]
    if offset == span.start:
        raise ValueError(
            f"{path} is empty; a text needs at least one character, so name another file or remove it"
        )


def _without_mark(path: pathlib.Path, first: bytes) -> bytes:
    """Returns a file's first bytes without a byte order mark. Raises ValueError for other files than
    texts.
    """
    kinds = [kind for begin, kind in _FOREIGN.items() if first.startswith(begin)]
    if kinds or b"\0" in first:
        raise ValueError(f"{path} is {[*kinds, _NO_TEXT][0]}")
    return first.removeprefix(MARK)


def _is_utf8(text: bytes) -> bool:
    """Returns whether `text` is whole characters, several times as fast as Python decodes it."""
    needs("a text file", "pyarrow")
    import pyarrow as pa  # takes a tenth of a second to import

    ends = pa.py_buffer(np.array([0, len(text)], np.int32))
    try:
        pa.StringArray.from_buffers(1, ends, pa.py_buffer(text)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _blocks(span: _Range) -> Iterator[bytes]:
    """Yields a range's bytes, unpacked."""
    path, left = span.path, span.stop - span.start
    try:
        if path.suffix == ".zst":
            yield from filter(None, _zst_blocks(path))
            return
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            stream.seek(span.start)
            while block := stream.read(min(left, PIECE_BYTES)):
                left -= len(block)
                yield block
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path} is not a whole {path.suffix} file ({error}); fetch or pack it again"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from error


def _zst_blocks(path: pathlib.Path) -> Iterator[bytes]:
    needs(f"{path}", "zstandard")
    import zstandard

    # zstandard's own stream reader does not notice that a file was truncated.
    unpacker = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW)
    unpack = unpacker.decompressobj()
    with path.open("rb") as stream:
        while packed := unpack.unused_data or stream.read(1 << 14):
            if unpack.eof:  # the next frame begins
                unpack = unpacker.decompressobj()
            try:
                yield unpack.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
    if not unpack.eof:
        raise EOFError("it ends inside a frame")


def _identity(path: pathlib.Path) -> dict[str, Any]:
    """Returns a file's size, packing and hash. See `WHOLE_HASH_BYTES`."""
    status = path.stat()
    packed = path.suffix if path.suffix in _PACKED else ""
    identity: dict[str, Any] = {"bytes": status.st_size, "packed": packed}
    with path.open("rb") as stream:
        if stream.read(len(MARK)) == MARK:
            identity["mark"] = "removed"  # it was part of earlier tokens
        if status.st_size <= WHOLE_HASH_BYTES:
            return identity | {"sha256": file_sha256(path)}
        stream.seek(0)
        ends = stream.read(END_BYTES)
        stream.seek(-END_BYTES, os.SEEK_END)
        ends += stream.read()
    hashed = {"changed_ns": status.st_mtime_ns, "ends_sha256": hashlib.sha256(ends).hexdigest()}
    return identity | hashed
