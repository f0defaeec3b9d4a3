"""Tokenizers of other projects: the ids of a document are those of the library for the whole text."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from alibi.config import DataConfig
from alibi.data import tokenizers
from alibi.data.corpus import Piece
from alibi.data.tokenizers import BpeTokenizer, Tokenizer, bpe, given_tokenizer, load_tokenizer
from alibi.data.tokenizers.words import with_whole_words
from alibi.data.tokens import make_corpus, prepare
from alibi.generation.decoding import decode_answer
from tests.data.corpusmaker import sentencepiece_model
from tests.refusals import assert_refused

SPECIALS = ["<unk>", "</s>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def text() -> str:
    book = next(make_corpus(DataConfig()).pieces("valid")).text[:30_000]
    odd = "x" * 700 + " h\u00e9llo \u65e5\u672c\u8a9e \U0001f600\U0001f600"
    return book[:15_000] + odd + book[15_000:]


def made(kind: str, text: str) -> hf.Tokenizer:
    """Returns a small tokenizer like that in Llama 2, Llama 3, BERT or T5."""
    if kind == "BERT":
        tokenizer = hf.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        )
    elif kind == "T5":
        tokenizer = hf.Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        )
    elif kind == "Llama 3":
        tokenizer = hf.Tokenizer(models.BPE())
        split = pre_tokenizers.Split(hf.Regex(LLAMA3), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
    else:
        tokenizer = hf.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
        in_bytes = [f"<0x{number:02X}>" for number in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=SPECIALS + in_bytes, show_progress=False
        )
    # of the beginning, which lacks symbols that are later unknown, or spelt in bytes
    parts = [text[start : start + 500] for start in range(0, 10_000, 500)]
    tokenizer.train_from_iterator(parts, trainer)
    if kind == "Llama 2":
        tokenizer.pre_tokenizer = None
        spaces = decoders.Replace("\u2581", " ")
        tokenizer.decoder = decoders.Sequence(
            [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "changes", "has_unknown"),
    [
        ("Llama 2", False, False),
        ("Llama 3", False, False),
        ("BERT", True, True),
        ("T5", True, True),
    ],
)
def test_the_ids_are_those_of_the_whole_document(text, kind, changes, has_unknown) -> None:
    """Through pieces; the library encodes all at once."""
    library = made(kind, text)
    boundary = next(name for name in ("</s>", "[SEP]") if library.token_to_id(name) is not None)
    tokenizer = BpeTokenizer(library, boundary)
    whole = library.encode(text, add_special_tokens=False).ids
    parts = [text[start : start + 997] for start in range(0, len(text), 997)]
    pieces = [Piece(part.encode(), part is parts[-1]) for part in parts]
    found = np.concatenate(list(tokenizer.encode_stream([*pieces, Piece(b"", True), *pieces])))
    end = [tokenizer.boundary_id]
    assert found.tolist() == whole + end + end + whole + end
    assert (tokenizer.cuts_documents, tokenizer.changes_text) == (False, changes)
    assert (tokenizer.unknown_id in whole) == has_unknown


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model(text, tmp_path, kind) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    file = tmp_path / "spm.model"
    file.write_bytes(
        sentencepiece_model(text[:15_000].splitlines(), vocab_size=300, model_type=kind)
    )
    data = DataConfig(tokenizer="bpe", tokenizer_file=str(file))
    tokenizer = given_tokenizer(data)
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert tokenizer.encode(text).tolist() == [*library.encode(text), library.eos_id()]
    assert (tokenizer.unknown_id, tokenizer.changes_text) == (library.unk_id(), True)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.encode("two words").tolist() == tokenizer.encode("two words").tolist()
    file.write_bytes(b"other")
    assert_refused("SentencePiece", given_tokenizer, data)


@pytest.mark.parametrize("library", ["tokenizers", "sentencepiece"])
def test_whole_characters_before_an_unfinished_one_are_kept(text, library) -> None:
    """As Python decodes the bytes, at each of them: tokenizers and transformers, by themselves, make
    five replacements of an emoji and one byte, sentencepiece up to three of one emoji.
    """
    if library == "tokenizers":
        own: object = made("Llama 2", text)
    else:
        options = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True}
        own = bpe.SentencePiece(sentencepiece_model(text[:15_000].splitlines(), **options))
    tokenizer = BpeTokenizer(own, "</s>")
    vocabulary = {token: name for name, token in own.get_vocab().items()}
    shown = "the \U0001f642\U0001f642\u00df cat \U0001f642\u00df"
    ids, so_far = tokenizer.encode_open(shown), b""
    assert tokenizer.decode(ids) == shown == own.decode(ids, skip_special_tokens=False)
    # a byte that begins nothing, a padded row of the model, bytes of two characters that never end
    byte = {name[3:5]: token for token, name in vocabulary.items() if name.startswith("<0x")}
    ids += [byte["82"], tokenizer.vocab_size, byte["F0"], byte["9F"], byte["C3"], ids[0]]
    for count, token in enumerate(ids, start=1):
        name = vocabulary.get(token, "")
        in_bytes = name.startswith("<0x")
        so_far += bytes.fromhex(name[3:5]) if in_bytes else name.replace("\u2581", " ").encode()
        right = so_far.decode(errors="replace").removeprefix(" ")
        assert tokenizer.decode(ids[:count]) == right


@pytest.mark.parametrize("kind", ["Llama 2", "Llama 3", "BERT", "T5"])
def test_an_answer_begins_with_a_space_only_after_words(text, kind) -> None:
    """After an empty prompt, which is the boundary, it begins a document."""
    library = made(kind, text)
    boundary = next(name for name in ("</s>", "[SEP]") if library.token_to_id(name) is not None)
    tokenizer = BpeTokenizer(library, boundary)
    assert tokenizer.encode_beginning("") == [tokenizer.boundary_id]
    both, first = (tokenizer.encode_open(words) for words in ("the cat", "the"))
    assert decode_answer(tokenizer, tokenizer.encode_beginning(""), both) == "the cat"
    assert decode_answer(tokenizer, [*both, tokenizer.boundary_id], both) == "the cat"
    assert decode_answer(tokenizer, first, both[len(first) :]) == " cat"
    assert tokenizer.special_ids[boundary] == tokenizer.boundary_id


def test_parts_of_a_file_that_gpt2s_own_tokenizer_lacks(text) -> None:
    library = bpe.train_bpe([text[:10_000]], 400)
    assert BpeTokenizer(library, bpe.END_OF_TEXT).cuts_documents
    parts = json.loads(library.to_str())
    parts["model"] |= {"dropout": 0.5, "unk_token": bpe.END_OF_TEXT}
    library = hf.Tokenizer.from_str(json.dumps(parts))
    library.add_tokens(["\n\n"])
    tokenizer = BpeTokenizer(library, bpe.END_OF_TEXT)
    text = text.replace("\n", "\n\n")
    assert not tokenizer.cuts_documents, "a cut before the second line end would split the token"
    ids = tokenizer.encode(text).tolist()
    assert ids[:-1] == library.encode(text, add_special_tokens=False).ids, "no token is dropped out"
    assert tokenizer.unknown_id is None, "the end of a document is no unknown text"
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    assert not tokenizer.changes_text
    assert BpeTokenizer(library, bpe.END_OF_TEXT).changes_text, "white space is lost"


def test_a_document_that_is_too_long_to_be_encoded_at_once_is_cut(text, monkeypatch) -> None:
    monkeypatch.setattr(bpe, "MOST_CHARS", 16_000)
    library, sizes = made("Llama 3", text), []
    encode = library.encode_batch_fast
    library.encode_batch_fast = lambda texts, **how: (
        sizes.extend(map(len, texts)) or encode(texts, **how)
    )
    tokenizer = BpeTokenizer(library, "</s>")
    parts = [text[start : start + 1_000] for start in range(0, len(text), 1_000)]
    pieces = [Piece(part.encode(), part is parts[-1]) for part in parts]
    ids = np.concatenate(list(tokenizer.encode_stream(pieces)))
    assert tokenizer.decode(ids) == text + "</s>"
    assert max(sizes) == 16_000, "memory is bounded"
    whole = library.encode(text, add_special_tokens=False).ids
    assert abs(len(ids) - 1 - len(whole)) <= 1, "one cut"


def test_unknown_tokens_are_counted_and_shards_hold_whole_documents(
    text, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("alibi.data.tokens.SHARD_BYTES", 10_000)
    made("BERT", text).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    data = DataConfig(
        corpus="text",
        train=str(tmp_path / "text.txt"),
        tokenizer="bpe",
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        cache_dir=str(tmp_path / "cache"),
    )
    manifest, tokenizer = prepare(data, "train", progress=False).manifest, given_tokenizer(data)
    ids = tokenizer.encode(text)
    assert manifest.unknown_words == int((ids == tokenizer.unknown_id).sum()) > 0
    assert manifest.tokens == ids.size


def test_a_word_longer_than_a_piece_is_one_word() -> None:
    long = [Piece(b"a " + b"x" * 50, False), Piece(b"x" * 50 + b" b", True)]
    words = tokenizers.WordTokenizer(tokenizers.make_dictionary(long))
    assert words.counts["x" * 100] == 1
    ids = words.encode("a " + "y" * 600_000 + " b").tolist()
    assert (ids.count(words.unknown_id), len(ids)) == (1, 4), "a, the word, b and the line's end"


def test_words_that_pieces_cut_move_to_the_next_piece() -> None:
    pieces = [Piece(b"a b", False), Piece(b"c d", False), Piece(b"\ne", False), Piece(b"f", True)]
    whole = [piece.utf8 for piece in with_whole_words(pieces)]
    assert whole == [b"a ", b"bc ", b"d\n", b"ef"], "a document is not gathered in memory"


def test_words_between_wide_spaces_are_counted_in_pieces(tmp_path) -> None:
    text = "\u65e5\u672c\u3000" * 60_000  # no space of ASCII: pieces end anywhere
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    data = DataConfig(corpus="text", train=str(tmp_path / "text.txt"), cache_dir=str(tmp_path))
    assert prepare(data, "train", progress=False).manifest.words == 60_000


def test_bpe_learns_from_long_documents_and_from_little_of_one_word(tmp_path, monkeypatch) -> None:
    """A document between blank lines comes in pieces that do not end in white space."""
    monkeypatch.setattr("alibi.data.textfiles.PIECE_BYTES", 1_000)
    (tmp_path / "text.txt").write_text("some words and others\n" * 1_000)
    data = DataConfig(
        corpus="text", train=str(tmp_path / "text.txt"), tokenizer="bpe", bpe_vocab_size=270
    )
    for end in ("file", "blank_line"):
        data = dataclasses.replace(data, document_end=end)
        assert tokenizers.make_tokenizer(data, make_corpus(data)).vocab_size == 270
    for name, value in {"CHUNK_CHARS": 10, "WORD_CHARS": 8, "UNSPACED_BYTES": 20}.items():
        monkeypatch.setattr(bpe, name, value)
    pieces = [Piece(b"x" * 15, False)] * 3 + [Piece(b"x y", False), Piece(b"z", True)]
    assert [len(piece.utf8) for piece in bpe.spaced(pieces)] == [8, 8, 3, 1]


def loaded(tokenizer: hf.Tokenizer, folder: pathlib.Path) -> Tokenizer | None:
    """From a file with a byte order mark, as Windows' editors save it."""
    (folder / "tokenizer.json").write_text("\ufeff" + tokenizer.to_str(), encoding="utf-8")
    file = str(folder / "tokenizer.json")
    return given_tokenizer(DataConfig(tokenizer="bpe", tokenizer_file=file))


@pytest.mark.parametrize(
    "model",
    [
        models.BPE({"a": 0, "</s>": 1}, []),
        models.BPE({"a": 0, "</s>": 1}, [], unk_token="</s>"),
        models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"),
        models.Unigram([("a", -1.0), ("</s>", -2.0)]),
    ],
)
def test_a_tokenizer_without_an_unknown_token_is_refused(model, tmp_path) -> None:
    """The library drops such characters without a word, ends a document there, or raises a plain
    Exception in the middle of the text.
    """
    assert_refused("outside its vocabulary", lambda: loaded(hf.Tokenizer(model), tmp_path))
    library = bpe.train_bpe(["the cat sat"], 260)
    assert loaded(library, tmp_path).encode("\u65e5").size == 4, "bytes and the end"
