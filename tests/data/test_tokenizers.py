"""Ids against rules written down elsewhere: UTF-8, fairseq's dictionary, GPT-2's pattern."""

import dataclasses
import errno
import hashlib
import os

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi.config import DataConfig
from alibi.data.corpus import Piece
from alibi.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    WordTokenizer,
    bpe,
    given_tokenizer,
    load_tokenizer,
    make_dictionary,
    make_tokenizer,
    read_dictionary,
    read_tokenizer,
    train_bpe,
)
from alibi.data.tokens import make_corpus
from tests.refusals import assert_refused

TEXT = "The cat sat.\n\nIt's  the\tcat's 12 naïve 漢字 <|endoftext|> mats!\n"


def words_of(*documents):
    return WordTokenizer(make_dictionary(Piece(text.encode(), True) for text in documents))


def stream(tokenizer, *parts):
    return np.concatenate(list(tokenizer.encode_stream(parts))).tolist()


@pytest.fixture(scope="module")
def library_bpe():
    """A tokenizer of the tokenizers library."""
    return train_bpe([next(make_corpus(DataConfig()).pieces("valid")).text[:100_000]], 400)


@pytest.fixture(scope="module")
def trained_bpe(library_bpe):
    return BpeTokenizer(library_bpe, "<|endoftext|>")


# Bytes.


def test_bytes_of_one_document_are_its_utf8():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.boundary_id) == (256, ord("\n"))
    assert tokenizer.encode(TEXT).tolist() == list(TEXT.encode())
    assert tokenizer.encode(TEXT).dtype == np.int32
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("").tolist() == []


def test_bytes_put_one_line_end_between_documents():
    parts = (
        Piece(b"a", True),
        Piece(b"b\n", True),
        Piece(b"", True),
        Piece(b"c", False),
        Piece(b"d", True),
    )
    assert bytes(stream(ByteTokenizer(), *parts)) == b"a\nb\n\ncd"


# Words.


def test_the_dictionary_follows_fairseqs_rule():
    tokenizer = words_of("b a\nc a <unk> b </s>\n", "é\n")
    # Specials; falling count; ties by symbol; 4 + 4 symbols are a multiple of 8 already.
    assert tokenizer.symbols == ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "é"]
    assert words_of("x y\n").symbols[4:] == ["x", "y", "madeupword0000", "madeupword0001"]
    assert words_of("madeupword0001 a\n").symbols[4:] == [
        "a",
        "madeupword0001",
        "madeupword0000",
        "madeupword0002",
    ]


def test_every_line_ends_with_its_boundary_blank_ones_too():
    tokenizer = words_of("a b c\n")
    a, b = tokenizer.encode("a b\n")[:2]
    assert tokenizer.encode("a b\n\n  \nb").tolist() == [a, b, 2, 2, 2, b, 2]
    assert tokenizer.encode("a <unk> nope\r\n").tolist() == [a, 3, 3, 2]
    # An empty document is a blank line: that is how the hub stores WikiText's.
    assert stream(tokenizer, Piece(b"a\n", True), Piece(b"", True), Piece(b"b", True)) == [
        a,
        2,
        2,
        b,
        2,
    ]
    assert tokenizer.decode([a, b, 2, 2, 3, 2]) == "a b\n\n<unk>\n"
    rows = tokenizer.vocab_size  # a model may have more
    assert tokenizer.decode([a, rows, b, rows + 9]) == "a b"
    assert ByteTokenizer().decode([97, 256, 98, 299]) == "ab"


def test_wikitext2_counts_are_those_of_the_paper(shared_dir):
    texts = {
        split: str(shared_dir / f"data/wikitext-2/{split}.txt")
        for split in ("train", "valid", "test")
    }
    data = DataConfig(corpus="text", tokenizer="words", **texts)
    corpus = make_corpus(data)
    tokenizer = make_tokenizer(data, corpus)
    assert tokenizer.vocab_size == 33_280
    counts = {
        split: sum(len(ids) for ids in tokenizer.encode_stream(corpus.pieces(split)))
        for split in ("train", "valid", "test")
    }
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}


def test_a_dict_txt_may_hold_the_padding_or_not(tmp_path):
    (tmp_path / "bare.txt").write_bytes("a 3\nb\u2028c 2\n".encode())
    (tmp_path / "padded.txt").write_bytes(
        "a 3\nb\u2028c 2\nmadeupword0000 0\nmadeupword0001 0\n".encode()
    )
    # as Windows' editors save it
    (tmp_path / "marked.txt").write_bytes("\ufeffa 3\r\nb\u2028c 2\r\n".encode())
    bare, padded, marked = (
        read_dictionary(tmp_path / f"{name}.txt") for name in ("bare", "padded", "marked")
    )
    assert bare == padded == marked
    assert list(bare) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "a",
        "b\u2028c",
        "madeupword0000",
        "madeupword0001",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 3\nb\n", r"line 2: 'b' is not \"symbol count\""),
        (b"", r"line 1: '' is not"),
        (b"a 3\na 2\n", "holds 'a' twice"),
        (b"<unk> 3\n", "holds '<unk>' twice, or it is one of <s>"),
        (b"caf\xe9 1\n", "can't be read in UTF-8: .* in position 3"),
    ],
)
def test_a_bad_dict_txt_is_explained(tmp_path, content, message):
    (tmp_path / "dict.txt").write_bytes(content)
    assert_refused(message, read_dictionary, tmp_path / "dict.txt")


