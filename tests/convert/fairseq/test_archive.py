"""Checkpoints are read as PyTorch reads them, and nothing in them is run."""

import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from alibi.convert.fairseq.archive import OLD_FORMAT, Archive
from alibi.convert.fairseq.unpickle import Record, Storage, Tensor, UnsafePickleError, shown, unpickle

TINY = pathlib.Path(__file__).resolve().parents[2] / "data" / "fairseq-tiny.pt"


class RunsCode:
    """Its pickle asks for a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def rewrite(path, change):
    """The tiny checkpoint with some of its entries changed: `change` maps (name, content) to content or None."""
    with zipfile.ZipFile(TINY) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            content = change(info.filename.partition("/")[2], old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return path


def read_all(path):
    with Archive(path) as archive:
        return [tensor.read() for tensor in archive.content["model"].values()]


def with_pickle(path, content):
    return rewrite(path, lambda name, old: pickle.dumps(content, 2) if name == "data.pkl" else old)


def test_tensors_equal_those_that_pytorch_reads(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is optional: it is what the reader is compared with")
    numbers = torch.arange(24).reshape(4, 6)
    kinds = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    saved = {kind: numbers.to(getattr(torch, kind)) for kind in kinds}
    saved |= {"turned": numbers.T[1:3], "part": numbers[1:, ::2], "number": numbers.sum(), "none": numbers[:0]}
    saved |= {"parameter": torch.nn.Parameter(numbers.float()), "nested": [{"deep": numbers}]}
    torch.save(saved, tmp_path / "x.pt")
    with Archive(tmp_path / "x.pt") as archive:
        found = dict(archive.content)
        assert found.pop("nested")[0]["deep"].shape == (4, 6)
        for name, tensor in found.items():
            values = saved[name].detach()
            np.testing.assert_array_equal(tensor.read().astype(np.float64), values.double().numpy(), err_msg=name)
            if name in kinds:
                assert tensor.dtype == name


def test_other_classes_become_records():
    with Archive(TINY) as archive:
        config, meter = archive.content["cfg"], archive.content["extra_state"]["metrics"]["default"]
    assert isinstance(config, Record)
    assert (config.path, meter.path) == ("omegaconf.DictConfig", "fairseq.AverageMeter")
    assert meter.state == {"val": 3.5}


def test_a_storage_is_read_when_it_is_needed_and_once():
    with Archive(TINY) as archive:
        tensors = archive.content["model"]
        assert archive._loaded == {}
        one, other = (
            tensors[f"decoder.{name}.weight"]
            for name in ("embed_tokens.embeddings.0.0", "adaptive_softmax.head.word_proj")
        )
        assert np.shares_memory(one.read(), other.read())
        assert len(archive._loaded) == 1


@pytest.mark.parametrize("inside", [False, True])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, inside):
    made = tmp_path / "made"
    evil = RunsCode(f"touch {made}")
    path = with_pickle(tmp_path / "x.pt", {"model": {}, "extra_state": [evil]} if inside else evil)
    with pytest.raises(ValueError, match=r"x\.pt can't be used: its pickle names \w+\.system, .* nothing was run"):
        Archive(path)
    assert not made.exists()
    pickle.loads(pickle.dumps(evil))  # here it does run: the pickle is one that works
    assert made.exists()


def test_a_function_of_another_package_becomes_a_record(tmp_path):
    """It isn't imported, whatever it would do."""
    content = b"\x80\x02cnumpy.testing\nrunstring\n(X\x01\x00\x00\x00x}tR."
    path = rewrite(tmp_path / "x.pt", lambda name, old: content if name == "data.pkl" else old)
    with Archive(path) as archive:
        assert archive.content.path == "numpy.testing.runstring"
        assert archive.content.args == ("x", {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("no checkpoint"), "is no PyTorch checkpoint, which would be a zip archive"),
        (lambda path: path.write_bytes(b""), "is no PyTorch checkpoint"),
        (lambda path: path.write_bytes(TINY.read_bytes()[:30_000]), "is truncated or damaged .*fetch it again"),
        (lambda path: path.write_bytes(OLD_FORMAT + b"rest"), "is of the format before PyTorch 1.6"),
        (lambda path: rewrite(path, lambda name, old: None if name == "data.pkl" else old), r"0 files \*/data\.pkl"),
        (lambda path: rewrite(path, lambda name, old: old[:-9] if name == "data.pkl" else old), "pickle is damaged"),
        (lambda path: rewrite(path, lambda name, old: b"big" if name == "byteorder" else old), "big-endian"),
        (lambda path: None, "can't be read: No such file"),
    ],
)
def test_each_damage_is_one_line(tmp_path, make, message):
    path = tmp_path / "x.pt"
    make(path)
    with pytest.raises(ValueError, match=message) as error:
        Archive(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, old: None if name == "data/2" else old, "data/2 is missing"),
        (lambda name, old: old[:-4] if name == "data/2" else old, r"storage 2 has [\d,]+ bytes"),
        (lambda name, old: old + b"1234" if name == "data/2" else old, "at most"),
    ],
)
def test_a_damaged_storage_is_one_line(tmp_path, change, message):
    rewrite(tmp_path / "x.pt", change)
    with pytest.raises(ValueError, match=message):
        read_all(tmp_path / "x.pt")


