"""A row of results is one measurement and one line of results.jsonl; later rows replace earlier ones."""

import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from alibi.config.override import Override

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Device:
    """What computed a row; `count` is None in a row that doesn't say how many there were."""

    kind: str
    count: int | None

    @property
    def text(self) -> str:
        """The device in words, such as "cpu x1"."""
        return self.kind if self.count is None else f"{self.kind} x{self.count}"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Device | None":
        """The device of a line; older ones have only its text."""
        text = row["device"] or ""
        if not isinstance(text, str):
            raise ValueError(f"a result row has device={text!r:.60}, which must be text or null")
        if text and "device_kind" in row:
            found = {"kind": row["device_kind"], "count": row.get("device_count")}
            _check_types(cls, found)
            return cls(**found)
        kind, _, count = text.rpartition(" x")
        return None if not text else cls(kind, int(count)) if kind and count.isdecimal() else cls(text, None)


@dataclasses.dataclass(frozen=True)
class ContextUse:
    """What longer windows make of the same tokens, in nats a token; None as long as it isn't known."""

    windows: int  # whose last tokens are scored, the same at each length
    from_length: int  # of the windows that the gain is counted from
    gain_nats: float | None = None
    interval: tuple[float, float] | None = None  # holds the gain with a probability of 95%, by resampling the windows
    longest: int | None = None  # of the lengths, on which it depends where the tokens lie; None in old rows

    def to_json(self) -> dict[str, Any]:
        line = dataclasses.asdict(self)
        return line if self.longest is not None else {key: line[key] for key in line if key != "longest"}

    @property
    def tokens(self) -> "ContextUse":
        """What says which tokens are scored, without the result: only of the same tokens can gains be compared."""
        return dataclasses.replace(self, gain_nats=None, interval=None)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ContextUse":
        interval = content["interval"] and tuple(content["interval"])
        return cls(content["windows"], content["from_length"], content["gain_nats"], interval, content.get("longest"))


@dataclasses.dataclass(frozen=True)
class Passkey:
    """How often a key was found again in windows of a row's length."""

    distance: int  # tokens from a digit of the key, where it is told, to the same digit of the answer
    prompts: int
    accuracy: float | None = None  # the share of prompts whose key was answered; None as long as it isn't known


@dataclasses.dataclass(frozen=True, order=True)
class Scoring:
    """What a text was scored by, in windows of one length and stride: a row is about one, and so is an NLL dump."""

    run: str
    step: int  # updates of the checkpoint
    tokens_sha256: str | None  # of the token file, so that another text isn't taken for this one; None in old rows
    config_hash: str | None  # of the config that defines the run and its evaluation: a name may be used again
    length: int  # inputs of a window
    stride: int  # tokens that it scores
    override: str = ""  # the text of the row's `Override`; empty: the run was scored as it was trained

    @property
    def mode(self) -> str:
        return "nonoverlapping" if self.stride == self.length else "sliding"


