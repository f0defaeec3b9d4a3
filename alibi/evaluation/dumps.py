"""NLL dumps: what each token of a text cost, on disk, for analyses by position and by context."""

import dataclasses
import io
import os
import pathlib
import zipfile

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True)
class Dump:
    """The tokens of a text in stream order, and what each cost.

    Attributes:
      nll_nats: float32.
      targets: int32.
      step: updates of the checkpoint that scored them.
      tokens_sha256: of the token file, so that a dump of another text isn't taken for this one.
    """

    nll_nats: Float[np.ndarray, " tokens"]
    targets: Int[np.ndarray, " tokens"]
    step: int
    tokens_sha256: str


def dump_path(directory: str | os.PathLike, run: str, length: int, stride: int) -> pathlib.Path:
    """Where the dump of a run at one length and stride lies in an output directory."""
    return pathlib.Path(directory) / "nll" / f"{run}-length={length}-stride={stride}.npz"


def write_dump(path: pathlib.Path, dump: Dump) -> None:
    """Writes the .npz file atomically: a reader sees all of it or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **dataclasses.asdict(dump))
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_bytes(buffer.getbuffer())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_dump(path: pathlib.Path) -> Dump:
    """The dump in `path`; ValueError where there is none or it is damaged."""
    try:
        with np.load(path) as arrays:
            return Dump(arrays["nll_nats"], arrays["targets"], int(arrays["step"]), str(arrays["tokens_sha256"]))
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no NLL dump ({error}); make it with eval_extrapolation.py --dump_nll") from error


def is_dump_of(path: pathlib.Path, step: int, tokens_sha256: str) -> bool:
    """Whether `path` holds a whole dump of that checkpoint and text."""
    try:
        found = read_dump(path)
    except ValueError:
        return False
    return (found.step, found.tokens_sha256) == (step, tokens_sha256)
