"""Datasets from the Hugging Face hub and TFDS. Their libraries are imported when a dataset is
read.
"""

import abc
import contextlib
import hashlib
import os
import pathlib
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from alibi.config import DataConfig
from alibi.data.corpus import Corpus, Piece
from alibi.data.datafiles import check_column, row_documents
from alibi.errors import masked
from alibi.extras import needs
from alibi.progress import is_terminal

# Without a network, datasets retries for 23 s and TFDS for minutes.
PROBE_SECONDS = 2.5
_TFDS_HOST = "https://storage.googleapis.com"


class _ExplainedError(ValueError):
    """Its message needs no other context."""


class _Hosted(Corpus):
    """A named dataset. Each row is a document, the text in a column."""

    _package: str  # that reads it

    def __init__(self, data: DataConfig):
        """`data`: the config section. Raises ValueError if it names no dataset."""
        if not data.name:
            raise ValueError(
                f"data.name is empty, but corpus={self.name} needs the dataset's name; set data.name"
            )
        super().__init__(data)
        needs(f"data.corpus={self.name}", self._package)
        self._name = os.path.expanduser(data.name)
        self._local = os.path.isdir(self._name)
        if not self._local and (self._name.startswith(("/", ".")) or self._name.count("/") > 1):
            raise ValueError(
                f"there is no folder {masked(self._name)!r} (seen from {os.getcwd()}); set data.name to a folder that "
                f"exists, or to the name of a dataset of corpus={self.name}"
            )

    def description(self, split: str) -> dict[str, Any]:
        """Returns the name, the split and the column, and a local folder's files.

        It loads nothing, so cached tokens need no network. A name without data.revision, or with a
        tag, means the version read first, even if the host has a later one. `revision` names it.
        """
        return {
            "corpus": self.name,
            "name": _folder_hash(self._name) if self._local else self._name,
            "subset": self.data.subset,
            "revision": self.data.revision,
            "split": self._split(split),
            "column": self.data.column,
        }

    def title(self, split: str) -> str:
        """Returns the dataset's or its folder's name, and the subset."""
        name = pathlib.Path(self._name).resolve().name if self._local else self._name
        return "/".join(filter(None, [name, self.data.subset]))

    def source(self, split: str) -> str:
        """Returns name, subset, split and revision."""
        revision = self.data.revision
        parts = [
            self._name,
            self.data.subset,
            self._split(split),
            revision and f"revision {revision}",
        ]
        return f"{self.name}: " + ", ".join(filter(None, parts))

    def check(self, splits: Iterable[str]) -> None:
        """Raises ValueError if the dataset can't be reached or lacks a split. Fetches only their
        list.
        """
        if splits := list(splits):
            with self._connection(), self._errors_explained(splits[0]):
                self._check_splits(splits, list(map(str, self._known_splits())))

    @abc.abstractmethod
    def _known_splits(self) -> Iterable[Any]:
        """Returns the dataset's splits, or none if they are unknown."""

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        yield

    def _split(self, split: str) -> str:
        """Returns the dataset's own name for `split`."""
        if not self.data[split]:
            raise _ExplainedError(
                f"data.{split} is empty, but corpus={self.name} needs a split's name; set data.{split}"
            )
        return self.data[split]

    def _check_splits(self, splits: Iterable[str], names: list[str]) -> None:
        """Raises ValueError if a split is no expression in these `names`, if there are any."""
        for split in splits:
            for term in self._split(split).split("+") if names else ():
                name = term.partition("[")[0].strip()
                if name not in (*names, "all"):
                    empty = "" if split == "train" else f", or leave data.{split} empty for none"
                    raise _ExplainedError(
                        f"data.{split}={self._split(split)!r}: {self._name} has no split {name!r}; "
                        f"use {', '.join(names)}{empty}"
                    )

    @contextlib.contextmanager
    def _errors_explained(self, split: str) -> Iterator[None]:
        """Turns the library's errors, which have no common class, into a ValueError that names the
        keys to check.
        """
        try:
            yield
        except _ExplainedError:
            raise
        except Exception as error:
            # the library wraps an error of a reader into a message without its reason
            cause = (type(error).__name__ == "DatasetGenerationError" and error.__cause__) or error
            reason = masked((str(cause).strip() or type(cause).__name__).splitlines()[0])
            raise ValueError(
                f"{self.source(split)} can't be loaded: {reason}. Check data.name, data.subset, data.revision, "
                f"data.column and data.{split}"
            ) from error


