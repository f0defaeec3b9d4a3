"""A file system of its own in the place of a folder, which can be filled or made read-only; only root can mount it."""

import contextlib
import pathlib
import shutil
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def mounted(folder: pathlib.Path) -> Iterator[None]:
    """A file system of its own with what is in `folder`, in its place; then all of it goes back to the disk."""
    content = folder.with_name(f"{folder.name}.content")
    folder.rename(content)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        shutil.copytree(content, folder, dirs_exist_ok=True)
        yield
        shutil.rmtree(content)
        shutil.copytree(folder, content)
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()
        content.rename(folder)


def remount(folder: pathlib.Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


def can_mount(folder: pathlib.Path) -> bool:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return done.returncode == 0