def test_a_flipped_bit_is_found(tmp_path):
    content = bytearray(TINY.read_bytes())
    with zipfile.ZipFile(TINY) as archive:
        info = max(archive.infolist(), key=lambda info: info.file_size if "/data/" in info.filename else 0)
    content[info.header_offset + 500] ^= 1  # beyond its header
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged .*CRC"):
        read_all(tmp_path / "x.pt")


TWELVE = Storage("0", np.dtype(np.float32), 12)


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "message"),
    [
        (1, (3, 4), (4, 1), "doesn't lie in its storage of 12 numbers"),
        (0, (2,), (12,), "doesn't lie in its storage of 12 numbers"),
        (0, (2**20, 2**20), (0, 0), "doesn't lie in its storage of 12 numbers"),  # 4 TiB of one number
        (-1, (2,), (1,), "ints of at least 0"),
        (0, (2, 2), (1,), "ints of at least 0"),
        (0, (1,), (2**70,), "ints of at least 0"),
        (0, ("2",), (1,), "ints of at least 0"),
    ],
)
def test_a_view_beyond_its_storage_is_refused(offset, shape, strides, message):
    with pytest.raises(ValueError, match=message):
        Tensor(TWELVE, offset, shape, strides, lambda storage: np.zeros(12))


def test_a_view_is_held_to_what_was_read():
    tensor = Tensor(TWELVE, 0, (3, 4), (4, 1), lambda storage: np.zeros(11, np.float32))
    with pytest.raises(ValueError, match="doesn't lie in its storage of 11 numbers"):
        tensor.read()


@pytest.mark.parametrize(("key", "size"), [(0, 12), ("x/../y", 12), ("0", "12"), ("0", -1), ("0", True), ("0", 2**70)])
def test_a_storage_without_key_or_size_is_refused(key, size):
    with pytest.raises(ValueError, match="a numeral as a str and an int of at least 0 are needed"):
        Storage(key, np.dtype(np.float32), size)


STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x0ctQ"  # of 12 numbers
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00(K\x0ct(K\x01ttR"


def unpickled(content):
    return unpickle(b"\x80\x02" + content + b".", lambda storage: np.zeros(storage.size, np.float32))


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (TENSOR + b"}Vshape\n(M\x00\x10tsb", "Tensor"),
        (TENSOR + b"(N}Voffset\nM\x00\x10stb", "Tensor"),  # the state of slots, which are set one by one
        (STORAGE + b"}Vsize\nM\x00\x10sb", "Storage"),
    ],
)
def test_a_pickle_sets_no_attributes_of_what_was_checked(state, name):
    """Such as the shape of a tensor that was found to lie in its storage: it would read other memory."""
    assert unpickled(TENSOR).read().shape == (12,)
    with pytest.raises(ValueError, match=f"it sets attributes of a {name}"):
        unpickled(state)


@pytest.mark.parametrize("put", [b"r\x00\x00\x00\x20", b"p536870912\n"])
def test_a_memo_larger_than_its_pickle_is_refused(put):
    """Python would make room for all of its entries: 8 GiB for these 7 bytes."""
    with pytest.raises(ValueError, match="entry 536870912 of the memo"):
        unpickled(b"}" + put)
    assert unpickled(b"}q\x01") == {}


@pytest.mark.parametrize("code", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_the_registry_of_extensions_is_out_of_reach(code):
    with pytest.raises(UnsafePickleError, match="opcode EXT"):
        unpickled(code)


def test_what_is_large_or_deep_is_shown_short():
    """Forty lists of the one before twice are a few bytes of pickle, and would be a terabyte of message."""
    doubled, deep = ["x" * 1000], {}
    for _ in range(40):
        doubled = [doubled, doubled]
    for _ in range(100_000):
        deep = {"": deep}
    ordered = unpickled(b"ccollections\nOrderedDict\n)R")
    ordered["x"] = doubled
    for value in (doubled, deep, ordered, "x" * 10_000, list(range(10_000))):
        assert len(shown(value)) < 1000
    with pytest.raises(UnsafePickleError) as error:
        unpickled(b"cos\n" + b"x" * 10_000 + b"\n")
    assert len(str(error.value)) < 300


def test_compressed_archives_are_refused(tmp_path):
    """A small file could otherwise fill the memory."""
    with zipfile.ZipFile(TINY) as old:
        content = old.read("fairseq-tiny/data.pkl")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("x/data.pkl", content)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="uncompressed"):
        Archive(tmp_path / "x.pt")
