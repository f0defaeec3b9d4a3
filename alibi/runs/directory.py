"""A work directory: what a training run leaves behind, and all that an evaluation needs to know of it."""

import datetime
import fcntl
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections

from alibi.atomic import made_whole, write_whole
from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.runs.identity import YOUNGER, completed, defining

# Of every config, as in configs/base.py.
SECTIONS = ("data", "model", "optimizer", "train", "eval", "checkpoint", "log", "mesh", "position_options")


def make_writable(directory: pathlib.Path) -> None:
    """Makes `directory` if need be; raises OSError where nothing can be written in it."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".writable-{os.getpid()}"
    probe.touch()
    probe.unlink()


class RunDirectory:
    """One run's files: config, provenance and status as JSON, metrics.jsonl, tokenizer/, checkpoints/, tensorboard/.

    Reading raises ValueError, with what to do, where the directory or a file is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise ValueError("the work directory's name is empty; give a directory, or . for the current one")
        if "://" in str(path):
            raise ValueError(
                f"work directory {path} is an address; a directory is needed, whose files can be locked and appended "
                "to. Mount the bucket (gcsfuse for gs://, on every host) and give the path of the mount"
            )
        self.path = pathlib.Path(path).expanduser().absolute()

    @property
    def name(self) -> str:
        """The directory's own name, which result rows use for the run."""
        return self.path.name

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    def config(self) -> ml_collections.ConfigDict:
        """The resolved configuration that the run was trained with."""
        return completed(ml_collections.ConfigDict(self._read("config.json", sections=SECTIONS)))

    def provenance(self) -> dict[str, Any]:
        """Commit, versions, devices, corpus and parameters of the run's last start."""
        return self._read("provenance.json")

    def tokenizer(self) -> Tokenizer:
        folder = self.path / "tokenizer"
        return load_tokenizer(folder, f"restore {folder}, or train the run again elsewhere")

    def status(self) -> dict[str, Any]:
        """Where the run stands: state (missing, running, interrupted, failed, finished), step, steps, reason..."""
        if not (self.path / "status.json").exists():
            return {"state": "missing", "step": 0, "steps": 0, "reason": "", "tokens_per_second": None}
        return self._read("status.json", ("state", "step", "steps", "reason"))

    def saved_steps(self) -> list[int]:
        """The steps whose checkpoints are there, ascending: by their names, which only complete ones have."""
        if not self.checkpoints.is_dir():
            return []
        return sorted(int(folder.name) for folder in self.checkpoints.iterdir() if folder.name.isdecimal())

    def is_finished(self) -> bool:
        """Whether training came to its end and the checkpoint that it saved there has not been lost since."""
        status = self.status()
        return status["state"] == "finished" and status["step"] in self.saved_steps()

    def check_checkpoints(self) -> None:
        """Raises ValueError if all checkpoints were lost: training again would overwrite what is known of the run."""
        status = self.status()
        # The status of an older version names no saved step; a finished run has saved its last one.
        saved = status.get("saved", status["step"] if status["state"] == "finished" else 0)
        if saved and not self.saved_steps():
            raise ValueError(
                f"{self.path} has no checkpoint, but that of step {saved} was saved: {self.checkpoints} was removed or "
                "emptied since; restore it, train in another --workdir, or remove the work directory to start over"
            )

    def check(self, config: ml_collections.ConfigDict) -> None:
        """Makes the directory if need be.

        Raises:
          ValueError: it can't be written, holds a run of another config, or lost all its checkpoints.
        """
        try:
            make_writable(self.path)
            if self.checkpoints.is_dir():  # which may lie on another disk
                make_writable(self.checkpoints)
        except OSError as error:
            raise ValueError(
                f"work directory {self.path} can't be written ({error}); choose another --workdir"
            ) from None
        if differing := self.differing(config):
            raise ValueError(
                f"work directory {self.path} holds a run of another config:\n"
                + "".join(f"  {key}: {old!r} there, {new!r} now\n" for key, (old, new) in differing.items())
                + "use another --workdir, or the config that it was started with"
            )
        self.check_checkpoints()

    def differing(self, config: ml_collections.ConfigDict) -> dict[str, tuple[Any, Any]]:
        """Keys that define a run and that `config` sets otherwise than the run that is here, to (there, now)."""
        if not (self.path / "config.json").exists():
            return {}
        old, new = defining(self.config()), defining(config)
        keys = sorted(old.keys() | new.keys())
        both = {key: tuple(leaves.get(key, YOUNGER.get(key)) for leaves in (old, new)) for key in keys}
        return {key: (there, now) for key, (there, now) in both.items() if there != now}

    def check_corpus(self, manifests: dict[str, dict[str, Any]]) -> None:
        """Raises ValueError if the run that is here was trained on other tokens than those of `manifests` by split."""
        if not (self.path / "provenance.json").exists():
            return
        before = self._read("provenance.json", sections=("corpus",))["corpus"]
        for split in sorted(before.keys() & manifests.keys()):
            for key in ("sha256", "tokenizer_fingerprint"):
                if not isinstance(before[split], dict) or key not in before[split]:
                    raise self._damaged("provenance.json", f"its corpus.{split} lacks {key}")
                if before[split][key] != manifests[split][key]:
                    raise ValueError(
                        f"the {split} text of the run in {self.path} has changed: its {key} was {before[split][key]} "
                        f"and is {manifests[split][key]}; restore the text, or use another --workdir"
                    )

    def claim(self, config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> None:
        """Locks the directory for this process and writes the config and, once, the tokenizer.

        Raises:
          ValueError: another process is training here, or has begun a run of another config since
            `check`; or the tokenizer that is here is another.
        """
        self._lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {self.path}; wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks
        try:
            self.check(config)
            self._keep(tokenizer)
            self.write("config.json", config.to_dict())
        except BaseException:
            self.release()
            raise

    def _keep(self, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer, once; raises ValueError if another is here."""
        if not (self.path / "tokenizer").exists():
            # Whole or not at all: a half-written one would be taken for another run's.
            with made_whole(self.path / "tokenizer") as partial:
                tokenizer.save(partial)
        elif self.tokenizer().fingerprint() != tokenizer.fingerprint():
            raise ValueError(
                f"the tokenizer of the run in {self.path} is another than that of data.tokenizer_file or of the train "
                "text now; give the one that is there, or use another --workdir"
            )

    def release(self) -> None:
        """Gives the lock of `claim` back."""
        self._lock.close()

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Writes one JSON file; a reader sees the old content or the new, never a part."""
        write_whole(self.path / name, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")

    def write_status(self, state: str, *, step: int, steps: int, reason: str = "", **more: Any) -> None:
        """Records where the run stands and the last saved step; `more` are figures, such as tokens_per_second."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        known = {"state": state, "step": step, "steps": steps, "reason": reason, "updated": now}
        self.write("status.json", known | {"saved": max(self.saved_steps(), default=0)} | more)

    def _read(self, name: str, needed: Sequence[str] = (), *, sections: Sequence[str] = ()) -> dict[str, Any]:
        """The content of one JSON file, an object with the keys `needed` and the objects `sections`."""
        file = self.path / name
        if not file.exists():
            raise ValueError(f"{self.path} is no work directory of a run: {name} is missing; give train.py's --workdir")
        try:
            content = json.loads(file.read_text())
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}, not an object")
            if missing := [key for key in (*needed, *sections) if key not in content]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            for key in sections:
                if not isinstance(content[key], dict):
                    raise ValueError(f"its {key} is a {type(content[key]).__name__}, not an object")
            return content
        except ValueError as error:
            raise self._damaged(name, error) from None

    def _damaged(self, name: str, error: object) -> ValueError:
        return ValueError(f"{self.path / name} is damaged ({error}); restore it, or train the run again elsewhere")
