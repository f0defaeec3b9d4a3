"""NLL dumps: each token's NLL on disk, for analyses by position and by context."""

import dataclasses
import os
import re
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Int

from alibi.reporting.rows import Row
from alibi.storage.cache import content_key
from alibi.storage.files import made_whole, resolve

_UNREADABLE = (OSError, KeyError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The key of an NLL dump: a run, a text and windows."""

    run: str
    step: int  # updates of the checkpoint
    tokens_sha256: str | None  # the token file, tells texts apart
    # over the run's and the evaluation's config keys: a run's name may be used again
    config_hash: str | None
    length: int  # inputs of a window
    stride: int  # tokens scored by each window
    override: str = ""  # the row's `Override` as text; empty if the run was scored as trained

    @property
    def mode(self) -> str:
        return "nonoverlapping" if self.stride == self.length else "sliding"

    def line(self, analysis: str, **results: Any) -> dict[str, Any]:
        """Returns a line for by_context.jsonl: the key, then the results of an analysis."""
        head = {"analysis": analysis} | dataclasses.asdict(self)
        windows = {
            "eval_length": head.pop("length"),
            "mode": self.mode,
            "stride": head.pop("stride"),
        }
        override = head.pop("override")
        return head | ({"override": override} if override else {}) | windows | results


@dataclasses.dataclass(frozen=True)
class Dump:
    """The tokens in stream order, int32, and the NLL of each in nats, float32."""

    of: Scoring
    nll_nats: Float[np.ndarray, " tokens"]
    targets: Int[np.ndarray, " tokens"]

    @property
    def nll(self) -> Float[np.ndarray, " tokens"]:
        """The NLL in float64, for sums."""
        return self.nll_nats.astype(np.float64)

    @property
    def context(self) -> Int[np.ndarray, " tokens"]:
        """The inputs that the model saw for each token, with its predecessor: 1 to `length`."""
        token = np.arange(self.nll_nats.size)
        window = token // self.of.stride * self.of.stride
        return token - np.maximum(window - (self.of.length - self.of.stride), 0) + 1


def file_beside(row: Row, folder: epath.Path, ending: str) -> epath.Path:
    """Returns the file in `folder` for numbers of a row's tokens, which may not exist yet.

    This is RUN-length=l-stride=s-step=t-HASH and `ending`, with a hash over the text and the config.
    """
    key = content_key({"of": str(row.measurement)})[:8]
    windows = f"length={row.length}-stride={row.options.get('stride', row.length)}"
    return folder / f"{row.run}-{windows}-step={row.step}-{key}{ending}"


def write_dump(path: str | os.PathLike[str], dump: Dump) -> None:
    """Writes the .npz file. A reader sees all of it or the previous one."""
    scoring: dict[str, Any] = dataclasses.asdict(dump.of)
    with made_whole(path) as partial, partial.open("wb") as file:
        np.savez(file, nll_nats=dump.nll_nats, targets=dump.targets, **scoring)


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Returns the dump in a file.

    Raises:
      ValueError: there is none, or it is damaged.
    """
    try:
        with epath.Path(path).open("rb") as opened, np.load(opened) as arrays:
            of = {field.name: arrays[field.name].item() for field in dataclasses.fields(Scoring)}
            return Dump(Scoring(**of), arrays["nll_nats"], arrays["targets"])
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} is no whole NLL dump ({error}); remove it, and make it again with eval_extrapolation.py --dump_nll"
        ) from error


def find_dumps(patterns: Iterable[str]) -> list[Dump]:
    """Returns the dumps at paths and addresses, which may hold wildcards.

    Raises:
      ValueError: one is damaged.
    """
    files = set()
    for pattern in patterns:
        before = re.split(r"[*?[]", pattern)[0]
        folder = before[: before.rfind("/") + 1]
        exact = resolve(pattern)
        matching = resolve(folder or ".").glob(pattern.removeprefix(folder))
        files |= {exact} if exact.exists() else set(matching)
    return [read_dump(file) for file in sorted(files)]
