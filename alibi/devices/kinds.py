"""Devices' peak speed, memory and bandwidth, under the names that JAX and makers use."""

import dataclasses
import functools
import os
import re
import timeit

import jax

GIB = 2**30
MEASURED_SIZE = 1024  # rows and columns of the product that measures this machine

_TPU = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A device as JAX counts: half a chip on TPU v2, v3 and 7x, otherwise a chip or GPU.

    Attributes:
      name: the maker's name.
      names: other names, such as `jax.Device.device_kind`.
      bfloat16, float32: peak operations per second in products of this dtype, without sparsity, as
        JAX computes them by default: float32 takes one pass of bfloat16 on TPUs, and TF32 on GPUs
        that have it.
      memory: bytes, a sixteenth less on GPUs with GDDR6, for error correction.
      bandwidth: bytes per second between device and memory, or 0 if unknown.
      source: a page with these figures, for TPUs per chip.
    """

    name: str
    names: tuple[str, ...]
    bfloat16: float
    float32: float
    memory: int
    bandwidth: float
    source: str

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu, as `jax.default_backend()` returns it."""
        return {"TPU": "tpu", "CPUs": "cpu"}.get(self.name.split()[0], "gpu")

    @property
    def usable_memory(self) -> int:
        """The bytes for a program: 95% on TPUs, and 75%, JAX's default, on GPUs and machines."""
        return int(self.memory * (0.95 if self.platform == "tpu" else 0.75))

    def peak(self, dtype: str) -> float:
        """Returns the peak operations per second of products in `dtype`, float32 or bfloat16."""
        return getattr(self, dtype)


