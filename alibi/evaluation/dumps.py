"""NLL dumps: what each token of a text cost, on disk, for analyses by position and by context."""

import dataclasses
import hashlib
import io
import os
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

_NO_DUMP = (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Dump:
    """The tokens of a text in stream order, and what each cost.

    Attributes:
      nll_nats: float32.
      targets: int32.
      length, stride: of the windows, in tokens.
      step: updates of the checkpoint that scored them.
      tokens_sha256: of the token file, so that a dump of another text isn't taken for this one.
      config_hash: of the run, so that a dump of another run of its name isn't either.
    """

    nll_nats: Float[np.ndarray, " tokens"]
    targets: Int[np.ndarray, " tokens"]
    length: int
    stride: int
    step: int
    tokens_sha256: str
    config_hash: str


def find_path(
    directory: str | os.PathLike, run: str, length: int, stride: int, step: int, tokens_sha256: str, config_hash: str
) -> pathlib.Path:
    """Where the dump of a run at one length and stride lies, or is to be written, in an output directory.

    That is nll/RUN-length=l-stride=s.npz, unless a dump of another step, text or
    config has that name: then this one's name says its step and the hash of the rest.
    """
    folder, name = pathlib.Path(directory) / "nll", f"{run}-length={length}-stride={stride}"
    path = folder / f"{name}.npz"
    if _identity(path) in (None, (length, stride, step, tokens_sha256, config_hash)):
        return path
    key = hashlib.sha256(f"{tokens_sha256} {config_hash}".encode()).hexdigest()[:8]
    return folder / f"{name}-step={step}-{key}.npz"


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
            return Dump(arrays["nll_nats"], arrays["targets"], *_identity_in(arrays))
    except _NO_DUMP as error:
        raise ValueError(f"{path} is no NLL dump ({error}); make it with eval_extrapolation.py --dump_nll") from error


def is_dump_of(path: pathlib.Path, length: int, stride: int, step: int, tokens_sha256: str, config_hash: str) -> bool:
    """Whether `path` holds a whole dump of those windows, and of that checkpoint, text and config."""
    return _identity(path) == (length, stride, step, tokens_sha256, config_hash)


def _identity(path: pathlib.Path) -> tuple[int, int, int, str, str] | None:
    """What the dump is of, without its arrays; None where there is none or it was cut: the table of a .npz ends it."""
    try:
        with np.load(path) as arrays:
            return _identity_in(arrays)
    except _NO_DUMP:
        return None


def _identity_in(arrays: Mapping[str, np.ndarray]) -> tuple[int, int, int, str, str]:
    length, stride, step = (int(arrays[key]) for key in ("length", "stride", "step"))
    return length, stride, step, str(arrays["tokens_sha256"]), str(arrays["config_hash"])
