"""The programs that tests compile, kept from run to run: compiling takes most of the tests' time."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import time

LIMIT = 2 * 2**30  # bytes
SETTLED = 10  # seconds, after which nobody writes a program any more


def make_folder(cache: pathlib.Path) -> pathlib.Path:
    """Returns the folder in `cache` for programs of this JAX and this processor's instructions;
    raises OSError if it can't be written.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    version, compiler = map(importlib.metadata.version, ("jax", "jaxlib"))
    key = hashlib.sha256(f"{compiler} {platform.machine()} {instructions}".encode()).hexdigest()
    folder = cache / "compilations" / f"{version}-{key[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "used").touch()
    return folder


def tidy(folder: pathlib.Path, limit: int = LIMIT) -> None:
    """Removes programs that a killed process wrote in part, then the longest unused ones, of
    other versions too, beyond `limit` bytes. Safe while other runs read, write and tidy.
    """
    stamp = folder / "checked"
    since = stamp.stat().st_mtime if stamp.exists() else 0.0
    until = time.time() - SETTLED
    programs = []
    for program in folder.parent.glob("*/*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run removed it
            found = program.stat()
            if program.parent == folder and since < found.st_mtime <= until and not whole(program):
                program.unlink()
            else:
                programs.append((max(found.st_atime, found.st_mtime), found.st_size, program))
    stamp.touch()
    os.utime(stamp, (until, until))
    for _, size, program in sorted(programs, reverse=True):
        limit -= size
        if limit < 0:
            program.unlink(missing_ok=True)


def whole(program: pathlib.Path) -> bool:
    from jax._src.compilation_cache import decompress_executable

    content = program.read_bytes()
    try:
        return bool(decompress_executable(content))
    except Exception:  # of zlib or zstandard, as JAX chooses
        return False
