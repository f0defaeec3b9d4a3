"""The list of texts has each text that committed rows were scored on and trained on, and their hashes
are those of the texts that a user can make.
"""

import dataclasses
import hashlib
import json

import pytest

from alibi.data.books import Books, KeyPrompts
from alibi.data.corpus import limit_bytes
from alibi.data.tokenizers import ByteTokenizer
from alibi.data.tokens import make_corpus, prepare
from alibi.evaluation.task import make_examples
from alibi.storage.cache import content_key
from alibi.sweeps.definition import load_config
from tests.hosts import ROOT

RESULTS = ROOT / "results"
LIST = json.loads((RESULTS / "texts.json").read_text())
TEXTS, PROMPTS, EXAMPLES = LIST["texts"], LIST["prompts"], LIST["examples"]
ROWS = [
    (file.relative_to(RESULTS).parts[0], json.loads(line))
    for file in sorted(RESULTS.rglob("*.jsonl"))
    for line in file.read_text().splitlines()
]


def test_each_scored_text_is_listed_with_the_folders_of_its_rows():
    """Rows of prompts with passkeys have the hash of the prompts alone, those of a task that of its
    examples, and lines of an analysis that of the tokens.
    """
    known = {
        (text["corpus"], text["split"], text["text_hash"], text["tokens_sha256"]): text
        for text in TEXTS
        if text["split"] != "train"
    }
    prompts = {(one["length"], one["distance"], one["tokens_sha256"]) for one in PROMPTS}
    examples = {tuple(one.values()) for one in EXAMPLES}
    found, found_prompts, found_examples = {}, set(), set()
    for folder, row in ROWS:
        if row.get("evaluator") == "passkey":
            found_prompts.add((*row["cell"].values(), row["tokens_sha256"]))
        elif row.get("evaluator") in ("task", "task_gaps"):
            made = row["corpus"], row["cell"]["length"], row["options"]["examples"]
            found_examples.add((*made, row["tokens_sha256"]))
        elif "analysis" in row:
            assert row["tokens_sha256"] in {text["tokens_sha256"] for text in known.values()}
        else:
            text = (row["corpus"], row["split"], row["text_hash"], row["tokens_sha256"])
            found.setdefault(text, set()).add(folder)
    assert found == {key: set(text["rows"]) for key, text in known.items()}
    assert found_prompts == prompts
    assert found_examples == examples


def test_each_folder_of_rows_has_the_text_of_its_training():
    folders = [folder for text in TEXTS if text["split"] == "train" for folder in text["rows"]]
    assert {*folders} == {folder for folder, _ in ROWS}
    known = {(folder, text["tokens_sha256"]) for text in TEXTS for folder in text["rows"]}
    assert known >= {(folder, row["trained_on"]) for folder, row in ROWS if "trained_on" in row}


def told(manifest):
    """Returns what the list tells of a text, from its manifest."""
    text = {"text": manifest.description, "max_bytes": manifest.max_bytes}
    names = ("tokenizer", "bytes", "documents", "tokens")
    return {
        **{name: getattr(manifest, name) for name in names},
        "text_hash": content_key(text)[:12],
        "tokens_sha256": manifest.sha256,
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


# A BPE of 68 MB takes a minute, and texts of tasks take half of one each: their beginnings are below.
# The long books are checked beside their list.
@pytest.mark.parametrize(
    "listed",
    [
        text
        for text in TEXTS
        if text["corpus"] == "books" or (text["corpus"], text["split"]) == ("passkeys", "valid")
    ],
    ids=lambda text: f"{text['config']}-{text['split']}",
)
def test_listed_texts_are_made_anew(listed, cache):
    data = dataclasses.replace(load_config(listed["config"], {}).data, cache_dir=str(cache))
    made = told(prepare(data, listed["split"], progress=False).manifest)
    assert made == {key: listed[key] for key in made}


@pytest.mark.parametrize(
    ("config", "sha256"),
    [
        ("passkey.py:length=128", "f3660e3d64a3720e"),
        ("task.py:data.task=copy", "5eec1e79836666b1"),
        ("task.py:data.task=flip_flop", "7aa0d52b41fc83d7"),
        ("task.py:data.task=recall_few", "462f6fabd94e2d52"),
    ],
)
def test_training_texts_begin_as_those_that_are_listed(config, sha256):
    """The first 64 KiB, by the code that made a whole text with the listed hash."""
    pieces = make_corpus(load_config(f"configs/{config}", {}).data).pieces("train")
    text = b"".join(piece.utf8 for piece in limit_bytes(pieces, 1 << 16))
    assert hashlib.sha256(text).hexdigest().startswith(sha256)


def test_hashes_of_the_long_books_follow_from_their_list():
    """So they are right also where the books are not."""
    content = json.loads((ROOT / "configs" / "long_books.json").read_text())["texts"]
    for text in TEXTS:
        if text["corpus"].endswith(".txt"):
            identity, data = (
                content[text["corpus"].removesuffix(".txt")] | {"packed": ""},
                load_config(text["config"], {}).data,
            )
            limit = data.max_train_bytes if text["split"] == "train" else data.max_valid_bytes
            about = {"text": {"corpus": "text", "files": [identity]}, "max_bytes": limit}
            assert content_key(about)[:12] == text["text_hash"]


def test_listed_prompts_are_made_anew():
    text = b"".join(piece.utf8 for piece in Books({"valid": "valid"}).pieces("valid"))
    keys = KeyPrompts(text, ByteTokenizer())
    for one in PROMPTS:
        prompts = keys.make(one["length"], one["distance"], one["count"])
        assert hashlib.sha256(prompts.tobytes()).hexdigest() == one["tokens_sha256"]


def test_listed_examples_are_made_anew():
    for one in EXAMPLES:
        tokens, _ = make_examples(one["task"], one["length"], one["count"])
        assert hashlib.sha256(tokens.tobytes()).hexdigest() == one["tokens_sha256"]
