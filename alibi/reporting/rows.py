"""Rows: a measurement each, and a line of results.jsonl; later rows replace earlier rows."""

import dataclasses
import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from alibi.config.fields import without_lists
from alibi.config.override import Override


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once in a process, which may read a damaged file several times."""
    logging.getLogger(__name__).warning(message)


MASKED = "masked"  # the mode of windows in which masked tokens are predicted from both sides
SEPARATELY = "separately"  # the mode of windows that hold documents, each scored on its own


@dataclasses.dataclass(frozen=True)
class Device:
    """The kind and number of the devices of an evaluation."""

    kind: str
    count: int

    @property
    def text(self) -> str:
        """The device in words, such as "cpu x1"."""
        return f"{self.kind} x{self.count}"


@dataclasses.dataclass(frozen=True)
class ContextUse:
    """The gain of longer windows over shorter ones on the same tokens, in nats per token; None
    until it is known.
    """

    windows: int  # number of windows; their last tokens are scored, the same tokens at each length
    from_length: int  # the shortest length, to which the gain is relative
    gain_nats: float | None = None
    # 95% interval of the gain over the text; of earlier versions, without `parts`, too narrow
    interval: tuple[float, float] | None = None
    longest: int | None = None  # the longest length, which decides where the scored tokens lie
    # the gains summed over consecutive windows, see `alibi.reporting.intervals.part_sums`
    parts: tuple[float, ...] | None = None

    @property
    def tokens(self) -> "ContextUse":
        """The identity of the scored tokens: gains can be compared only on the same tokens."""
        return dataclasses.replace(self, gain_nats=None, interval=None, parts=None)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Packed documents that don't see each other."""

    # counted from each document's start ("restart") or "through" a window; "separately":
    # each document is scored on its own, whatever the run's training
    positions: str
    # inputs that the prediction of a scored token sees, at most those of its document in its window
    mean_context: float | None = None  # None until it is known


@dataclasses.dataclass(frozen=True)
class Passkey:
    """The accuracy of passkey retrieval in windows of a row's length."""

    distance: int  # tokens from a digit of the key in the text to the same digit of the answer
    prompts: int
    accuracy: float | None = None  # the share of prompts with the right key; None until it is known


@dataclasses.dataclass(frozen=True, order=True)
class Scoring:
    """A run, a text and windows: the key of an NLL dump, and of the rows computed from its scores."""

    run: str
    step: int  # updates of the checkpoint
    tokens_sha256: str | None  # of the token file: tells texts apart
    # of the config keys of the run and its evaluation: a run's name may be used again
    config_hash: str | None
    length: int  # inputs of a window
    stride: int  # tokens scored by each window
    override: str = ""  # the row's `Override` as text; empty: the run was scored as it was trained

    @property
    def mode(self) -> str:
        return "nonoverlapping" if self.stride == self.length else "sliding"


