"""A table of the paper at a scale: the sweep for its numbers, and its directories."""

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from alibi.config.fields import COMPUTED
from alibi.config.tree import role_of
from alibi.paper.definitions import (
    OPTIONS,
    TABLES,
    Model,
    Quantity,
    load_table,
    table_quantities,
)
from alibi.paper.settings import find_setting
from alibi.runs import RunDirectory
from alibi.storage.files import resolve
from alibi.sweeps.definition import Run, Sweep, load_config, make_sweep


class Reproduction:
    """Table `number`, 1 to 15, at `scale`, in `workdir`, a directory or gs://BUCKET/PATH.

    Tables with one setting, files and overrides share a directory and run names, so that shared runs
    are trained and evaluated once.

    Args:
      files: the user's text file for each split, in place of the setting's own text.
      overrides: config keys for all runs, KEY=VALUE,...

    Raises:
      ValueError: a comma in a file's name, an address that can't hold runs, or later, unknown config
        keys.
    """

    def __init__(
        self,
        number: int,
        scale: str,
        workdir: str | os.PathLike[str],
        *,
        files: Mapping[str, str] | None = None,
        overrides: str = "",
    ):
        self.number, self.definition, self.paper = number, TABLES[number], load_table(number)
        self.setting = find_setting(self.definition.setting, scale)
        self.files, self._overrides = files or {}, overrides
        self._config = self.setting.config_for(self.files, overrides)
        self.scale_directory = resolve(workdir) / scale
        self.directory = self.scale_directory / (
            self.setting.folder + _suffix(self.files, overrides)
        )
        self.outputs = self.directory / "tables"
        # refuses an address that can't hold runs, before any work
        RunDirectory(str(self.directory))

    @functools.cached_property
    def quantities(self) -> dict[tuple[int, int], Quantity]:
        """The quantity of each measurable cell, by row and column after the labels."""
        return table_quantities(self.number)

    @functools.cached_property
    def runs(self) -> dict[Model, Run]:
        """The sweep's run of each model."""
        models = dict.fromkeys(quantity.model for quantity in self.quantities.values())
        return dict(zip(models, self.sweep.runs, strict=True))

    @functools.cached_property
    def sweep(self) -> Sweep:
        """All runs and evaluations of the table."""
        models = dict.fromkeys(quantity.model for quantity in self.quantities.values())
        definition = {"config": self._config, "runs": [self._run_of(model) for model in models]}
        return make_sweep(definition, title=f"Table {self.number} ({self.setting.scale} scale)")

    def _run_of(self, model: Model) -> dict[str, Any]:
        """Returns a sweep's entry: an evaluation for each stride and split, at all lengths of its
        cells.
        """
        windows: dict[tuple[int | None, str], set[int]] = {}
        for quantity in self.quantities.values():
            if quantity.model == model and quantity.eval_length:
                lengths = windows.setdefault((self.stride(quantity), quantity.split), set())
                lengths.add(self.setting.length(quantity.eval_length))
        run = {
            "position": model.position,
            "train_length": self.setting.length(model.train_length),
            "evaluations": [
                {"lengths": sorted(lengths), "stride": stride, "split": split}
                for (stride, split), lengths in windows.items()
            ],
        }
        if option := OPTIONS.get(model.position):
            overrides = ",".join(filter(None, [option, self._overrides]))
            run["config"] = self.setting.config_for(self.files, overrides)
        if model.updates != 1:
            run["train.steps"] = round(model.updates * load_config(self._config, {}).train.steps)
        return run

    def stride(self, quantity: Quantity) -> int | None:
        """Returns the stride in tokens at this scale, or None if it is the evaluation length."""
        return None if quantity.stride is None else self.setting.length(quantity.stride)


def _suffix(files: Mapping[str, str], overrides: str) -> str:
    """Returns the end of a directory's name: short overrides of a run, and a hash over files."""
    parts = sorted(override.strip() for override in overrides.split(",") if override.strip())
    parts = [override for override in parts if role_of(override.partition("=")[0]) != COMPUTED]
    suffix = re.sub(r"[^\w.=+-]", "_", "-" + ",".join(parts)) if parts else ""
    if files or len(suffix) > 80:
        digest = hashlib.sha256(repr((sorted(files.items()), parts)).encode()).hexdigest()[:8]
        suffix = f"{suffix if len(suffix) <= 80 else ''}-{digest}"
    return suffix
