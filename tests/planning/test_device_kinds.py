"""Devices by their names in JAX, and the share of their peak in metrics."""

import pathlib
import timeit

import numpy as np
import pytest

from alibi.devices import kinds as device_kinds
from alibi.devices.kinds import (
    DEVICE_KINDS,
    DeviceKind,
    find_device_kind,
    known_device_kind,
)
from alibi.model.flops import model_flops
from alibi.training import loop
from tests.training.runs import rows


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TPU v5 lite", "TPU v5e"),
        ("tpu-v5e", "TPU v5e"),
        ("v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU 7x"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("cpu", None),
        ("", None),
    ],
)
def test_names(name: str, kind: str | None) -> None:
    found = find_device_kind(name)
    assert (found and found.name) == kind


def test_each_name_is_of_one_kind() -> None:
    for kind in DEVICE_KINDS:
        assert {find_device_kind(name) for name in (kind.name, *kind.names)} == {kind}
        assert kind.source.startswith("https://")
        assert 1e12 < kind.float32 <= kind.bfloat16 < 1e16
        assert kind.usable_memory < kind.memory


def test_this_machine() -> None:
    """Its speed is that of a product, measured here again, at another size; a busy machine is
    slower by much.
    """
    kind = known_device_kind("CPU")
    assert (kind.platform, known_device_kind("cpu")) == ("cpu", kind)
    matrix = np.ones((512, 512), np.float32)
    seconds = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=20))
    assert 0.05 < kind.float32 / (2 * 512**3 / seconds) < 20
    assert kind.usable_memory < kind.memory


def test_mfu_where_the_device_is_known(
    tiny_config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if CPUs were in the table: the share counts the operations of the model."""
    known = DeviceKind("cpu", (), 2e12, 1e12, 2**30, 1e9, "https://")
    monkeypatch.setattr(device_kinds, "DEVICE_KINDS", (known,))
    config = tiny_config()
    loop.train(config, str(tmp_path / "run"))
    shares = [row for row in rows(tmp_path / "run") if "tokens_per_second" in row]
    assert shares
    for row in shares:
        assert row["mfu"] == pytest.approx(
            row["tokens_per_second"] * model_flops(config, 256) / 1e12
        )
