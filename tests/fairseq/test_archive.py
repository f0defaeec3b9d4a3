"""Checkpoints are read as PyTorch reads them, and nothing in them is run."""

import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from alibi.fairseq.archive import OLD_FORMAT, Archive
from alibi.fairseq.unpickle import Record, Storage, Tensor

TINY = pathlib.Path(__file__).resolve().parents[1] / "data" / "fairseq-tiny.pt"


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


@pytest.mark.parametrize(
    ("offset", "shape", "strides"), [(1, (3, 4), (4, 1)), (-1, (2,), (1,)), (0, (2,), (12,)), (0, (2, 2), (1,))]
)
def test_a_view_beyond_its_storage_is_refused(offset, shape, strides):
    with pytest.raises(ValueError, match="doesn't lie in its storage of 12 numbers"):
        Tensor(Storage("0", np.dtype(np.float32), 12), offset, shape, strides, lambda storage: np.zeros(12))


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
