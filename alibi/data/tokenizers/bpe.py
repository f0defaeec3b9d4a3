"""Byte-level BPE and other codebases' tokenizers: a document's ids in bounded memory."""

import base64
import hashlib
import itertools
import json
import logging
import pathlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from alibi.data.corpus import Piece
from alibi.data.tokenizers.base import UNFINISHED, Ids, Tokenizer
from alibi.extras import needs

if TYPE_CHECKING:
    import tokenizers as hf

END_OF_TEXT = "<|endoftext|>"
# in other tokenizer.json files
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
MOST_IDS = 1 << 24  # the library counts through all ids, used or not
CHUNK_CHARS = 1 << 14  # of one document, encoded as one text
BATCH_CHARS = 1 << 20  # encoded at a time: enough for all cores, and bounded
# A longer text without a place for a cut is cut all the same: encoding takes memory with its length.
MOST_CHARS = 4 * BATCH_CHARS
# limits on words longer than a chunk, in the training of BPE: the characters of each, the bytes of all,
# where a byte takes 60 bytes of memory
WORD_CHARS, UNSPACED_BYTES = 1 << 12, 8 << 20
RARE = "\U0001242b"  # of cuneiform: outside almost every vocabulary
CHANGEABLE = "A Tab\there, two  spaces, \ufb01ve cafe\u0301s"  # to see whether a normalizer does
_SENTENCEPIECE = "sentencepiece"


class SentencePiece:
    """A SentencePiece model, with the functions that `BpeTokenizer` uses."""

    def __init__(self, content: bytes):
        """`content`: the model's file. Raises ValueError for another, or without the package."""
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ValueError(
                "a SentencePiece model needs the package sentencepiece; pip install 'sentencepiece>=0.2.3'"
            ) from None
        try:
            self._model = SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"it is no SentencePiece model ({error})") from error
        self.content, self.normalizer = content, self
        self.normalize_str = self._model.normalize

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return {self._model.id_to_piece(i): i for i in range(self._model.get_piece_size())}

    @property
    def control_pieces(self) -> list[str]:
        """Names that no text becomes."""
        return [piece for piece, i in self.get_vocab().items() if self._model.is_control(i)]

    def encode(self, text: str, add_special_tokens: bool = False) -> Any:
        ids = self._model.encode(text)
        if add_special_tokens and self._model.bos_id() >= 0:
            ids = [self._model.bos_id(), *ids]
        return types.SimpleNamespace(ids=ids)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = False) -> Any:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._model.decode(ids)

    def to_str(self, pretty: bool = False) -> str:
        encoded = base64.b64encode(self.content).decode()
        return json.dumps({_SENTENCEPIECE: encoded, "model": {"unk_id": self._model.unk_id()}})


