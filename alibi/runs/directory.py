"""A work directory: what a training run leaves behind, and all that an evaluation needs to know of it."""

import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import fsspec.config
from etils import epath

from alibi.config import Config, read_config
from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.runs.identity import defining
from alibi.storage.atomic import is_address
from alibi.storage.lease import Claim
from alibi.storage.store import open_store

# Of every config, as in configs/base.py.
SECTIONS = ("data", "model", "optimizer", "train", "eval", "checkpoint", "log", "mesh", "position_options")


class RunDirectory:
    """One run's files: config, provenance and status as JSON, metrics, tokenizer/, checkpoints/, tensorboard/.

    They lie in a directory or at an address, gs://BUCKET/PATH. Reading raises ValueError, with what to do, where the
    place or a file is missing or damaged.

    Attributes:
      started: when the start that writes here claimed it, which its statuses say; "" before.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise ValueError("the work directory's name is empty; give a directory, or . for the current one")
        self.store = open_store(path)
        if is_address(str(self)):
            check_address(str(self))
            _prepare_for_orbax(str(self))
        self._claim: Claim | None = None
        self.started = ""

    def __str__(self) -> str:
        return str(self.store)

    @property
    def path(self) -> pathlib.Path:
        """The directory; ValueError where it is an address."""
        return self.store.path

    @property
    def name(self) -> str:
        """The directory's own name, which result rows use for the run."""
        return self.store.name

    @property
    def checkpoints(self) -> epath.Path:
        """Where Orbax keeps them; it reads addresses itself."""
        return epath.Path(str(self.store)) / "checkpoints"

    def config(self) -> Config:
        """The resolved configuration that the run was trained with."""
        return read_config(self._read("config.json", sections=SECTIONS))

    def provenance(self) -> dict[str, Any]:
        """Commit, versions, devices, corpus and parameters of the run's last start."""
        return self._read("provenance.json")

    def tokenizer(self) -> Tokenizer:
        with self.store.fetched("tokenizer") as folder:
            return load_tokenizer(folder, f"restore {self}/tokenizer, or train the run again elsewhere")

    def status(self) -> dict[str, Any]:
        """Where the run stands: state (missing, running, interrupted, failed, finished), step, steps, reason..."""
        if not self.store.exists("status.json"):
            return {"state": "missing", "step": 0, "steps": 0, "reason": "", "tokens_per_second": None}
        return self._read("status.json", ("state", "step", "steps", "reason"))

    def saved_steps(self) -> list[int]:
        """The steps whose checkpoints are there, ascending: by their names, which on a disk only complete ones have."""
        if not self.checkpoints.is_dir():
            return []
        if is_address(str(self)):
            from orbax.checkpoint.utils import checkpoint_steps  # takes two seconds to import

            return sorted(checkpoint_steps(self.checkpoints))
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
                f"{self} has no checkpoint, but that of step {saved} was saved: {self.checkpoints} was removed or "
                "emptied since; restore it, train in another --workdir, or remove the work directory to start over"
            )

    def check(self, config: Config) -> None:
        """Makes the directory if need be.

        Raises:
          ValueError: it can't be written, holds a run of another config, or lost all its checkpoints.
        """
        try:
            self.store.check_writable()
            # Asked, not tried: nothing of a finished run is touched.
            folder = None if is_address(str(self)) else self.path / "checkpoints"
            if folder and folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
                raise PermissionError(f"{folder} is read-only, or no directory")
        except OSError as error:
            raise ValueError(f"work directory {self} can't be written ({error}); choose another --workdir") from None
        if differing := self.differing(config):
            raise ValueError(
                f"work directory {self} holds a run of another config:\n"
                + "".join(f"  {key}: {old!r} there, {new!r} now\n" for key, (old, new) in differing.items())
                + "use another --workdir, or the config that it was started with"
            )
        self.check_checkpoints()

    def differing(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Keys that define a run and that `config` sets otherwise than the run that is here, to (there, now)."""
        if not self.store.exists("config.json"):
            return {}
        old, new = defining(self.config()), defining(config)
        keys = sorted(old.keys() | new.keys())
        return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}

    def check_corpus(self, manifests: dict[str, dict[str, Any]]) -> None:
        """Raises ValueError if the run that is here was trained on other tokens than those of `manifests` by split."""
        if not self.store.exists("provenance.json"):
            return
        before = self._read("provenance.json", sections=("corpus",))["corpus"]
        for split in sorted(before.keys() & manifests.keys()):
            for key in ("sha256", "tokenizer_fingerprint"):
                if not isinstance(before[split], dict) or key not in before[split]:
                    raise self._damaged("provenance.json", f"its corpus.{split} lacks {key}")
                if before[split][key] != manifests[split][key]:
                    raise ValueError(
                        f"the {split} text of the run in {self} has changed: its {key} was {before[split][key]} "
                        f"and is {manifests[split][key]}; restore the text, or use another --workdir"
                    )

    def claim(self, config: Config, tokenizer: Tokenizer) -> str:
        """Claims the directory for this process, see `Claim`, and writes the config and, once, the tokenizer.

        Returns `started`, by which the other processes of this start know its statuses from those of another one.

        From then on whatever is written here through `store` raises LostError where the directory is another's.

        Raises:
          ValueError: another process is training here, or has begun a run of another config since
            `check`; or the tokenizer that is here is another.
        """
        self._claim = Claim(self.store, "training")
        self.store, self.started = self._claim.store, datetime.datetime.now(datetime.UTC).isoformat()
        try:
            self.check(config)
            self._keep(tokenizer)
            self.write("config.json", dataclasses.asdict(config))
        except BaseException:
            self.release()
            raise
        return self.started

    def _keep(self, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer, once; raises ValueError if another is here."""
        if not self.store.exists("config.json"):
            for name in self.store.names("tokenizer"):  # of a first start that was killed
                self.store.delete(name)
        if not self.store.exists("tokenizer"):
            # Whole or not at all: a half-written one would be taken for another run's.
            with self.store.made("tokenizer") as partial:
                tokenizer.save(partial)
        elif self.tokenizer().fingerprint() != tokenizer.fingerprint():
            raise ValueError(
                f"the tokenizer of the run in {self} is another than that of data.tokenizer_file or of the train "
                "text now; give the one that is there, or use another --workdir"
            )

    def check_claim(self) -> None:
        """Raises LostError where another process has taken over what `claim` gave, thinking this one gone."""
        if self._claim is not None:
            self._claim.check()

    def release(self) -> None:
        """Gives back what `claim` gave."""
        if self._claim is not None:
            self._claim.release()

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Writes one JSON file; a reader sees the old content or the new, never a part."""
        self.store.write(name, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")

    def write_status(
        self, state: str, *, step: int, steps: int, reason: str = "", saved: int | None = None, **more: Any
    ) -> None:
        """Records where the run stands; `more` are figures, such as tokens_per_second.

        Args:
          saved: the last saved step, 0 for none; None: as the checkpoints that are there say.
        """
        saved = max(self.saved_steps(), default=0) if saved is None else saved
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        known = {"state": state, "step": step, "steps": steps, "reason": reason, "updated": now}
        known |= {"started": self.started} if self.started else {}
        self.write("status.json", known | {"saved": saved} | more)

    def _read(self, name: str, needed: Sequence[str] = (), *, sections: Sequence[str] = ()) -> dict[str, Any]:
        """The content of one JSON file, an object with the keys `needed` and the objects `sections`."""
        try:
            text = self.store.read(name)
        except FileNotFoundError:
            problem = f"{name} is missing; give train.py's --workdir"
            raise ValueError(f"{self} is no work directory of a run: {problem}") from None
        try:
            content = json.loads(text)
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
        return ValueError(f"{self}/{name} is damaged ({error}); restore it, or train the run again elsewhere")


def check_address(address: str) -> None:
    """Raises ValueError where Orbax keeps no checkpoints at such addresses."""
    if not address.startswith("gs:"):
        raise ValueError(
            f"work directory {address} can't hold checkpoints: Orbax writes them to directories and gs:// only; give "
            "one of these (the rows of eval_extrapolation.py may go to s3://, by its --output_dir)"
        )


def _prepare_for_orbax(address: str) -> None:
    """Raises ValueError where Orbax can't read an address here; from then on it sees checkpoints as they are."""
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(
            f"work directory {address} needs the package gcsfs, by which Orbax reads gs://; install it by "
            "bash scripts/setup.sh --extra=gcs"
        )
    # Else a process would go on seeing the checkpoints that it saw first.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