def test_a_text_without_words_has_no_dictionary():
    assert_refused("no word", words_of, " \n")


# BPE.


def test_bpe_may_be_trained_on_a_sample():
    data = DataConfig()
    data = dataclasses.replace(
        data, tokenizer="bpe", bpe_vocab_size=300, tokenizer_train_bytes=5000
    )
    sampled = make_tokenizer(data, make_corpus(data))
    data = dataclasses.replace(data, tokenizer_train_bytes=-1, max_train_bytes=5000)
    assert sampled.fingerprint() == make_tokenizer(data, make_corpus(data)).fingerprint()
    data = dataclasses.replace(data, max_train_bytes=6000)
    assert sampled.fingerprint() != make_tokenizer(data, make_corpus(data)).fingerprint()


def test_bpe_closes_documents_and_round_trips(trained_bpe):
    ids = trained_bpe.encode(TEXT).tolist()
    assert (trained_bpe.vocab_size, trained_bpe.boundary_id) == (400, 0)
    # Text that spells the boundary is only text: the one id 0 closes the document.
    assert ids.count(0) == 1
    assert ids[-1] == 0
    assert trained_bpe.decode(ids) == TEXT + "<|endoftext|>"
    assert trained_bpe.encode("").tolist() == [0]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["\n", "\n\n", " ", "  ", "\t", "a", "it's", "12", "!?", "é", "\u3000", " \n"]
        ),
        max_size=40,
    ),
    st.integers(0, 40),
)
def test_bpe_of_chunks_is_bpe_of_the_whole(library_bpe, trained_bpe, parts, cut):
    text = "".join(parts)
    whole = library_bpe.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "CHUNK_CHARS", 12)
        chunked = stream(
            trained_bpe, Piece(text[:cut].encode(), False), Piece(text[cut:].encode(), True)
        )[:-1]
    assert chunked == whole


def test_bpe_of_a_word_longer_than_a_batch_is_bpe_of_the_whole(
    library_bpe, trained_bpe, monkeypatch
):
    """Chunks that end within a word give tokens that the word does not have."""
    word = "".join(np.random.default_rng(0).choice(list("etaoinsh"), 9_000))
    text = f"before {word} after\n"
    for name, value in {"CHUNK_CHARS": 200, "BATCH_CHARS": 1_000}.items():
        monkeypatch.setattr(bpe, name, value)
    pieces = [Piece(text[at : at + 500].encode(), False) for at in range(0, len(text), 500)]
    end, next_document = Piece(b"", True), Piece(b"next", True)
    whole = library_bpe.encode(text, add_special_tokens=False).ids
    after = [0, *library_bpe.encode("next", add_special_tokens=False).ids, 0]
    assert stream(trained_bpe, *pieces, end, next_document) == whole + after
    assert stream(trained_bpe, *pieces) == whole, "a shard may end within a document"


def test_bpe_learns_merges_from_a_text_without_spaces(tmp_path):
    """From the beginning of each piece: of these whole pieces, five merges take half a minute."""
    (tmp_path / "dna.txt").write_text("acgtta" * 100_000)
    data = DataConfig(
        corpus="text",
        train=str(tmp_path / "dna.txt"),
        tokenizer="bpe",
        bpe_vocab_size=262,
    )
    assert make_tokenizer(data, make_corpus(data)).vocab_size == 262


def test_bpe_of_many_documents_is_that_of_each(trained_bpe, monkeypatch):
    """Short documents are encoded many at a time; where a batch ends must not show."""
    documents = [
        Piece(text.encode(), True)
        for text in ("one two", "", "three\n\nfour", "five" * 9, "", "six")
    ]
    each = [token for document in documents for token in stream(trained_bpe, document)]
    assert each.count(0) == len(documents)
    assert list(trained_bpe.encode_stream([])) == []
    for size in (1, 12, 1 << 20):
        monkeypatch.setattr(bpe, "BATCH_CHARS", size)
        assert stream(trained_bpe, *documents) == each


def test_added_tokens_that_a_model_has_no_rows_for_are_left_out(tmp_path, caplog):
    """Their names are text then. A token of the vocabulary itself can't be left out."""
    library = train_bpe(["the cat sat on the mat"], 260)
    library.save(str(tmp_path / "own.json"))
    rows = library.get_vocab_size()
    library.add_special_tokens(["[PAD]"])
    library.add_tokens(["[USER]"])
    library.save(str(tmp_path / "grown.json"))
    own, cut = (read_tokenizer(tmp_path / f"{name}.json", (), rows) for name in ("own", "grown"))
    assert caplog.messages == [f"{tmp_path}/grown.json: left out [PAD], [USER], beyond {rows} rows"]
    assert (cut.vocab_size, cut.fingerprint()) == (rows, own.fingerprint())
    assert cut.decode(cut.encode_open("[PAD] [USER]")) == "[PAD] [USER]"
    assert_refused(
        rf"{rows} tokens.* {rows - 1} rows", read_tokenizer, tmp_path / "grown.json", (), rows - 1
    )


