"""NLL dumps: what each token of a text cost, on disk, for analyses by position and by context."""

import dataclasses
import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Int

from alibi.reporting.rows import Scoring
from alibi.storage.files import made_whole, resolve

_NO_DUMP = (OSError, KeyError, EOFError, zipfile.BadZipFile)
# How dumps are named; those of old versions hold their run's name nowhere else.
_NAME = re.compile(r"(?P<run>.+)-length=(?P<length>\d+)-stride=(?P<stride>\d+)(-step=.*)?")


@dataclasses.dataclass(frozen=True)
class Dump:
    """The tokens of a text in stream order, and what each cost in nats: int32 and float32."""

    of: Scoring
    nll_nats: Float[np.ndarray, " tokens"]
    targets: Int[np.ndarray, " tokens"]

    @property
    def nll(self) -> Float[np.ndarray, " tokens"]:
        """The NLL in float64, for sums."""
        return self.nll_nats.astype(np.float64)

    @property
    def context(self) -> Int[np.ndarray, " tokens"]:
        """Inputs that the model saw for each token, its predecessor included: 1 to `length`."""
        token = np.arange(self.nll_nats.size)
        window = token // self.of.stride * self.of.stride
        return token - np.maximum(window - (self.of.length - self.of.stride), 0) + 1


def find_name(output: epath.Path, of: Scoring) -> epath.Path:
    """The file in which the dump `of` a run at one length and stride lies, or will, in an output directory.

    That is nll/RUN-length=l-stride=s.npz, unless a dump of another step, text,
    config or override has that name: then this one's name says its step and the hash of the rest.
    """
    name = f"{of.run}-length={of.length}-stride={of.stride}"
    path = output / "nll" / f"{name}.npz"
    if what_is_in(path) in (None, of):
        return path
    key = hashlib.sha256(f"{of.tokens_sha256} {of.config_hash}{of.override}".encode()).hexdigest()[:8]
    return path.with_name(f"{name}-step={of.step}-{key}.npz")


def write_dump(path: str | os.PathLike[str], dump: Dump) -> None:
    """Writes the .npz file atomically: a reader sees all of it or the one before."""
    of: dict[str, Any] = dataclasses.asdict(dump.of)
    with made_whole(path) as partial, partial.open("wb") as file:
        np.savez(file, nll_nats=dump.nll_nats, targets=dump.targets, **of)


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """The dump in `path`.

    Raises:
      ValueError: there is none, or it is damaged; or an old one, which doesn't say of which
        run it is, has another name than eval_extrapolation.py --dump_nll gave it.
    """
    file = epath.Path(path)
    try:
        with file.open("rb") as opened, np.load(opened) as arrays:
            return Dump(_named(file, arrays), arrays["nll_nats"], arrays["targets"])
    except _NO_DUMP as error:
        raise ValueError(f"{path} is no NLL dump ({error}); make it with eval_extrapolation.py --dump_nll") from error


def find_dumps(patterns: Iterable[str]) -> list[Dump]:
    """The dumps that paths and addresses name, in which wildcards may stand; ValueError as `read_dump` raises it."""
    places = {place for pattern in patterns for place in _matching(pattern)}
    return [read_dump(place) for place in sorted(places)]


def _matching(pattern: str) -> list[epath.Path]:
    """Returns the files that a path or an address with wildcards names."""
    before = re.split(r"[*?[]", pattern)[0]
    folder = before[: before.rfind("/") + 1]
    return list(resolve(folder or ".").glob(pattern.removeprefix(folder)))


def what_is_in(path: epath.Path) -> Scoring | None:
    """What the dump in `path` is of; None where there is no whole one: the table of a .npz ends it."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return _named(path, arrays)
    except (*_NO_DUMP, ValueError):
        return None


def _named(path: epath.Path, arrays: Mapping[str, np.ndarray]) -> Scoring:
    length, stride, step = (int(arrays[key]) for key in ("length", "stride", "step"))
    run = str(arrays["run"]) if "run" in arrays else _run_by_name(path, length, stride)
    override = str(arrays["override"]) if "override" in arrays else ""
    return Scoring(run, step, str(arrays["tokens_sha256"]), str(arrays["config_hash"]), length, stride, override)


def _run_by_name(path: epath.Path, length: int, stride: int) -> str:
    """The run of an old dump; ValueError where its name is not the one that it was given."""
    name = _NAME.fullmatch(path.stem)
    if not name:
        raise ValueError(
            f"{path} is not named RUN-length=l-stride=s.npz, as eval_extrapolation.py --dump_nll names dumps"
        )
    if (int(name["length"]), int(name["stride"])) != (length, stride):
        raise ValueError(f"{path} holds a dump of length={length} and stride={stride}; give it the name that it had")
    return name["run"]
