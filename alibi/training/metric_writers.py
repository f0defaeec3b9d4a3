"""Writers of a run's metrics: JSON lines (read again here), TensorBoard, W&B and Trackio.

A new writer is a subclass of `MetricWriter` and a line in `open_writers`, a new service a line in
`SERVICES`.
"""

import abc
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from alibi.config import Config
from alibi.progress import print_line
from alibi.runs import RunDirectory
from alibi.storage.files import append_row, drop_rows, is_address

METRICS_FILE = "metrics.jsonl"
TRACKED_FILE = "tracked.json"  # in the work directory: the run's id and project at W&B and Trackio
INIT_SECONDS = 20.0  # wait for W&B's service at the start of a run
FINISH_SECONDS = 60.0  # wait at its end for the last rows to arrive


Values = Mapping[str, float | str]  # metrics, and texts


class MetricWriter(abc.ABC):
    """A destination for rows of metrics."""

    @abc.abstractmethod
    def write(self, step: int, values: Values) -> None:
        """Writes values after `step` updates, in addition to earlier values of the step."""

    def close(self, finished: bool) -> None:  # noqa: B027, most have nothing to do
        """Ends the writing. `finished` is False if the run may go on."""


def check_writers(config: Config) -> None:
    """Raises ValueError if the package of a requested writer can't be imported.

    It is imported here, before other threads start: one of them may make imports lazy for a moment
    (etils), and an import in the main thread would fail.
    """
    if config.log.tensorboard:
        _import_tensorboard()
    for package in (name for name in SERVICES if config.log[name]):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"log.{package}=True needs the package {package}, which can't be imported here ({error}); "
                f"pip install {package}, or leave log.{package} at False"
            ) from None


def _import_tensorboard() -> ModuleType:
    """Imports tensorboardX without PyTorch, which it would import, if installed, for 2 to 3 s."""
    modules: dict[str, Any] = sys.modules
    hidden = "torch" not in modules
    if hidden:
        modules["torch"] = None  # makes an import fail
    try:
        return importlib.import_module("tensorboardX")
    finally:
        if hidden:
            del modules["torch"]


def open_writers(config: Config, run: RunDirectory, step: int) -> list[MetricWriter]:
    """Returns the writers of `config` for a run after update `step`."""
    writers: list[MetricWriter] = [JsonLines(run, step)]
    if config.log.tensorboard and is_address(run.path):
        print_line(
            f"TensorBoard's files need a directory, and {run} is an address: none are written"
        )
    elif config.log.tensorboard:
        writers.append(TensorBoard(run, step))
    writers += [
        Service(*service, run, config)
        for package, service in SERVICES.items()
        if config.log[package]
    ]
    return writers


class JsonLines(MetricWriter):
    """Rows of metrics.jsonl, in a bucket files metrics/STEP-TIME.jsonl.

    Rows after `resume_step` are dropped: the run was stopped later than it was saved.
    """

    def __init__(self, run: RunDirectory, resume_step: int):
        self._run, self._file = run, run.path / METRICS_FILE
        run.check_claim()
        drop_rows(self._file, resume_step)

    def write(self, step: int, values: Values) -> None:
        self._run.check_claim()
        append_row(self._file, {"step": step, **values})


class TensorBoard(MetricWriter):
    """Event files in tensorboard/, without points after `resume_step`."""

    def __init__(self, run: RunDirectory, resume_step: int):
        tensorboard = _import_tensorboard()
        self._writer = tensorboard.SummaryWriter(
            str(run.path / "tensorboard"), purge_step=resume_step + 1
        )

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def close(self, finished: bool) -> None:
        self._writer.close()


