"""NLL dumps: each token's NLL on disk, for analyses of position and context."""

import dataclasses
import json
import os
import re
import zipfile
from collections.abc import Iterable
from tokenize import TokenError
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float, Int

from alibi.reporting.rows import Row
from alibi.storage.cache import content_key
from alibi.storage.files import made_whole, resolve

_UNREADABLE = (
    OSError,
    KeyError,
    EOFError,
    RuntimeError,
    ValueError,
    TokenError,
    zipfile.BadZipFile,
)


@dataclasses.dataclass(frozen=True)
class Dump:
    """The NLL of each token of a text in stream order, in nats.

    Attributes:
      row: the row of the measurement, without its results.
    """

    row: Row
    nll_nats: Float[np.ndarray, " tokens"]  # float32
    targets: Int[np.ndarray, " tokens"]  # int32

    @property
    def length(self) -> int:
        """The inputs of a window."""
        return self.row.cell["length"]

    @property
    def stride(self) -> int:
        """The tokens that each window scores."""
        return self.row.options.get("stride", self.length)

    @property
    def nll(self) -> Float[np.ndarray, " tokens"]:
        """The NLL in float64, for sums."""
        return self.nll_nats.astype(np.float64)

    @property
    def context(self) -> Int[np.ndarray, " tokens"]:
        """The inputs that the model saw for each token, with its predecessor: 1 to `length`."""
        token = np.arange(self.nll_nats.size)
        window = token // self.stride * self.stride
        return token - np.maximum(window - (self.length - self.stride), 0) + 1

    def line(self, analysis: str, **results: Any) -> dict[str, Any]:
        """Returns a line for by_context.jsonl: run, text and windows, then the results of an analysis."""
        row = self.row
        differs = {"override": str(row.override)} if row.override else {}
        differs |= {"trained_on": row.trained_on} if row.trained_on else {}
        return {
            "analysis": analysis,
            "run": row.run,
            "step": row.step,
            "tokens_sha256": row.tokens_sha256,
            "config_hash": row.config_hash,
            **differs,
            "eval_length": self.length,
            "mode": "nonoverlapping" if self.stride == self.length else "sliding",
            "stride": self.stride,
            **results,
        }


def file_beside(row: Row, folder: epath.Path, ending: str) -> epath.Path:
    """Returns the file in `folder` for numbers of a row's tokens, which may not exist yet.

    This is RUN-length=l-stride=s-step=t-HASH and `ending`, with a hash over the text and the config.
    """
    key = content_key({"of": str(row.measurement)})[:8]
    windows = f"length={row.length}-stride={row.options.get('stride', row.length)}"
    return folder / f"{row.run}-{windows}-step={row.step}-{key}{ending}"


def write_dump(path: str | os.PathLike[str], dump: Dump) -> None:
    """Writes the .npz file. A reader sees all of it or the previous one."""
    row = json.dumps(dump.row.to_json())
    with made_whole(path) as partial, partial.open("wb") as file:
        np.savez(file, nll_nats=dump.nll_nats, targets=dump.targets, row=np.array(row))


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Returns the dump in a file.

    Raises:
      ValueError: there is none, or it is damaged.
    """
    try:
        with epath.Path(path).open("rb") as opened, np.load(opened) as arrays:
            if "row" not in arrays:
                raise ValueError("another version of this library wrote it")
            row = Row.from_json(json.loads(arrays["row"].item()))
            return Dump(row, arrays["nll_nats"], arrays["targets"])
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} is no whole NLL dump ({error}); move it away, and make it again with eval_extrapolation.py "
            "--dump_nll"
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