@dataclasses.dataclass(frozen=True)
class Row:
    """A run at an evaluation length: the measurement and its results, None without a result."""

    run: str  # the name of its work directory
    position: str
    train_length: int  # 0: an n-gram, which has neither length nor updates of training
    eval_length: int
    # of the windows: "nonoverlapping" or "sliding"; "same tokens" with `context_use`; "passkey";
    # "masked": windows don't overlap, and masked tokens alone are scored; "separately": windows hold
    # whole documents
    mode: str
    stride: int  # tokens scored by each window
    corpus: str
    split: str
    seed: int
    step: int  # updates of the checkpoint
    parameters: int
    nll_nats: float | None = None  # summed over the tokens, so that rows can be pooled without loss
    # summed over consecutive parts of the scored tokens, of equal numbers of tokens, with six digits
    # (`alibi.reporting.intervals.part_sums`); None: with `context_use`, or of an earlier version
    parts: tuple[float, ...] | None = None
    tokens: int | None = None  # scored: of the text, or those masked or at the ends of windows
    words: int | None = None  # of the scored text
    bytes: int | None = None  # of the scored text
    perplexity: float | None = None
    word_perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None  # scored; of masked rows, all tokens of the text
    seconds: float | None = None  # of scoring, without compilation
    device: Device | None = None
    # UTC, such as 2026-11-27T09:30:00Z, before scoring; None here and below in earlier versions
    date: str | None = None
    processor: str | None = None  # the model name of the host's CPU
    jax: str | None = None  # the version
    commit: str | None = None
    dtype: str | None = None  # of the evaluation
    config_hash: str | None = None  # see `Scoring`
    seedless_hash: str | None = None  # the same with seed=0; None in rows of earlier versions
    tokens_sha256: str | None = None  # see `Scoring`
    text_hash: str | None = None  # of the text
    # of the tokens of training on text files, whose content `config_hash` does not tell
    trained_on: str | None = None
    override: Override | None = None  # None: evaluated as it was trained, with `position`
    context_use: ContextUse | None = None
    passkey: Passkey | None = None
    unknown_tokens: int | None = None  # of the text: outside the tokenizer's vocabulary
    documents: Documents | None = None  # None: a token sees all documents in its window
    # objective.mask_rate, mask_random, mask_kept; None: not masked, or a row of an earlier version
    masks: tuple[float, float, float] | None = None
    limit: bool = False  # the error is final: the method or the text has no such length
    error: str | None = None  # why there is no result

    @property
    def cell(self) -> tuple:
        """The identity of the measurement: a run has a single value for each cell, from its last
        row.
        """
        distance = self.passkey.distance if self.passkey else None
        return (
            *(self.run, self.eval_length, self.mode, self.stride, self.corpus, self.split),
            *(distance, str(self.override or "")),
        )

    @property
    def measurement(self) -> tuple:
        """The cell, checkpoint, texts and config: rows with equal ones repeat the same measurement."""
        use = self.context_use.tokens if self.context_use else None
        return self.cell, self.scoring, use, self.passkey and self.passkey.prompts, self.trained_on

    @property
    def scoring(self) -> Scoring:
        text, override = self.tokens_sha256, str(self.override or "")
        return Scoring(
            self.run, self.step, text, self.config_hash, self.eval_length, self.stride, override
        )

    @property
    def is_trained(self) -> bool:
        """Whether the row is of a model trained by updates, not of an n-gram."""
        return self.train_length > 0

    @property
    def is_measured(self) -> bool:
        """Whether the row holds a result, not an error."""
        found = self.nll_nats if self.passkey is None else self.passkey.accuracy
        return not self.error and found is not None

    @property
    def series(self) -> str:
        """The run's name without its seed, alibi-L128 for alibi-L128-seed0, followed by its
        override.
        """
        seed = f"seed=?{self.seed}"
        name = re.sub(rf"^{seed}[-_.]|[-_.]{seed}(?!\d)", "", self.run) or self.run
        return name if self.override is None else f"{name} {self.override}"

    @property
    def tested(self) -> tuple[str, int, str]:
        """The identity of a checkpoint as it is tested: run, step and override."""
        return self.run, self.step, str(self.override or "")

    @property
    def but_seed(self) -> tuple:
        """Config, train text, step and override: equal if runs differ in their seed only.

        Rows of earlier versions don't know the config without its seed: here they have the name
        without it, position, train length and parameters.
        """
        named = (self.series, self.position, self.train_length, self.parameters)
        return (self.seedless_hash or named, self.trained_on), *self.tested[1:]

    @property
    def nats_per_token(self) -> float | None:
        return None if self.nll_nats is None or not self.tokens else self.nll_nats / self.tokens

    @property
    def speed_of_device(self) -> float | None:
        """Tokens per second of a single device."""
        return self.tokens_per_second and self.tokens_per_second / (
            self.device.count if self.device else 1
        )

    @property
    def short_commit(self) -> str:
        """Twelve digits of the commit, and "-dirty" if files differed from it."""
        commit, dirty, _ = (self.commit or "").partition("-dirty")
        return commit[:12] + dirty

    def scored(
        self,
        nll_nats: float,
        *,
        tokens: int,
        words: int | None,
        bytes: int | None,
        seconds: float,
        read: int | None = None,
        parts: tuple[float, ...] | None = None,
    ) -> "Row":
        """Returns the row with the result of scoring a text; a perplexity beyond float64 is None.

        Args:
          tokens: scored.
          read: tokens that count in the speed; None: `tokens`.
          parts: `nll_nats` of consecutive parts of the text.
        """
        return dataclasses.replace(
            self,
            nll_nats=nll_nats,
            parts=parts,
            tokens=tokens,
            words=words,
            bytes=bytes,
            perplexity=_exp(nll_nats / tokens),
            word_perplexity=_exp(nll_nats / words) if words else None,
            bits_per_byte=nll_nats / math.log(2) / bytes if bytes else None,
            tokens_per_second=(read or tokens) / seconds,
            seconds=seconds,
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Row":
        """Returns the row of a line's content; raises TypeError if a key is missing or unknown."""
        values = without_lists(content)
        kinds = {"device": Device, "context_use": ContextUse, "passkey": Passkey}
        for key, kind in (kinds | {"documents": Documents}).items():
            if values.get(key) is not None:
                values[key] = kind(**values[key])
        if values.get("override") is not None:
            values["override"] = Override.from_json(values["override"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the row's line; keys without a value are left out."""
        line = dataclasses.asdict(self)
        if self.override is not None:
            line["override"] = self.override.to_json()
        if self.context_use is not None and self.context_use.parts is None:
            del line["context_use"]["parts"]
        return {
            key: value for key, value in line.items() if value is not None and value is not False
        }


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Returns the rows of a file of JSON lines in their order; none if there is no such file.

    A damaged line is left out, and a logged warning names it: its measurement will be repeated.
    """
    file, rows = epath.Path(path), []
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(Row.from_json(json.loads(line)))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                warn_once(
                    f"{file} line {number} is no whole row and was left out; "
                    "a killed process may have cut it"
                )
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns a row per cell, in order of first appearance: the last measured row, else the last
    error.

    If runs of the same name have different configs or train texts, only the rows of the last of
    them count, so they never mix.
    """
    rows = list(rows)
    trained = {row.run: (row.config_hash, row.trained_on) for row in rows}
    cells: dict[tuple, Row] = {}
    for row in rows:
        known = cells.get(row.cell)
        if (row.config_hash, row.trained_on) == trained[row.run] and (
            known is None or row.is_measured or not known.is_measured
        ):
            cells[row.cell] = row
    return list(cells.values())


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < 709 else None