class Hub(_Hosted):
    """Any dataset that `datasets.load_dataset` reads: a name on the hub, or a folder with parquet,
    JSON or text files.
    """

    name = "hub"
    _package = "datasets"

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields each row as a document. Raises ValueError within 5 s if neither hub nor cache has
        the dataset.
        """
        with self._connection():
            yield from row_documents(self._values(split), self.data.column, self.source(split))

    def _known_splits(self) -> Iterable[Any]:
        builder = self._builder()
        return builder.info.splits or builder.config.data_files or ()

    def _builder(self, **options: Any) -> Any:
        import datasets
        import huggingface_hub.utils

        if not is_terminal():
            datasets.disable_progress_bars()
            huggingface_hub.utils.disable_progress_bars()
        data = self.data
        builder = datasets.load_dataset_builder(
            self._name, data.subset or None, revision=data.revision or None, **options
        )
        # csv: words such as "NA" and "null" are no nulls, and numbers are text
        if hasattr(builder.config, "na_filter") and not options:
            features = datasets.Features({data.column: datasets.Value("string")})
            return self._builder(usecols=[data.column], na_filter=False, features=features)
        return builder

    def _values(self, split: str) -> Iterator[Any]:
        data = self.data
        with self._errors_explained(split):
            builder = self._builder()
            self._note_commit(builder.hash)
            if data.streaming:
                rows = builder.as_streaming_dataset(split=self._split(split))
            else:
                builder.download_and_prepare()
                rows = builder.as_dataset(split=self._split(split))
        if rows.column_names is not None:
            check_column(data.column, rows.column_names, self._name)
        with self._errors_explained(split):
            for batch in rows.select_columns([data.column]).iter(batch_size=256):
                yield from batch[data.column]

    def _note_commit(self, commit: str) -> None:
        """Sets `revision`. Raises ValueError if `data.revision` is another commit's hash."""
        revision = self.data.revision
        if self._local or commit == revision:
            return
        # If the hub gives nothing (no network, a wrong revision, no access), the library takes the
        # newest copy in its cache, whatever the revision.
        if re.fullmatch("[0-9a-f]{40}", revision):
            raise _ExplainedError(
                f"data.revision={revision}, but for the hub dataset {self._name!r} the library took the newest copy in "
                f"its cache, commit {commit}; check data.revision, your access and the network, or set data.revision "
                "to that commit"
            )
        self.revision = commit

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """Puts the library into its offline mode if the hub does not answer."""
        import huggingface_hub.constants as hub

        if self._local or (not hub.HF_HUB_OFFLINE and reachable([hub.ENDPOINT])):
            yield
            return
        cache = pathlib.Path(
            os.environ.get("HF_DATASETS_CACHE") or os.path.join(hub.HF_HOME, "datasets")
        )
        if self.data.streaming or not (cache / self._name.replace("/", "___")).is_dir():
            why = (
                "HF_HUB_OFFLINE is set"
                if hub.HF_HUB_OFFLINE
                else f"{masked(hub.ENDPOINT)} doesn't answer"
            )
            raise _ExplainedError(
                f"the hub dataset {self._name!r} can't be reached: {why}, and this machine has no copy of it. Connect, "
                "or run scripts/prepare_data.py on a machine with a network and copy the cache directory here, or set "
                "data.name to a folder that holds the dataset's files, or use corpus=text"
            )
        with offline():
            yield


class Tfds(_Hosted):
    """A TFDS dataset in array_record files, under its name or in a folder,
    needs no TensorFlow.
    """

    name = "tfds"
    _package = "tensorflow_datasets"

    def __init__(self, data: DataConfig):
        if data.streaming:
            raise ValueError(
                "data.streaming=True needs corpus=hub: tfds prepares a dataset first; set it to False"
            )
        super().__init__(data)

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields each record as a document. Raises ValueError within 5 s if it can be neither found
        nor downloaded.
        """
        data = self.data
        with self._errors_explained(split):
            builder = self._builder()
            if not self._local:
                if not pathlib.Path(builder.data_dir).exists():
                    if not reachable([_TFDS_HOST, builder.info.homepage]):
                        raise _ExplainedError(
                            f"the TFDS dataset {self._name!r} can't be reached: it isn't prepared in "
                            f"{builder.data_dir} and there is no network. Connect, or copy a prepared dataset "
                            "(file_format=array_record) there or set $TFDS_DATA_DIR or data.name to its folder, or "
                            "use corpus=text"
                        )
                    builder.download_and_prepare(file_format="array_record")
                self.revision = "" if data.revision else str(builder.version)
        check_column(data.column, list(builder.info.features), self._name)
        with self._errors_explained(split):
            records = builder.as_data_source(split=self._split(split))
        yield from row_documents(
            (record[data.column] for record in records), data.column, self.source(split)
        )

    def _known_splits(self) -> Iterable[Any]:
        return self._builder().info.splits

    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        if not is_terminal():
            tfds.disable_progress_bar()
        data = self.data
        if self._name.startswith("huggingface:"):  # TFDS would ask the hub for minutes
            raise _ExplainedError(
                f"data.name={self._name!r} is a hub dataset; set data.corpus=hub and drop the prefix"
            )
        if self._local:
            return tfds.builder_from_directory(self._name)
        version = data.revision and f":{data.revision}"
        name = "/".join(filter(None, [self._name, data.subset])) + version
        return tfds.builder(name, file_format="array_record")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Puts `datasets` and `huggingface_hub` into their offline mode: local files and cached copies
    load, and anything else fails at once.
    """
    import datasets
    import huggingface_hub.constants as hub

    saved = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = saved


def reachable(urls: Sequence[str], seconds: float = PROBE_SECONDS) -> bool:
    """Returns whether a URL answers, also with an error page, through the environment's proxies."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for url in urls:  # in threads, because a request's time limit does not cover name resolution
        threading.Thread(
            target=lambda url=url: answers.put(_answers(url, seconds)), daemon=True
        ).start()
    deadline = time.monotonic() + seconds + 0.25
    try:
        return any(answers.get(timeout=max(0.0, deadline - time.monotonic())) for _ in urls)
    except queue.Empty:
        return False


def _answers(url: str, seconds: float) -> bool:
    url = re.sub("//[^/]*@", "//", url)  # urllib takes no user and password in an address
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
    except Exception as error:  # OSError, ValueError, and classes of http.client for a bad address
        return isinstance(error, urllib.error.HTTPError)
    return True


def _folder_hash(folder: str) -> str:
    """Returns a hash over the names, sizes and change times in a folder."""
    files = filter(pathlib.Path.is_file, sorted(pathlib.Path(folder).rglob("*")))
    lines = (
        f"{path.relative_to(folder)}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\n"
        for path in files
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