@dataclasses.dataclass(frozen=True)
class Row:
    """One run at one length: what was measured, and what was found; that is None where nothing could be."""

    run: str  # its name, that of its work directory
    position: str
    train_length: int
    eval_length: int
    mode: str  # of the windows: "nonoverlapping", "sliding"; "same tokens" where `context_use` is measured, "passkey"
    stride: int  # tokens that each window scores
    corpus: str
    split: str
    seed: int
    step: int  # updates of the checkpoint
    parameters: int
    nll_nats: float | None = None  # the sum over the tokens, so that rows can be pooled without loss
    tokens: int | None = None  # of the text that was scored
    words: int | None = None  # of the text that was scored
    bytes: int | None = None  # of the text that was scored
    perplexity: float | None = None
    word_perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None  # that the scoring took, without compilation
    device: Device | None = None
    commit: str | None = None
    dtype: str | None = None  # of the evaluation; None in old rows
    config_hash: str | None = None  # see `Scoring`
    tokens_sha256: str | None = None  # see `Scoring`
    text_hash: str | None = None  # of the text; None in old rows
    context_use: ContextUse | None = None
    passkey: Passkey | None = None
    override: Override | None = None  # None: evaluated as it was trained, with `position`
    limit: bool = False  # the error is final: the method or the text has no such length, however often it is tried
    error: str | None = None  # why there is no result
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys of the line that this code doesn't know

    @property
    def cell(self) -> tuple:
        """What is measured: a run has one value for each cell, that of the last row."""
        known: list = [self.run, self.eval_length, self.mode, self.stride, self.corpus, self.split]
        known += [] if self.passkey is None else [self.passkey.distance]
        return tuple(known if self.override is None else [*known, str(self.override)])

    @property
    def measurement(self) -> tuple:
        """The cell and what scored it: two rows with equal ones are the same measurement."""
        use = self.context_use
        tokens = (use.windows, use.from_length, use.longest) if use else ()
        return self.cell, self.scoring, *tokens, *((self.passkey.prompts,) if self.passkey else ())

    @property
    def scoring(self) -> Scoring:
        text, override = self.tokens_sha256, str(self.override or "")
        return Scoring(self.run, self.step, text, self.config_hash, self.eval_length, self.stride, override)

    @property
    def is_measured(self) -> bool:
        """Whether the row holds a result, not an error."""
        found = self.nll_nats if self.passkey is None else self.passkey.accuracy
        return not self.error and found is not None

    @property
    def series(self) -> str:
        """The run's name without its seed, alibi-L128-seed0 becomes alibi-L128, and what it was evaluated as."""
        name = re.sub(rf"(^|[-_.])seed=?{self.seed}(?!\d)", "", self.run).strip("-_.") or self.run
        return name if self.override is None else f"{name} {self.override}"

    @property
    def speed_of_device(self) -> float | None:
        """Tokens per second of one device; a row that doesn't say how many there were had one."""
        return self.tokens_per_second and self.tokens_per_second / ((self.device and self.device.count) or 1)

    @property
    def short_commit(self) -> str:
        """Twelve digits of the commit, and "-dirty" where the files were not the commit's."""
        commit, dirty, _ = (self.commit or "").partition("-dirty")
        return commit[:12] + dirty

    def scored(self, nll_nats: float, *, tokens: int, words: int | None, bytes: int | None, seconds: float) -> "Row":
        """The row with the result of scoring a text of these counts.

        Perplexities that are no float64 are None, as is what the text has none of.
        """
        return dataclasses.replace(
            self,
            nll_nats=nll_nats,
            tokens=tokens,
            words=words,
            bytes=bytes,
            perplexity=_exp(nll_nats / tokens),
            word_perplexity=_exp(nll_nats / words) if words else None,
            bits_per_byte=nll_nats / math.log(2) / bytes if bytes else None,
            tokens_per_second=tokens / seconds,
            seconds=seconds,
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Row":
        """The row of a line's content; raises ValueError where that lacks what every row has, or has another type."""
        if not isinstance(content, Mapping):
            raise ValueError(f"a result row is an object, but got {content!r:.60}; a row holds {', '.join(ALWAYS)}")
        missing = [key for key in ALWAYS if key not in content]
        if missing:
            raise ValueError(f"a result row lacks {', '.join(missing)}; a row holds {', '.join(ALWAYS)}")
        known = {key: content[key] for key in (*ALWAYS, *SOMETIMES) if key in content}
        _check_types(Row, known)
        own = {
            "context_use": ContextUse.from_json,
            "passkey": lambda one: Passkey(**one),
            "override": Override.from_json,
        }
        try:
            known |= {key: make(known[key]) for key, make in own.items() if key in known}
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"a result row has a {' or '.join(own)} that is none: {error!r:.80}") from None
        more = {key: value for key, value in content.items() if key not in (*known, "device_kind", "device_count")}
        return cls(**known | {"device": Device.from_json(content), "more": more})

    def to_json(self) -> dict[str, Any]:
        """The content of the row's line; a number that is not finite becomes None, because JSON has none such.

        Where that is `nll_nats`, the `error` says so.
        """
        found = {key: getattr(self, key) for key in (*ALWAYS, *SOMETIMES)}
        infinite = [key for key, value in found.items() if isinstance(value, float) and not math.isfinite(value)]
        if "nll_nats" in infinite:
            found["error"] = self.error or f"nll_nats is {self.nll_nats}"
        found |= dict.fromkeys(infinite)
        line = {key: value for key, value in found.items() if key in ALWAYS or value not in (None, False)}
        if self.context_use is not None:
            line["context_use"] = self.context_use.to_json()
        if self.passkey is not None:
            line["passkey"] = dataclasses.asdict(self.passkey)
        if self.override is not None:
            line["override"] = self.override.to_json()
        if self.device is not None:
            line |= {"device": self.device.text, "device_kind": self.device.kind, "device_count": self.device.count}
        return line | dict(self.more)


# Keys that each line has, and those that it has where there is something to say.
SOMETIMES = (
    "dtype",
    "config_hash",
    "tokens_sha256",
    "text_hash",
    "override",
    "context_use",
    "passkey",
    "limit",
    "error",
)
ALWAYS = tuple(field.name for field in dataclasses.fields(Row) if field.name not in (*SOMETIMES, "more"))


_JSON = {str: "text", bool: "true or false", int: "a whole number", float: "a number", types.NoneType: "null"}


def _check_types(of: type, content: Mapping[str, Any]) -> None:
    """Raises ValueError where a field of `of` that JSON holds as it is has another type in `content`."""
    hints = typing.get_type_hints(of)
    for key, value in content.items():
        kinds = set(typing.get_args(hints[key]) or [hints[key]])
        if kinds <= _JSON.keys() and type(value) not in kinds | ({int} if float in kinds else set()):
            needed = " or ".join(words for kind, words in _JSON.items() if kind in kinds)
            raise ValueError(f"a result row has {key}={value!r:.60}, which must be {needed}")


def parse_rows(content: bytes, source: str) -> list[Row]:
    """The rows of JSON lines, in their order.

    A line that is no whole row is left out and reported by a logged warning, which names the
    `source`: its measurement will be made again.
    """
    rows = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row.from_json(json.loads(line)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            _log.warning(
                "%s line %d is no whole row and was left out; a killed process may have cut it", source, number
            )
    return rows


def read_rows(path: str | os.PathLike) -> list[Row]:
    """The rows of a JSONL file; none if it does not exist."""
    path = pathlib.Path(path)
    return parse_rows(path.read_bytes(), str(path)) if path.exists() else []


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row a cell, in order of first appearance: the last measured one, or the last error where none succeeded.

    Of runs of one name with different configs only the last one's rows count, so that they never mix.
    """
    rows = list(rows)
    configs = {row.run: row.config_hash for row in rows}
    cells: dict[tuple, Row] = {}
    for row in rows:
        known = cells.get(row.cell)
        if row.config_hash == configs[row.run] and (known is None or row.is_measured or not known.is_measured):
            cells[row.cell] = row
    return list(cells.values())


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < 709 else None