DEVICE_KINDS = (
    DeviceKind("TPU v2", (), 22.5e12, 22.5e12, 8 * GIB, 350e9, _TPU + "v2"),
    DeviceKind("TPU v3", (), 61.5e12, 61.5e12, 16 * GIB, 450e9, _TPU + "v3"),
    DeviceKind("TPU v4", (), 275e12, 275e12, 32 * GIB, 1200e9, _TPU + "v4"),
    DeviceKind("TPU v5e", ("TPU v5 lite", "v5litepod"), 197e12, 197e12, 16 * GIB, 819e9, _TPU + "v5e"),
    DeviceKind("TPU v5p", ("TPU v5",), 459e12, 459e12, 95 * GIB, 2765e9, _TPU + "v5p"),
    DeviceKind("TPU v6e", ("TPU v6 lite", "Trillium"), 918e12, 918e12, 32 * GIB, 1638e9, _TPU + "v6e"),
    DeviceKind("TPU 7x", ("TPU7x", "TPU v7x", "TPU v7", "Ironwood"), 1153.5e12, 1153.5e12, 96 * GIB, 3690e9,
               _TPU + "tpu7x"),
    DeviceKind("RTX 3090", (), 71e12, 35.6e12, 24 * GIB, 936e9, "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"),
    DeviceKind("RTX 4090", (), 165.2e12, 82.6e12, 24 * GIB, 1008e9, "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
    # The V100s and T4 have neither products of bfloat16, which XLA computes in float32, nor TF32.
    DeviceKind("V100 16GB", ("V100", "V100-SXM2-16GB"), 15.7e12, 15.7e12, 16 * GIB, 900e9, _NVIDIA + "v100/"),
    DeviceKind("V100 32GB", ("V100-SXM2-32GB",), 15.7e12, 15.7e12, 32 * GIB, 900e9, _NVIDIA + "v100/"),
    DeviceKind("V100 PCIe 16GB", (), 14e12, 14e12, 16 * GIB, 900e9, _NVIDIA + "v100/"),
    DeviceKind("V100 PCIe 32GB", (), 14e12, 14e12, 32 * GIB, 900e9, _NVIDIA + "v100/"),
    DeviceKind("T4", (), 8.1e12, 8.1e12, 15 * GIB, 320e9, _NVIDIA + "tesla-t4/"),
    DeviceKind("A100 40GB", ("A100-SXM4-40GB", "A100-PCIE-40GB"), 312e12, 156e12, 40 * GIB, 1555e9, _NVIDIA + "a100/"),
    DeviceKind("A100 80GB", ("A100", "A100-SXM4-80GB"), 312e12, 156e12, 80 * GIB, 2039e9, _NVIDIA + "a100/"),
    DeviceKind("A100 80GB PCIe", (), 312e12, 156e12, 80 * GIB, 1935e9, _NVIDIA + "a100/"),
    DeviceKind("A10", (), 125e12, 62.5e12, 22 * GIB, 600e9, _NVIDIA + "products/a10-gpu/"),
    DeviceKind("A10G", (), 70e12, 35e12, 22 * GIB, 600e9, "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"),
    DeviceKind("L4", (), 121e12, 60e12, 22 * GIB, 300e9, _NVIDIA + "l4/"),
    DeviceKind("L40", (), 181e12, 90.5e12, 45 * GIB, 864e9, _NVIDIA + "l40/"),
    DeviceKind("L40S", (), 362e12, 183e12, 45 * GIB, 864e9, _NVIDIA + "l40s/"),
    DeviceKind("H100", ("H100 80GB HBM3", "H100 SXM"), 989.4e12, 494.7e12, 80 * GIB, 3350e9, _NVIDIA + "h100/"),
    DeviceKind("H100 PCIe", (), 756e12, 378e12, 80 * GIB, 2000e9, _NVIDIA + "h100/"),
    DeviceKind("H100 NVL", (), 835e12, 417e12, 94 * GIB, 3900e9, _NVIDIA + "h100/"),
    DeviceKind("H200", ("GH200 144G HBM3e",), 989.4e12, 494.7e12, 140 * GIB, 4800e9, _NVIDIA + "h200/"),
    DeviceKind("H200 NVL", (), 835e12, 417e12, 140 * GIB, 4800e9, _NVIDIA + "h200/"),
    DeviceKind("GH200", ("GH200 480GB",), 989.4e12, 494.7e12, 94 * GIB, 4000e9, _NVIDIA + "grace-hopper-superchip/"),
    DeviceKind("B200", (), 2250e12, 1100e12, 179 * GIB, 8000e9, _NVIDIA + "dgx-b200/"),
    DeviceKind("GB200", (), 2500e12, 1250e12, 185 * GIB, 8000e9, _NVIDIA + "gb200-nvl72/"),
)  # fmt: skip


def find_device_kind(name: str) -> DeviceKind | None:
    """Returns the device with a name, in any spelling, with or without the maker, or None."""
    wanted = _plain(name)
    return next(
        (kind for kind in DEVICE_KINDS if wanted in map(_plain, (kind.name, *kind.names))), None
    )


def known_device_kind(name: str) -> DeviceKind:
    """Returns the device with a name, or `this_machine` for "cpu".

    Raises:
      ValueError: an unknown name, with a list.
    """
    if kind := this_machine() if _plain(name) == "cpu" else find_device_kind(name):
        return kind
    names = ", ".join(kind.name for kind in DEVICE_KINDS)
    raise ValueError(
        f"device kind {name!r} is unknown; use one of {names}, or cpu for this machine (alibi/devices/kinds.py)"
    )


@functools.cache
def this_machine() -> DeviceKind:
    """Returns this machine's CPUs, with a speed measured in products of two matrices."""
    speeds = {}
    for dtype in ("bfloat16", "float32"):
        one = jax.numpy.ones(
            (MEASURED_SIZE, MEASURED_SIZE), dtype, device=jax.local_devices(backend="cpu")[0]
        )
        # called in this turn of the loop alone
        times = timeit.repeat(lambda: (one @ one).block_until_ready(), number=1, repeat=20)  # noqa: B023
        speeds[dtype] = 2 * MEASURED_SIZE**3 / min(times)  # the first compiles
    return DeviceKind(
        name="CPUs of this machine",
        names=("cpu",),
        **speeds,
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        bandwidth=0,
        source=f"speed measured just now, of products of {MEASURED_SIZE} x {MEASURED_SIZE} matrices",
    )


def _plain(name: str) -> str:
    """Returns one text for TPU v5e, tpu-v5e and v5e, as for NVIDIA H100 and h100."""
    return re.sub(
        r"[^a-z0-9]", "", re.sub(r"\b(nvidia|tesla|geforce|google|cloud|tpu)\b", "", name.lower())
    )
