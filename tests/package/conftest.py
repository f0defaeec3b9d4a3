"""The wheel, installed into environments that have the packages of chosen extras alone."""

import dataclasses
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import venv
from collections.abc import Callable

import pytest
from packaging.requirements import Requirement

from tests.hosts import run_python

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel.

    Attributes:
      folder: holds the environment. Its commands run there.
    """

    folder: pathlib.Path

    def run(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment; fails on another exit code than `code`."""
        program, *rest = map(str, words)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            [self.folder / "bin" / program, *rest],
            cwd=self.folder,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def install(self, wheel: pathlib.Path) -> None:
        """Installs a wheel without its dependencies."""
        words = ["install", "--no-deps", "--no-index", "--no-compile", "--quiet", wheel]
        python = self.folder / "bin" / "python"
        run_python("-m", "pip", "--python", python, *words)

    def python(self, source: str) -> str:
        """Runs Python source text in the environment, and returns its output."""
        return self.run("python", "-c", source).stdout


def build(folder: pathlib.Path) -> pathlib.Path:
    """Returns the wheel of a source folder, in which it is built."""
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run_python("-c", code, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def distributions(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Returns the installed distributions that `requirements` ask for, directly or not, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left, seen = list(map(Requirement, requirements)), set()
    while left:
        wanted = left.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        found[wanted.name] = importlib.metadata.distribution(wanted.name)
        for line in found[wanted.name].requires or ():
            needed = Requirement(line)
            extras = [*wanted.extras, ""]
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                left.append(needed)
    return found


def link(distribution: importlib.metadata.Distribution, site: pathlib.Path) -> None:
    """Puts links to the files of a distribution into `site`, to whole packages where it may."""
    for file in distribution.files or ():
        top, *rest = file.parts
        if top in ("..", "__pycache__"):
            continue
        place = pathlib.PurePath(top)
        home = pathlib.Path(str(distribution.locate_file("")))
        # several distributions share a package without __init__.py
        if rest and not top.endswith((".dist-info", ".libs")):
            for part in rest:
                if (home / place / "__init__.py").exists():
                    break
                place /= part
        if not (site / place).exists():
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            (site / place).symlink_to(home / place)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel of the tracked files, in a folder of its own."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "alibi", folder / "alibi", ignore=shutil.ignore_patterns("__pycache__"))
    return build(folder)


@pytest.fixture(scope="session")
def environment(
    wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """A function of names of extras to the environment that has their packages, linked from here."""
    made: dict[tuple[str, ...], Environment] = {}

    def make(*extras: str) -> Environment:
        if extras in made:
            return made[extras]
        folder = tmp_path_factory.mktemp("-".join(["base", *extras]))
        venv.create(folder, symlinks=True)
        found = Environment(folder)
        found.install(wheel)
        (site,) = folder.glob("lib/python3.*/site-packages")
        (own,) = importlib.metadata.distributions(name="alibi-jax", path=[str(site)])
        lines = list(map(Requirement, own.requires or ()))
        wanted = [
            f"{line.name}[{','.join(line.extras)}]" if line.extras else line.name
            for line in lines
            if line.marker is None or any(line.marker.evaluate({"extra": e}) for e in extras)
        ]
        for distribution in distributions(wanted).values():
            link(distribution, site)
        made[extras] = found
        return found

    return make
