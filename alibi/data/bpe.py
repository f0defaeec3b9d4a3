"""Byte-level BPE through Hugging Face's `tokenizers`: training, reading, and encoding text in bounded chunks."""

import pathlib
from collections.abc import Iterable

import tokenizers as hf

END_OF_TEXT = "<|endoftext|>"
# What other tokenizer.json files call the token between two documents.
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
CHUNK_CHARS = 1 << 14  # of a text, that are encoded as one
BATCH_CHARS = 1 << 20  # that are encoded at a time: enough for all cores, and bounded


def train_bpe(texts: Iterable[str], vocab_size: int) -> hf.Tokenizer:
    """Byte-level BPE with GPT-2's pattern: `<|endoftext|>` = 0, then the 256 bytes, then the merges; deterministic.

    Raises ValueError when `vocab_size` has no room for those 257. Little text
    gives fewer entries.
    """
    if vocab_size < 257:
        raise ValueError(f"data.bpe_vocab_size={vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257 or more")
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


def read_bpe(path: pathlib.Path) -> hf.Tokenizer:
    """The tokenizer of a tokenizer.json; ValueError when it can't be read or is none."""
    try:
        return hf.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the tokenizer {path} can't be read: {error.strerror}") from error
    except Exception as error:  # the library raises plain Exception for a file that is no tokenizer
        raise ValueError(f"{path} is no tokenizer.json of the tokenizers library: {error}") from error


def find_end_of_text(tokenizer: hf.Tokenizer, path: pathlib.Path) -> str:
    """The token that stands between documents; ValueError when the vocabulary of `path` has none."""
    for name in END_OF_TEXT_NAMES:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise ValueError(
        f"{path} has no end-of-text token, which must stand between documents; "
        f"add one of {', '.join(END_OF_TEXT_NAMES)} to its vocabulary"
    )


def cut_chunks(text: str, ends_document: bool) -> tuple[list[str], str]:
    """Chunks to encode on their own, and the rest, which must wait for more text of the document.

    A chunk ends before a line end that a visible character follows, else before
    such a space: there GPT-2's pattern has a border whatever surrounds it, so
    the ids are those of the document encoded whole.
    """
    chunks, start = [], 0
    while len(text) - start > CHUNK_CHARS:
        cut = _border(text, start, start + CHUNK_CHARS)
        chunks.append(text[start:cut])
        start = cut
    if ends_document and start < len(text):
        return [*chunks, text[start:]], ""
    return chunks, text[start:]


def _border(text: str, start: int, stop: int) -> int:
    for mark in "\n", " ":
        cut = text.rfind(mark, start + 1, stop)
        while cut > start:
            if not text[cut + 1].isspace() and (mark == "\n" or not text[cut - 1].isspace()):
                return cut
            cut = text.rfind(mark, start + 1, cut)
    return stop  # no border in so many characters: cut anywhere
