"""A work directory: what a training run leaves behind, and all that an evaluation needs to know of it."""

import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import ml_collections

from alibi.data.tokenizers import Tokenizer, load_tokenizer

# Keys that say how a run is computed and watched, not what it computes: a run may go on with others.
MAY_DIFFER = ("mesh.", "eval.", "checkpoint.", "log.", "data.cache_dir", "model.attention", "model.remat",
              "model.logits_chunk")  # fmt: skip
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "datasets", "tokenizers", "numpy")


class RunDirectory:
    """One run's files: config, provenance and status as JSON, metrics.jsonl, tokenizer/, checkpoints/, tensorboard/.

    Reading raises ValueError, with what to do, where the directory or a file is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).expanduser().absolute()

    @property
    def name(self) -> str:
        """The directory's own name, which result rows use for the run."""
        return self.path.name

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    def config(self) -> ml_collections.ConfigDict:
        """The resolved configuration that the run was trained with."""
        return ml_collections.ConfigDict(self._read("config.json"))

    def provenance(self) -> dict[str, Any]:
        """Commit, versions, devices, corpus and parameters of the run's last start."""
        return self._read("provenance.json")

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "tokenizer")

    def status(self) -> dict[str, Any]:
        """Where the run stands: state (missing, running, interrupted, failed, finished), step, steps, reason..."""
        if not (self.path / "status.json").exists():
            return {"state": "missing", "step": 0, "steps": 0, "reason": "", "tokens_per_second": None}
        return self._read("status.json")

    def start(self, config: ml_collections.ConfigDict) -> None:
        """Claims the directory for `config`: makes it, or checks that it holds the same run.

        Raises:
          ValueError: the directory can't be written, or holds a run of another config;
            the differing keys are listed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"work directory {self.path} can't be written ({error}); choose another --workdir"
            ) from None
        if (self.path / "config.json").exists():
            self._check_same(config)
        self.write("config.json", config.to_dict())

    def _check_same(self, config: ml_collections.ConfigDict) -> None:
        old, new = flatten(self.config()), flatten(config)
        differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        refused = [key for key in differing if not key.startswith(MAY_DIFFER)]
        if refused:
            lines = "\n".join(f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now" for key in refused)
            raise ValueError(
                f"work directory {self.path} holds a run of another config:\n{lines}\n"
                "use another --workdir, or the config that it was started with"
            )

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Writes one JSON file; a reader sees the old content or the new, never a part."""
        temporary = self.path / f".{name}-{os.getpid()}"
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
        temporary.replace(self.path / name)

    def write_status(self, state: str, *, step: int, steps: int, reason: str = "", **more: Any) -> None:
        """Records where the run stands; `more` are further figures, such as tokens_per_second."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.write(
            "status.json", {"state": state, "step": step, "steps": steps, "reason": reason, "updated": now, **more}
        )

    def _read(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.exists():
            raise ValueError(f"{self.path} is no work directory of a run: {name} is missing; give train.py's --workdir")
        try:
            return json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); restore it, or train the run again elsewhere") from None


def flatten(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The leaves of a config by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            leaves.update({f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()})
        else:
            leaves[key] = list(value) if isinstance(value, tuple) else value
    return leaves


@functools.cache
def git_commit() -> str:
    """The commit of this code, with "-dirty" where tracked files differ from it; "unknown" outside a checkout."""
    folder = pathlib.Path(__file__).resolve().parent.parent
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changes else "")


def make_provenance(**more: Any) -> dict[str, Any]:
    """What made a run: command, commit, versions; `more` adds devices, corpus, parameters."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    versions["python"] = sys.version.split()[0]
    return {"command": sys.argv, "commit": git_commit(), "versions": versions, **more}
