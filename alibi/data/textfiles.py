"""Text files, plain or packed; each file is a document, read in bounded memory."""

import codecs
import glob
import gzip
import hashlib
import itertools
import lzma
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from alibi.data.cache import file_sha256
from alibi.data.pieces import PIECE_BYTES, Corpus, Piece, one_document

# A file above this many bytes is known by its size, its time of change and the hash of its two ends.
WHOLE_HASH_BYTES = 256 << 20
_END_BYTES = 1 << 20


class TextFiles(Corpus):
    """Files named for each split by comma-separated paths and globs, or by a list of paths: UTF-8, .gz, .xz or .zst."""

    name = "text"

    def files(self, split: str) -> list[pathlib.Path]:
        """The files of `split`: in the order written, those of a glob sorted; ValueError when there is none."""
        place = self._data[split]
        if not place:
            raise ValueError(f"data.{split} is empty, but corpus=text needs the files of this split; set data.{split}")
        if not isinstance(place, str):
            parts = [os.fspath(part) for part in place]
        elif os.path.isfile(place):  # a name may hold a comma
            parts = [place]
        else:
            parts = [part.strip() for part in place.split(",") if part.strip()]
        remedy = _REMEDIES.get(split, "correct the path")
        return [pathlib.Path(name) for part in parts for name in _find_files(os.path.expanduser(part), remedy)]

    def pieces(self, split: str) -> Iterator[Piece]:
        """Each file as a document; ValueError for one that is empty, damaged or not UTF-8."""
        for path in self.files(split):
            yield from one_document(_texts(path))

    def description(self, split: str) -> dict[str, Any]:
        """The contents of the files, whatever their names."""
        return {"corpus": self.name, "files": [_identity(path) for path in self.files(split)]}

    def title(self, split: str) -> str:
        """The files' names without their folders, globs as they were given."""
        place = self._data[split]
        parts = place.split(",") if isinstance(place, str) else place
        return ",".join(pathlib.PurePath(part).name for part in parts)

    def source(self, split: str) -> str:
        """The paths."""
        return "text: " + ", ".join(map(str, self.files(split)))

    def size(self, split: str) -> int | None:
        """Bytes of the files, unless one is packed."""
        files = self.files(split)
        return None if any(path.suffix in _PACKED for path in files) else sum(path.stat().st_size for path in files)


_REMEDIES = {
    "train": "correct data.train",
    "valid": "set data.valid, or leave it empty for no validation",
    "test": "set data.test, or leave it empty",
}


def _find_files(part: str, remedy: str) -> list[str]:
    """The file, or those that match the glob, `part`."""
    if os.path.isdir(part):
        raise ValueError(f"{part} is a directory; name its files, for example {os.path.join(part, '*.txt')}")
    if os.path.exists(part):
        return [part]
    found = sorted(name for name in glob.glob(part, recursive=True) if os.path.isfile(name))
    if not found:
        missing = "no file matches" if glob.has_magic(part) else "there is no file"
        raise ValueError(f"{missing} {part!r} (seen from {os.getcwd()}); {remedy}")
    return found


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_PACKED = (*_OPENERS, ".zst")


def _texts(path: pathlib.Path) -> Iterator[str]:
    """Successive texts of one file, cut after a line end, or after a space or a character where lines are too long."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, rest = 0, ""
    for block in itertools.chain(filter(None, _blocks(path)), [b""]):  # the last: no character may stay open
        try:
            rest += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:  # in what was left of the block before, and this one
            start = offset + len(block) - len(error.object) + error.start
            raise ValueError(
                f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {start:,} of the text "
                f"({error.reason}); convert the file, for example with iconv -f latin1 -t utf-8"
            ) from None
        offset += len(block)
        cut = rest.rfind("\n") + 1
        if not cut and len(rest) >= PIECE_BYTES:
            cut = rest.rfind(" ") + 1 or len(rest)
        yield rest[:cut]
        rest = rest[cut:]
    if not offset:
        raise ValueError(f"{path} is empty; a text needs at least one character, so name another file or remove it")
    yield rest


def _blocks(path: pathlib.Path) -> Iterator[bytes]:
    try:
        if path.suffix == ".zst":
            yield from _zst_blocks(path)
            return
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            while block := stream.read(PIECE_BYTES):
                yield block
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
        raise ValueError(f"{path} is not a whole {path.suffix} file ({error}); fetch or pack it again") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from error


def _zst_blocks(path: pathlib.Path) -> Iterator[bytes]:
    # zstandard's own stream reader takes a truncated file for a whole one.
    with path.open("rb") as stream:
        unpack = zstandard.ZstdDecompressor().decompressobj()
        while packed := stream.read(1 << 14):
            while packed:
                yield unpack.decompress(packed)
                packed = unpack.unused_data
                if packed:  # the next frame
                    unpack = zstandard.ZstdDecompressor().decompressobj()
        if not unpack.eof:
            raise EOFError("it ends inside a frame")


def _identity(path: pathlib.Path) -> dict[str, Any]:
    status = path.stat()
    identity: dict[str, Any] = {"bytes": status.st_size, "packed": path.suffix if path.suffix in _PACKED else ""}
    if status.st_size <= WHOLE_HASH_BYTES:
        return identity | {"sha256": file_sha256(path)}
    with path.open("rb") as stream:
        ends = stream.read(_END_BYTES)
        stream.seek(-_END_BYTES, os.SEEK_END)
        ends += stream.read()
    return identity | {"changed_ns": status.st_mtime_ns, "ends_sha256": hashlib.sha256(ends).hexdigest()}
