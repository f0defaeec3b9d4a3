"""The temporary memory of a program is kept between its calls, in large pages."""

import functools
import pathlib
import sys
import types

import jax
import pytest

from alibi.cli import host_memory
from tests.hosts import run_python

# In a process of its own: the setting holds for the whole process. Blocks of 64 MiB come and
# go; counted are the pages that the kernel hands out for the later blocks.
PROGRAM = """
import ctypes, resource
from alibi.cli.host_memory import keep_freed_memory
print(keep_freed_memory())
SIZE = 64 * 2**20
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes, library.free.argtypes = (
    ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p])
def use():
    block = library.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    library.free(block)
    return block
first = use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    again = use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
for line in open("/proc/self/smaps"):
    field = line.split()[0]
    if not field.endswith(":"):
        start, end = (int(address, 16) for address in field.split("-"))
    elif field == "VmFlags:" and start <= again + SIZE // 2 < end:
        print("hg" in line.split())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sets the GNU C library's malloc")
def test_a_block_allocated_again_has_the_pages_that_it_had():
    known, faults, large = run_python("-c", PROGRAM).stdout.split()
    if known == "False":
        pytest.skip("this C library has no mallopt")
    assert int(faults) < 100  # 4 x 64 MiB are 65,536 pages
    assert large == "True"  # the kernel is advised to back these addresses with large pages


@pytest.fixture
def platforms():
    """A function that sets JAX's platforms, until the test's end."""
    before = jax.config.jax_platforms
    yield functools.partial(jax.config.update, "jax_platforms")
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("chosen", "plugin", "driver", "on_cpus"),
    [
        ("cpu", "xla_cuda13", True, True),
        ("cuda,cpu", "", False, False),
        ("tpu,cpu", "", False, False),  # JAX sets it itself on import, if there is a TPU
        (None, "", True, True),  # a GPU that this JAX has no plugin for
        (None, "xla_cuda13", False, True),
        (None, "xla_cuda13", True, False),
        (None, "metal_plugin", False, False),
    ],
)
def test_memory_is_kept_only_if_jax_will_take_the_cpu(
    monkeypatch, platforms, chosen, plugin, driver, on_cpus
) -> None:
    """On an accelerator's host a freed copy of the parameters would stay, with each of its pages."""
    plugins = [types.SimpleNamespace(value=plugin)] if plugin else []
    monkeypatch.setattr(host_memory, "entry_points", lambda group: plugins)
    monkeypatch.setattr("os.path.exists", lambda path: driver)
    platforms(chosen)
    assert host_memory.computes_on_cpus() is on_cpus
    if not on_cpus:
        monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: pytest.fail("malloc was changed"))
        assert host_memory.keep_freed_memory() is False


def test_a_plugin_package_is_found(tmp_path: pathlib.Path, monkeypatch, platforms) -> None:
    (tmp_path / "jax_plugins" / "metal").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "metal" / "__init__.py").touch()
    # whatever plugins this machine has: of CUDA's none counts without a driver
    monkeypatch.setattr(host_memory, "entry_points", lambda group: [])
    monkeypatch.setattr("os.path.exists", lambda path: False)
    platforms(None)
    assert host_memory.computes_on_cpus()
    monkeypatch.syspath_prepend(tmp_path)
    # a package that was imported is not looked for again
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert not host_memory.computes_on_cpus()
