"""Results of the analysis of NLL dumps: the lines of by_context.jsonl."""

import dataclasses
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, order=True)
class Scoring:
    """A run, a text and windows: the key of an NLL dump, and of its analyses."""

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
class Analysis:
    """A result of the analysis of an NLL dump; `analysis` names the kind of its line."""

    analysis: ClassVar[str]

    of: Scoring

    def to_json(self) -> dict[str, Any]:
        """Returns the content of its line."""
        found = dataclasses.asdict(self)
        of = found.pop("of")
        if not of["override"]:
            del of["override"]
        windows = {
            "eval_length": of.pop("length"),
            "mode": self.of.mode,
            "stride": of.pop("stride"),
        }
        if isinstance(self, EarlyTokenCurse):
            del windows["mode"], windows["stride"]
        return {"analysis": self.analysis} | of | windows | found


@dataclasses.dataclass(frozen=True)
class ByContext(Analysis):
    """NLL of the tokens with `context_from` to `context_to` inputs of context."""

    analysis = "by_context"

    context_from: int
    context_to: int
    tokens: int
    nll_nats: float  # summed over the tokens
    # 95% of the mean, by blocks of pieces of a window's length; None: one piece
    interval: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class ByPosition(Analysis):
    """NLL of the tokens at a position in their windows, from 1: the window's inputs up to the
    token's own.
    """

    analysis = "by_position"

    position: int
    tokens: int
    nll_nats: float


@dataclasses.dataclass(frozen=True)
class GainShare:
    """The share of a gain on tokens of a range of contexts; None if the gain is uncertain."""

    context_from: int
    context_to: int
    share: float | None


@dataclasses.dataclass(frozen=True)
class EarlyTokenCurse(Analysis):
    """The gain from blocks to blocks of `longer_length`, and the share explained by fewer early
    tokens.

    Shares are None if the gain may be half of its measured value, or chance: they could be any
    number.
    """

    analysis = "early_token_curse"

    longer_length: int
    tokens: int
    gain_nats: float
    # 95%, by blocks of neighbouring windows of the longer length; None: one window
    gain_interval: tuple[float, float] | None
    composition_share: float | None
    sliding_share: float | None
    sliding_stride: int | None
    gain_by_context: tuple[GainShare, ...]