class BpeTokenizer(Tokenizer):
    """A tokenizer from Hugging Face's `tokenizers`, or a SentencePiece model. Its end-of-text token
    follows each document.
    """

    name = "bpe"
    file = "tokenizer.json"

    def __init__(
        self, tokenizer: "hf.Tokenizer | SentencePiece", boundary: str, ends: Sequence[int] = ()
    ):
        """`boundary`: the end-of-text token. `ends`: further ids at which an answer ends."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # A document that spells a special token must not end there.
        if not isinstance(tokenizer, SentencePiece):
            tokenizer.encode_special_tokens = True
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if getattr(tokenizer.model, "dropout", None):
                tokenizer.model.dropout = None  # ids would be drawn at random
        rules = json.loads(tokenizer.to_str())
        self.cuts_documents = tokenizer.normalizer is None and _cuts_anywhere(rules)
        self.changes_text = _changes_text(tokenizer.normalizer, rules.get("pre_tokenizer"))
        self._tokenizer: Any = tokenizer
        self.boundary, self.boundary_id = boundary, vocabulary[boundary]
        unknown = rules["model"].get("unk_id", vocabulary.get(rules["model"].get("unk_token")))
        # a boundary is no unknown text
        self.unknown_id = None if unknown == self.boundary_id else unknown
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.ends = tuple(dict.fromkeys([self.boundary_id, *ends]))
        plain, whole = (
            tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True)
        )
        self.bos_id = (
            whole[0] if whole[1 : len(plain) + 1] == plain != whole[: len(plain)] else None
        )
        begins = range(len(whole) - len(plain) + 1)
        first = next((n for n in begins if whole[n : n + len(plain)] == plain), 0)
        self.around = whole[:first], whole[first + len(plain) :]
        special = (
            tokenizer.control_pieces
            if isinstance(tokenizer, SentencePiece)
            else [token["content"] for token in rules["added_tokens"] if token["special"]]
        )
        self.special_ids = {name: vocabulary[name] for name in special}
        self._knowing: dict[str, Any] = {}  # tokenizers that find a special token in a text
        # each byte by its id, if the decoder joins them to characters
        self._bytes = {vocabulary.get(f"<0x{byte:02X}>", -1): byte for byte in range(256)}
        if -1 in self._bytes or self.decode(self._in_bytes(UNFINISHED)) != UNFINISHED:
            self._bytes = {}

    def encode_stream(
        self, pieces: Iterable[Piece], *, after_open_line: bool = False
    ) -> Iterator[Ids]:
        """Yields each document's tokens, as if it were encoded as one text up to `MOST_CHARS`, then the
        boundary.
        """
        waiting = list[str | None]()
        rest, size = "", 0
        for piece in pieces:
            chunks, rest = cut_chunks(
                rest + piece.text, piece.ends_document, whole=not self.cuts_documents
            )
            if len(rest) >= MOST_CHARS:
                chunks, rest = [*chunks, rest], ""
            waiting += [*chunks, None] if piece.ends_document else chunks
            size += sum(map(len, chunks)) + 1  # an empty document takes room too
            if size >= BATCH_CHARS:
                yield from self._encode(waiting)
                waiting, size = [], 0
        # a shard may end within a document
        yield from self._encode([*waiting, *filter(None, [rest])])

    def encode_whole(self, text: str, name: str, token: int) -> list[int]:
        if name not in self.special_ids or isinstance(self._tokenizer, SentencePiece):
            return super().encode_whole(text, name, token)
        if name not in self._knowing:
            rules = json.loads(self._tokenizer.to_str())
            for each in rules["added_tokens"]:  # other special tokens stay plain text
                each["special"] &= each["content"] != name
            self._knowing[name] = library().Tokenizer.from_str(json.dumps(rules))
            self._knowing[name].encode_special_tokens = True
        return self._knowing[name].encode(text).ids

    def _encode(self, chunks: list[str | None]) -> Iterator[Ids]:
        """Yields each chunk's tokens, encoded on all cores, and the boundary for each None."""
        texts = [chunk for chunk in chunks if chunk is not None]
        encodings = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for chunk in chunks:
            yield np.array([self.boundary_id] if chunk is None else next(encodings).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text with boundaries spelt out, and one U+FFFD for an unfinished character."""
        there = (int(i) for i in ids if i < self.vocab_size)
        # Of a run of bytes that is not UTF-8, tokenizers loses the whole characters too, and
        # sentencepiece repeats U+FFFD for each byte.
        runs = (
            self._in_bytes(bytes(self._bytes[i] for i in run).decode(errors="replace"))
            if in_bytes
            else run
            for in_bytes, run in itertools.groupby(there, self._bytes.__contains__)
        )
        return self._tokenizer.decode(
            list(itertools.chain.from_iterable(runs)), skip_special_tokens=False
        )

    def _in_bytes(self, text: str) -> list[int]:
        """Returns the ids for the text's bytes."""
        ids = list(self._bytes)
        return [ids[byte] for byte in text.encode()]

    def fingerprint(self) -> str:
        """Returns the SHA-256 over the tokenizer's JSON and its boundary."""
        return hashlib.sha256(f"{self.boundary}\n{self._tokenizer.to_str()}".encode()).hexdigest()

    def _write(self, folder: pathlib.Path) -> dict[str, Any]:
        # written here: of a full disk the package raises a plain Exception
        (folder / self.file).write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        return {"boundary": self.boundary, "ends": self.ends}

    def hub_file(self) -> tuple[str, bytes]:
        """Returns name and content for the tokenizer's file in a folder for the hub."""
        if isinstance(self._tokenizer, SentencePiece):
            return "tokenizer.model", self._tokenizer.content
        return "tokenizer.json", self._tokenizer.to_str(pretty=True).encode()


def _cuts_anywhere(rules: dict[str, Any]) -> bool:
    """Returns whether the tokenizer always splits before a line end and a visible character, as
    GPT-2's pattern does. (An added token may hold both.)
    """
    cut = rules.get("pre_tokenizer") or {}
    return (
        cut.get("type") == "ByteLevel"
        and cut["use_regex"]
        and not cut["add_prefix_space"]
        and all(token["special"] for token in rules["added_tokens"])
    )


def _changes_text(normalizer: Any, cut: dict[str, Any] | None) -> bool:
    """Returns whether the normalizer changes text, or the pre-tokenizer drops white space."""
    changed = "" if normalizer is None else normalizer.normalize_str(CHANGEABLE)
    steps = cut.get("pretokenizers", [cut]) if cut else []
    return changed.replace("▁", " ").strip() not in ("", CHANGEABLE) or any(
        step["type"].startswith(("Whitespace", "Bert")) for step in steps
    )


def cut_chunks(text: str, ends_document: bool, *, whole: bool = False) -> tuple[list[str], str]:
    """Returns chunks to encode separately, and the rest, which waits for more text. With `whole` a
    document is one chunk.

    A chunk ends before a line end and a visible character, else before such a space. GPT-2's pattern
    splits there in any context, so the ids don't change.
    """
    chunks, start = [], 0
    while not whole and len(text) - start > CHUNK_CHARS:
        near, end = start + CHUNK_CHARS, len(text) - 1
        if not (cut := _chunk_end(text, start, near) or _chunk_end(text, start, end)):
            break
        chunks.append(text[start:cut])
        start = cut
    if ends_document and start < len(text):
        return [*chunks, text[start:]], ""
    return chunks, text[start:]


def _chunk_end(text: str, start: int, stop: int) -> int:
    for mark in "\n", " ":
        cut = text.rfind(mark, start + 1, stop)
        while cut > start:
            if not text[cut + 1].isspace() and (mark == "\n" or not text[cut - 1].isspace()):
                return cut
            cut = text.rfind(mark, start + 1, cut)
    return 0  # no such place


def library() -> types.ModuleType:
    """Returns the package tokenizers. Raises MissingPackageError if it is not installed."""
    needs("data.tokenizer=bpe", "tokenizers")
    import tokenizers

    return tokenizers


def train_bpe(texts: Iterable[str], vocab_size: int) -> "hf.Tokenizer":
    """Returns byte-level BPE with GPT-2's pattern: `<|endoftext|>` = 0, the 256 bytes, then merges.

    It is deterministic. Little text gives fewer entries.
    """
    hf = library()
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_bpe(path: epath.Path) -> "hf.Tokenizer | SentencePiece":
    of_library = library().Tokenizer
    try:
        if path.suffix == ".model":
            return SentencePiece(path.read_bytes())
        text = path.read_bytes().decode("utf-8-sig")
        if f'"{_SENTENCEPIECE}"' in text[:20]:
            return SentencePiece(base64.b64decode(json.loads(text)[_SENTENCEPIECE]))
        return of_library.from_str(text)
    except OSError as error:
        raise ValueError(f"the tokenizer {path} can't be read: {error.strerror}") from error
    except Exception as error:  # the library raises plain Exception for another JSON
        raise ValueError(
            f"{path} is no tokenizer.json of the tokenizers library, nor a SentencePiece .model: {error}"
        ) from error


def fitting(
    tokenizer: "hf.Tokenizer | SentencePiece", rows: int, path: epath.Path
) -> "hf.Tokenizer | SentencePiece":
    """Returns the tokenizer without added tokens beyond the model's `rows`, such as a late [PAD], and
    logs their names. Raises ValueError for other tokens beyond them.
    """
    base, added = (tokenizer.get_vocab(with_added_tokens=added) for added in (False, True))
    if (most := max(base.values(), default=0)) >= rows:
        raise ValueError(
            f"the tokenizer {path} has {most + 1:,} tokens and the model {rows:,} rows for them; give the tokenizer of "
            "this model by --tokenizer_file"
        )
    if not (beyond := sorted(name for name, token in added.items() if token >= rows)):
        return tokenizer
    logging.warning("%s: left out %s, beyond %d rows", path, ", ".join(beyond[:5]), rows)
    rules = json.loads(tokenizer.to_str())
    rules["added_tokens"] = [token for token in rules["added_tokens"] if token["id"] < rows]
    return library().Tokenizer.from_str(json.dumps(rules))


def check_unknown(tokenizer: "hf.Tokenizer | SentencePiece", end: int, path: epath.Path) -> None:
    """Raises ValueError if characters outside the vocabulary are lost, errors, or the token `end`."""
    normalizer = tokenizer.normalizer
    if normalizer is not None and not normalizer.normalize_str(RARE).strip():
        return
    try:
        ids = tokenizer.encode(RARE, add_special_tokens=False).ids
    except Exception:  # the library raises no other class
        ids = []
    if not ids or end in ids:
        raise ValueError(
            f"{path} has no token for characters outside its vocabulary, which would be lost or stop the work; "
            "set model.unk_token (Unigram: unk_id) to a token of its own, or model.byte_fallback"
        )


def spaced(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces, but only the first `WORD_CHARS` in words longer than a chunk, up to
    `UNSPACED_BYTES`: training takes time with a word's square.
    """
    left = UNSPACED_BYTES
    for piece in pieces:
        if len(piece.utf8) > CHUNK_CHARS and len(piece.utf8.split(None, 1)) < 2:
            piece = Piece(piece.text[:WORD_CHARS].encode(), piece.ends_document)
            left -= len(piece.utf8)
            if left < 0:
                continue
        yield piece
