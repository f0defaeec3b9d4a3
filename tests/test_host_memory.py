"""Large temporary memory is kept between the calls of a program."""

import subprocess
import sys

import pytest

# In a process of its own: the setting is the whole process's.
PROGRAM = """
import resource
from alibi.host_memory import keep_freed_memory
print(keep_freed_memory())
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sort(jnp.cos(x[:, None] * x).reshape(-1))[:8])  # 64 MiB of temporary memory
x = jnp.arange(4096.0)
for _ in range(4):
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step(x).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 4)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets the GNU C library's malloc")
def test_a_program_called_again_gets_pages_that_it_has_had():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    known, faults = done.stdout.split()
    if known == "False":
        pytest.skip("this C library has no mallopt")
    assert float(faults) < 2000  # 64 MiB are 16,384 small pages
