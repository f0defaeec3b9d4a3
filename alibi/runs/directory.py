"""A run's work directory: its files, their state, and the claim of the process that trains."""

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
from typing import Any

from etils import epath

from alibi.config import Config, read_config
from alibi.config.tree import unknown_keys
from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.errors import cause, masked
from alibi.runs.code import code_hash, git_commit
from alibi.runs.identity import differing
from alibi.runs.provenance import (
    SEEDED,
    TOKENIZER,
    changed,
    facts,
    jax_settings,
    read_about,
    versions,
)
from alibi.storage.claims import Claim
from alibi.storage.files import (
    SHA256,
    check_writable,
    digest,
    is_address,
    listed,
    made_whole,
    resolve,
    write_whole,
)

_log = logging.getLogger(__name__)


_warn_once = functools.cache(_log.warning)


class RunDirectory:
    """A run's files: config, provenance and status as JSON, metrics, tokenizer/, checkpoints/,
    tensorboard/.

    Methods raise ValueError, with a remedy, if a file that they read is missing or damaged.

    Attributes:
      path: a directory, or an address gs://BUCKET/PATH.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise ValueError(
                "the work directory's name is empty; give a directory, or . for the current one"
            )
        if os.fspath(path).startswith("s3:"):
            raise ValueError(
                f"work directory {masked(os.fspath(path))} can't hold checkpoints: Orbax writes them to directories "
                "and gs:// only; give one of these (the rows of eval_extrapolation.py may go to s3://, by its "
                "--output_dir)"
            )
        self.path = resolve(path)
        self._claim: Claim | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The path's last part, the run's name in result rows."""
        return self.path.name

    @property
    def checkpoints(self) -> epath.Path:
        return self.path / "checkpoints"

    def config(self) -> Config:
        """Returns the config that the run is trained with."""
        content = self._read("config.json")
        try:
            return read_config(content)
        except ValueError as error:  # the file is whole
            reason = f"another version of this package ({error})"
            if keys := unknown_keys(content):
                reason = f"a newer version of this package: it has {', '.join(keys)}, which this version lacks"
            raise ValueError(
                f"{self}/config.json was written by {reason}; use that version, or train the run again elsewhere"
            ) from None

    def provenance(self) -> dict[str, Any]:
        """Returns commit, versions, devices, corpus and parameters at the last start."""
        return self._read("provenance.json")

    def tokenizer(self) -> Tokenizer:
        """Returns the run's tokenizer. Raises ValueError if it is damaged, or another run's."""
        made = self.provenance() if self._has("provenance.json") else {}
        recorded, folder = facts(made)[TOKENIZER], self.path / "tokenizer"
        tokenizer = load_tokenizer(
            folder, f"restore {folder}, or copy it from a run of the same text"
        )
        # another version of the package may write the same vocabulary otherwise
        alike = recorded in (None, tokenizer.fingerprint())
        if not alike and made["versions"]["tokenizers"] == versions()["tokenizers"]:
            raise ValueError(
                f"{folder} is of another run: its fingerprint is {tokenizer.fingerprint()} and {recorded} was "
                "recorded; restore it"
            )
        return tokenizer

    def status(self) -> dict[str, Any]:
        """Returns state (missing, running, interrupted, failed, finished), step, steps, reason and
        figures.
        """
        if not self._has("status.json"):
            return {
                "state": "missing",
                "step": 0,
                "steps": 0,
                "reason": "",
                "tokens_per_second": None,
            }
        return self._read("status.json")

    def is_imported(self) -> bool:
        """Returns whether it holds a model of the hub, without an optimizer's state."""
        status = self.status()
        return status["reason"] == "imported" and status["step"] == 0

    def saved_steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending."""
        if is_address(self.path):
            from orbax.checkpoint.utils import checkpoint_steps  # takes two seconds to import

            return sorted(checkpoint_steps(self.checkpoints)) if self.checkpoints.is_dir() else []
        # Orbax gives a local checkpoint its final name when it is complete.
        return sorted(
            int(folder.name) for folder in listed(self.checkpoints) if folder.name.isdecimal()
        )

    def check_checkpoints(self) -> None:
        """Raises ValueError if all checkpoints were lost (training would overwrite the run), or if one
        lies beside another run's files.
        """
        saved, steps = self.status().get("saved"), self.saved_steps()
        if saved and not steps:
            raise ValueError(
                f"{self} has no checkpoint, but that of step {saved} was saved: {self.checkpoints} was removed or "
                "emptied since; restore it, train in another --workdir, or remove the work directory to start over"
            )
        for step in steps:
            folder = self.checkpoints / str(step)
            try:
                record = read_about(folder)
            except (OSError, ValueError):
                continue  # damage is told as it is restored; or a later checkpoint has replaced it
            name, differences = "provenance.json", changed(record, self.provenance())
            with contextlib.suppress(ValueError, LookupError):  # another version's config, or none
                if keys := differing(read_config(record["config"]), self.config()):
                    name, differences = "config.json", keys
            for key, (theirs, ours) in differences.items():
                raise ValueError(
                    f"{self}/{name} and checkpoint {folder} are of different runs: {key} is {ours!r} in the file and "
                    f"{theirs!r} in the checkpoint; restore the one that was copied from another run"
                )

    def check(self, config: Config) -> None:
        """Checks whether the run can be trained with `config`, without making a directory.

        Raises:
          ValueError: the directory can't be written, holds an imported model or another config's
            run, or fails `check_checkpoints`.
        """
        if self.is_imported():
            raise ValueError(
                f"work directory {self} holds an imported model, without an optimizer's state; train on from it in "
                f"another --workdir by --init_from={self}"
            )
        try:
            check_writable(self.path)
            # A file is not written here, so that nothing of a finished run changes.
            folder = self.checkpoints
            if folder.exists() and not (
                is_address(folder) or (folder.is_dir() and os.access(folder, os.W_OK))
            ):
                raise PermissionError(f"{folder} is read-only, or no directory")
        except OSError as error:
            raise self._unwritable(error) from None
        self.check_checkpoints()
        if differing := self.differing(config):
            longer = (
                f"\na cosine schedule ends at train.steps; to train longer, start another --workdir from this run's "
                f"parameters by --init_from={self}, or begin a run with another optimizer.schedule"
            )
            raise ValueError(
                f"work directory {self} holds a run of another config:\n"
                + "".join(
                    f"  {key}: {old!r} there, {new!r} now\n"
                    for key, (old, new) in differing.items()
                )
                + "use another --workdir, or the config that it was started with"
                + (longer if list(differing) == ["train.steps"] else "")
            )

    def differing(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Returns the keys that forbid going on with `config`, each with both values."""
        return differing(self.config(), config) if self._has("config.json") else {}

    def check_same(
        self,
        manifests: dict[str, dict[str, Any]],
        method_files: dict[str, str],
        instead: str = "use another --workdir",
    ) -> None:
        """Checks what the run was trained with, and warns if this library's code has changed.

        Args:
          manifests: each split's manifest now.
          method_files: the user's own files now.
          instead: what an error advises.

        Raises:
          ValueError: other tokens, another method file, other random numbers in JAX, or another run's
            tokenizer.
        """
        if not self._has("provenance.json"):
            return
        made = self.provenance()
        now = {"corpus": manifests, "method_files": method_files}
        for key, (old, new) in changed(made, now).items():
            raise ValueError(
                f"{key}, which the run in {self} began with, has changed: it was {old} and is {new}; restore it, or "
                f"{instead}"
            )
        here = jax_settings()
        for name in SEEDED:
            if (old := made.get("jax", here)[name]) != here[name]:
                raise ValueError(
                    f"the run in {self} was trained with {name}={old}, and JAX has {here[name]} here, with which the "
                    f"random numbers differ; set {name.upper()}={old}, or {instead}"
                )
        if made.get("code", code_hash()) != code_hash():
            _log.warning(
                "the run in %s was trained by the code of commit %s, and this is that of %s: its updates may differ; "
                "for a study check that commit out, or train anew in another --workdir",
                self,
                made["commit"],
                git_commit(),
            )
        self.tokenizer()

    def tell_changed_files(self, now: dict[str, str]) -> None:
        """Warns if the files of classes from outside have changed since training."""
        if now and (files := changed(self.provenance(), {"method_files": now})):
            _log.warning("%s: %s has changed since training", self, ", ".join(files))

    def claim(self, config: Config, tokenizer: Tokenizer) -> None:
        """Claims the directory (see `Claim`), and writes the tokenizer, once, and the config.

        From then on `write` raises LostError if a later start has claimed the directory.

        Raises:
          HeldError: another process is training here.
          ValueError: as in `check`, or for another tokenizer.
        """
        try:
            self._claim = Claim(self.path, "training")
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self.check(config)
            self._keep(tokenizer)
            self.write("config.json", dataclasses.asdict(config))
        except BaseException:
            self.release()
            raise

    def _keep(self, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer if there is none. Raises ValueError if there is another."""
        folder = self.path / "tokenizer"
        if not folder.exists():
            with made_whole(folder) as partial:
                tokenizer.save(partial)
        elif self.tokenizer().fingerprint() != tokenizer.fingerprint():
            raise ValueError(
                f"the tokenizer of the run in {self} is another than that of data.tokenizer_file or of the train "
                "text now; give the saved tokenizer, or use another --workdir"
            )

    def check_claim(self) -> None:
        """Raises LostError if a later start has claimed the directory."""
        if self._claim is not None:
            self._claim.check()

    def release(self) -> None:
        """Gives back the claim."""
        if self._claim is not None:
            self._claim.release()

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file, whole and with a checksum. Raises LostError as `check_claim`."""
        self.check_claim()
        written = json.loads(json.dumps(content, default=str))
        written |= {SHA256: digest(written)}
        write_whole(self.path / name, json.dumps(written, indent=2, sort_keys=True) + "\n")

    def write_status(
        self,
        state: str,
        *,
        step: int,
        steps: int,
        reason: str = "",
        **more: Any,
    ) -> None:
        """Writes the run's state, and `more` figures, such as tokens_per_second."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts_now = {
            "state": state,
            "step": step,
            "steps": steps,
            "reason": reason,
            "updated": now,
            "saved": max(self.saved_steps(), default=0),
        }
        self.write("status.json", more | facts_now)

    def _has(self, name: str) -> bool:
        """Returns whether a file is there, or a checkpoint from which it can be made again."""
        return (self.path / name).exists() or bool(self.saved_steps())

    def _read(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file, or if it is missing or damaged, what the newest whole
        checkpoint recorded, with a line.
        """
        content: Any = None
        try:
            content = json.loads((self.path / name).read_bytes())
            if not isinstance(content, dict) or content.pop(SHA256, None) != digest(content):
                raise ValueError("it was altered since it was written")
            return content
        except FileNotFoundError:
            damage = f"{self}/{name} is missing"
            problem = ValueError(
                f"{self} is no work directory of a run: {name} is missing; give train.py's --workdir"
            )
        except ValueError as error:
            damage = f"{self}/{name} is damaged ({error})"
            problem = ValueError(f"{damage}; restore it, or train the run again elsewhere")
            if isinstance(content, dict) and "model_type" in content:
                problem = ValueError(
                    f"{self} is a Hugging Face folder, no work directory; make a work directory of it by python "
                    f"scripts/import_hf.py --model={self} --workdir=DIR"
                )
        for step in reversed(self.saved_steps()):
            with contextlib.suppress(ValueError, KeyError, FileNotFoundError, NotADirectoryError):
                record = read_about(self.checkpoints / str(step))
                last = record["config"]["train"]["steps"]
                status = {"step": step, "steps": last, "reason": "", "saved": step}
                status["state"] = "finished" if step == last else "interrupted"
                _warn_once("%s; its content is taken from the newest whole checkpoint", damage)
                return {"config.json": record["config"], "status.json": status}.get(name, record)
        raise problem

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"work directory {self} can't be written ({cause(error)}); choose another --workdir"
        )