def test_a_loaded_tokenizer_needs_an_end_of_text_token(tmp_path):
    data = DataConfig()
    data = dataclasses.replace(
        data, tokenizer="bpe", tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    tokenizer = hf.Tokenizer(hf.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    tokenizer.save(data.tokenizer_file)
    assert_refused(r"tokenizer\.json.*add one of <\|endoftext\|>, </s>", given_tokenizer, data)
    # One that a model's eos_token_id names, which its saved copy keeps.
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>"])
    tokenizer.save(data.tokenizer_file)
    read_tokenizer(data.tokenizer_file, [2, 9, 3]).save(tmp_path / "saved")
    saved = dataclasses.replace(data, tokenizer_file=str(tmp_path / "saved" / "tokenizer.json"))
    for made in (load_tokenizer(tmp_path / "saved"), given_tokenizer(saved)):
        assert (made.boundary, made.boundary_id, made.ends) == ("<|end|>", 2, (2, 9, 3))
        assert made.encode("a").tolist() == [0, 2]
    tokenizer = hf.Tokenizer(tokenizer.model)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.save(data.tokenizer_file)
    made = given_tokenizer(data)
    assert (made.boundary_id, made.vocab_size, made.ends) == (2, 3, (2,))
    # Of several ends the common name stands between documents; of unknown ids none does.
    assert read_tokenizer(data.tokenizer_file, [0, 2]).ends == (2, 0)
    assert read_tokenizer(data.tokenizer_file, [7]).ends == (2, 7)
    # Neither the template nor the truncation that the file asks for: a document is whole and closed
    # once.
    assert made.encode("a b a a").tolist() == [0, 1, 0, 0, 2]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert_refused(r"tokenizer\.json.*SentencePiece", given_tokenizer, data)
    data = dataclasses.replace(data, tokenizer_file=str(tmp_path / "missing.json"))
    assert_refused(r"missing\.json.* can't be read", given_tokenizer, data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokenizer": "bytes", "tokenizer_file": "dict.txt"},
            "tokenizer_file=dict.txt is not used by data.tokenizer=b",
        ),
        (
            {"tokenizer": "words", "tokenizer_train_bytes": 9},
            "is not used with data.tokenizer=words: only a BPE",
        ),
        (
            {"tokenizer": "bpe", "tokenizer_file": "t.json", "tokenizer_train_bytes": 9},
            "not used with data.tokenizer_fi",
        ),
    ],
)
def test_options_that_are_not_used(options, message):
    assert_refused(message, given_tokenizer, DataConfig(**options))


# All.


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a file that is full")
def test_a_full_disk_is_an_error_of_the_system(tmp_path, trained_bpe):
    """Not the plain Exception of the tokenizers package, which the cache can't tell from a bug."""
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    assert_refused(rf"Errno {errno.ENOSPC}\b", trained_bpe.save, tmp_path, raised=OSError)


def test_saved_tokenizers_come_back_the_same(tmp_path, trained_bpe):
    for tokenizer in (ByteTokenizer(), words_of(TEXT), trained_bpe):
        folder = tmp_path / tokenizer.name
        tokenizer.save(folder)
        loaded = load_tokenizer(folder)
        assert type(loaded) is type(tokenizer)
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert (loaded.vocab_size, loaded.boundary_id) == (
            tokenizer.vocab_size,
            tokenizer.boundary_id,
        )
        np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
    assert (
        len({load_tokenizer(tmp_path / name).fingerprint() for name in ("bytes", "words", "bpe")})
        == 3
    )
    assert_refused(r"no saved tokenizer.*save\(\)", load_tokenizer, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"name": "morse"}')
    assert_refused("'morse'", load_tokenizer, tmp_path)
    # Half a dictionary is one too, of other ids.
    dictionary = tmp_path / "words" / "dict.txt"
    dictionary.write_text("".join(dictionary.read_text().splitlines(keepends=True)[:2]))
    assert_refused(r"words/dict\.txt.*SHA-256", load_tokenizer, tmp_path / "words")


def test_bpe_training_is_deterministic(library_bpe):
    """Across processes: the merges, in their order, are those recorded with tokenizers 0.23."""
    ids = library_bpe.get_vocab()
    content = "\n".join(sorted(ids, key=ids.get)).encode()
    recorded = "add41c660e7c9aed8e8f294248abfc25eeb919bb5a7b036e87e83d5301318d3e"
    assert hashlib.sha256(content).hexdigest() == recorded
