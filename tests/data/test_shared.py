"""A cache at an address: made once, fetched by other hosts to caches of their own, and never half there."""

import dataclasses
import uuid

import pytest
from alibi.data.making import Makers

from alibi.config import DataConfig
from alibi.data import making, tokens
from alibi.data.shared import SharedCache
from alibi.storage.store import Store, open_store


@pytest.fixture
def data(tmp_path, s3_bucket):
    """The section of a config, whose cache is an empty folder of a bucket."""
    (tmp_path / "train.txt").write_text("one two\nthree\n\n")
    (tmp_path / "valid.txt").write_text("one zwei two\n")
    texts = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid")}
    cache = f"{s3_bucket}/{uuid.uuid4().hex}"
    return DataConfig(corpus="text", tokenizer="words", cache_dir=cache, **texts)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that makes this process one of the host of a name, with a cache of its own, and prepares there."""

    def prepare(name, data, split="train"):
        monkeypatch.setenv("ALIBI_CACHE", str(tmp_path / name))
        tokens.check_sources(data, ("train", "valid"))
        made = tokens.prepare(data, split, progress=False)
        assert made.directory.is_relative_to(tmp_path / name)
        return made

    return prepare


def lists(store: Store, kind: str) -> list[str]:
    return [name for name in store.names(kind) if name.count("/") == 1]


def test_what_one_host_made_the_others_fetch(data, host, monkeypatch):
    first = [host("first", data, split) for split in ("train", "valid")]
    monkeypatch.setattr(making, "write_shard", lambda *_: pytest.fail("made again"))
    second = [host("second", data, split) for split in ("train", "valid")]
    for one, other in zip(first, second, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.manifest == other.manifest
        assert sorted(path.name for path in other.directory.iterdir()) == ["manifest.json", "tokenizer", "tokens.bin"]
    store = open_store(data.cache_dir)
    assert (len(lists(store, "tokens")), len(lists(store, "tokenizers"))) == (2, 1)


def test_what_a_killed_host_left_there_is_written_again(data, host):
    expected = host("first", data).tokens.tolist()
    store = open_store(data.cache_dir)
    (made,) = lists(store, "tokens")
    store.delete(made)  # it was killed before it was done
    (half,) = (name for name in store.names(made.removesuffix(".json")) if name.endswith("tokens.bin"))
    store.write(half, b"ha")
    assert host("second", data).tokens.tolist() == expected
    assert lists(store, "tokens") == [made]
    assert host("third", data).tokens.tolist() == expected


def test_two_hosts_that_put_it_there_at_once_with_text_in_other_places(data, host, tmp_path, monkeypatch):
    """Their manifests differ in where the text lay: what is listed is of one of them, whoever writes last."""
    both = []
    with monkeypatch.context() as patch:
        patch.setattr(SharedCache, "has", lambda *_: False)  # as each sees it before the other is done
        for name in ("first", "second"):
            text = tmp_path / f"{name}.txt"
            text.write_text("one two\nthree\n\n")
            data = dataclasses.replace(data, train=str(text))
            both.append(host(name, data))
    assert both[0].manifest.source != both[1].manifest.source
    assert host("third", data).manifest == both[0].manifest


def test_damage_there_is_named_and_leaves_nothing_here(data, host, tmp_path):
    directory = host("first", data).directory
    store, name = open_store(data.cache_dir), f"tokens/{directory.name}"
    (ids,) = (file for file in store.names(name) if file.endswith("tokens.bin"))
    store.write(ids, b"\0" * (directory / "tokens.bin").stat().st_size)
    with pytest.raises(ValueError, match=r"is damaged \(the SHA-256 of tokens.bin is another\); delete .*\.json, and"):
        host("second", data)
    assert not list((tmp_path / "second" / "tokens").glob("[!.]*"))
    store.delete(f"{name}.json")
    expected = host("first", data).tokens.tolist()  # has it still, and puts it there
    assert host("third", data).tokens.tolist() == expected


def test_what_cannot_be_served_is_told_before_any_work(data, host):
    with pytest.raises(ValueError, match=r"2 hosts make shards in one directory, and data\.cache_dir=s3://"):
        tokens.prepare(data, "train", makers=Makers(hosts=2))
    for place in ("gs:/bucket", "http://bucket/x"):
        data = dataclasses.replace(data, cache_dir=place)
        with pytest.raises(ValueError, match="give gs://BUCKET/PATH"):
            tokens.check_sources(data, ("train",))
    data = dataclasses.replace(data, cache_dir="s3://no-such-bucket/x")
    with pytest.raises(OSError, match="the bucket does not exist"):
        host("first", data)
