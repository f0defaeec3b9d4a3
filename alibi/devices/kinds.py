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


def _kind(
    name: str,
    names: tuple[str, ...],
    tera_flops: tuple[float, float],
    gibibytes: float,
    gigabytes_a_second: float,
    source: str,
) -> DeviceKind:
    bfloat16, float32 = (flops * 1e12 for flops in tera_flops)
    return DeviceKind(
        name, names, bfloat16, float32, int(gibibytes * GIB), gigabytes_a_second * 1e9, source
    )


DEVICE_KINDS = (
    _kind("TPU v2", (), (22.5, 22.5), 8, 350, _TPU + "v2"),
    _kind("TPU v3", (), (61.5, 61.5), 16, 450, _TPU + "v3"),
    _kind("TPU v4", (), (275, 275), 32, 1200, _TPU + "v4"),
    _kind("TPU v5e", ("TPU v5 lite", "v5litepod"), (197, 197), 16, 819, _TPU + "v5e"),
    _kind("TPU v5p", ("TPU v5",), (459, 459), 95, 2765, _TPU + "v5p"),
    _kind("TPU v6e", ("TPU v6 lite", "Trillium"), (918, 918), 32, 1638, _TPU + "v6e"),
    _kind("TPU 7x", ("TPU7x", "TPU v7x", "TPU v7", "Ironwood"), (1153.5, 1153.5), 96, 3690, _TPU + "tpu7x"),
    _kind("RTX 3090", (), (71, 35.6), 24, 936, "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"),
    _kind("RTX 4090", (), (165.2, 82.6), 24, 1008, "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
    # The V100s and T4 have neither products of bfloat16, which XLA computes in float32, nor TF32.
    _kind("V100 16GB", ("V100", "V100-SXM2-16GB"), (15.7, 15.7), 16, 900, _NVIDIA + "v100/"),
    _kind("V100 32GB", ("V100-SXM2-32GB",), (15.7, 15.7), 32, 900, _NVIDIA + "v100/"),
    _kind("V100 PCIe 16GB", (), (14, 14), 16, 900, _NVIDIA + "v100/"),
    _kind("V100 PCIe 32GB", (), (14, 14), 32, 900, _NVIDIA + "v100/"),
    _kind("T4", (), (8.1, 8.1), 15, 320, _NVIDIA + "tesla-t4/"),
    _kind("A100 40GB", ("A100-SXM4-40GB", "A100-PCIE-40GB"), (312, 156), 40, 1555, _NVIDIA + "a100/"),
    _kind("A100 80GB", ("A100", "A100-SXM4-80GB"), (312, 156), 80, 2039, _NVIDIA + "a100/"),
    _kind("A100 80GB PCIe", (), (312, 156), 80, 1935, _NVIDIA + "a100/"),
    _kind("A10", (), (125, 62.5), 22, 600, _NVIDIA + "products/a10-gpu/"),
    _kind("A10G", (), (70, 35), 22, 600, "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"),
    _kind("L4", (), (121, 60), 22, 300, _NVIDIA + "l4/"),
    _kind("L40", (), (181, 90.5), 45, 864, _NVIDIA + "l40/"),
    _kind("L40S", (), (362, 183), 45, 864, _NVIDIA + "l40s/"),
    _kind("H100", ("H100 80GB HBM3", "H100 SXM"), (989.4, 494.7), 80, 3350, _NVIDIA + "h100/"),
    _kind("H100 PCIe", (), (756, 378), 80, 2000, _NVIDIA + "h100/"),
    _kind("H100 NVL", (), (835, 417), 94, 3900, _NVIDIA + "h100/"),
    _kind("H200", ("GH200 144G HBM3e",), (989.4, 494.7), 140, 4800, _NVIDIA + "h200/"),
    _kind("H200 NVL", (), (835, 417), 140, 4800, _NVIDIA + "h200/"),
    _kind("GH200", ("GH200 480GB",), (989.4, 494.7), 94, 4000, _NVIDIA + "grace-hopper-superchip/"),
    _kind("B200", (), (2250, 1100), 179, 8000, _NVIDIA + "dgx-b200/"),
    _kind("GB200", (), (2500, 1250), 185, 8000, _NVIDIA + "gb200-nvl72/"),
)  # fmt: skip


def find_device_kind(name: str) -> DeviceKind | None:
    """Returns the device with a name, in any spelling, with or without the maker, or None."""
    wanted = _plain(name)
    kinds = (kind for kind in DEVICE_KINDS if wanted in map(_plain, (kind.name, *kind.names)))
    return next(kinds, None)


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
