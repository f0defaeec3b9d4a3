"""The temporary memory of a program is kept between its calls, in large pages."""

import subprocess
import sys

import pytest

# In a process of its own: the setting is the whole process's. Blocks of 64 MiB come and
# go; counted are the pages that the kernel hands out for the later ones.
PROGRAM = """
import ctypes, resource
from alibi.host_memory import keep_freed_memory
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


@pytest.mark.skipif(sys.platform != "linux", reason="sets the GNU C library's malloc")
def test_a_block_allocated_again_has_the_pages_that_it_had():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    known, faults, large = done.stdout.split()
    if known == "False":
        pytest.skip("this C library has no mallopt")
    assert int(faults) < 100  # 4 x 64 MiB are 65,536 pages
    assert large == "True"  # the kernel is advised to back these addresses with large pages