def tracked(run: RunDirectory, project: str = "") -> dict[str, str]:
    """Returns the run's "id" and "project" at services, which its directory keeps.

    `project` defaults to the name of the sweep's directory, or of the directory above the run's own.
    """
    kept: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        content = json.loads((run.path / TRACKED_FILE).read_bytes())
        kept = {key: str(content[key]) for key in ("id", "project")}
    above = [folder for folder in str(run).split("/")[:-1] if folder and folder != "runs"]
    default = {
        "id": f"{_plain(run.name)[:50]}-{uuid.uuid4().hex[:8]}",
        "project": _plain((above or ["runs"])[-1])[:100],
    }
    names = default | kept | ({"project": project} if project else {})
    if names != kept:
        run.write(TRACKED_FILE, names)
    return names


def _plain(name: str) -> str:
    """Returns the name in characters that services and files allow."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"


class Service(MetricWriter):
    """A package that sends metrics to a service. Its errors are lines on stderr, and training goes on.

    Args:
      title: the service's name in these lines.
      connect: a function from `SERVICES`.
    """

    def __init__(self, title: str, connect: "Connect", run: RunDirectory, config: Config):
        self._title, self._name = title, run.name
        self._log: Callable[..., object] | None = None
        names = tracked(run, config.log.project)
        with self._errors_printed("no metrics are written there"):
            with _quiet():
                self._log, self._finish, address = connect(run, names, dataclasses.asdict(config))
            print_line(f"{self._name}: {address}")

    def write(self, step: int, values: Values) -> None:
        if self._log:
            with self._errors_printed("no more metrics are written there"):
                self._log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        if self._log:
            with self._errors_printed("its last metrics may not be there"), _quiet():
                self._finish(finished)

    @contextlib.contextmanager
    def _errors_printed(self, effect: str) -> Iterator[None]:
        """Ends this writer after an error inside, and prints it."""
        try:
            yield
        except Exception as error:
            self._log = None
            print_line(
                f"{self._name}: {self._title} failed, {effect}, and training goes on ({_first_line(error)})"
            )


# a run at a service: functions to log values and to finish, and a line with its place
Session = tuple[Callable[..., object], Callable[[bool], object], str]
Connect = Callable[[RunDirectory, dict[str, str], dict[str, Any]], Session]


def _connect_wandb(run: RunDirectory, names: dict[str, str], config: dict[str, Any]) -> Session:
    """Returns a session of Weights & Biases, offline if it can't be reached.

    Its files lie in wandb/ in the work directory, or in the current one if the run is in a bucket,
    unless WANDB_DIR names another place.
    """
    import wandb

    folder = None if is_address(str(run)) or "WANDB_DIR" in os.environ else str(run)
    times = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
    settings = wandb.Settings(console="off", silent=True, **times)
    arguments = names | {"name": run.name, "config": config, "dir": folder, "settings": settings}
    why = ""
    try:
        opened = wandb.init(**arguments, resume="allow")
    except Exception as error:
        wandb.teardown()  # or the id would still be in use
        opened = wandb.init(**arguments, resume="allow", mode="offline")
        why = f" ({_first_line(error)})"
    line = f"W&B: {opened.url}"
    if opened.offline:
        line = f"W&B is offline{why}; to send the run: wandb sync {opened.settings.sync_dir}"
    return opened.log, lambda finished: opened.finish(exit_code=0 if finished else 1), line


def _connect_trackio(run: RunDirectory, names: dict[str, str], config: dict[str, Any]) -> Session:
    """Returns a session of Trackio, with its database in $TRACKIO_DIR or Hugging Face's cache.

    Its runs have no ids but names.
    """
    import trackio

    opened = trackio.init(
        project=names["project"], name=names["id"], resume="allow", config=config, embed=False
    )
    line = f"Trackio: trackio show --project={names['project']}"
    # The session's own `finish` would be called again when the process ends.
    return opened.log, lambda finished: trackio.finish(), line


# by the package that the config key log.PACKAGE asks for
SERVICES: dict[str, tuple[str, Connect]] = {
    "wandb": ("W&B", _connect_wandb),
    "trackio": ("Trackio", _connect_trackio),
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides Python's output inside. Without a terminal a package asks the user nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
