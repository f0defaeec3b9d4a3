"""LongPPL (Fang et al. 2024, arXiv 2410.23771): the perplexity of the tokens that need a long context."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool

from alibi.config import Config
from alibi.evaluation.base import (
    Cell,
    NoResultError,
    Subject,
    Text,
    option,
    refuse_other_objectives,
)
from alibi.evaluation.perplexity import OfText, text_results
from alibi.evaluation.windows import windows_of
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Row
from alibi.reporting.tables import PERPLEXITY
from alibi.runs import RunDirectory, evaluation_hash
from alibi.storage.cache import content_key

if TYPE_CHECKING:
    from alibi.evaluation.output import Output

KEY_PERPLEXITY = dataclasses.replace(PERPLEXITY, title="Perplexity of key tokens (LongPPL)")


@dataclasses.dataclass(frozen=True)
class LongPPL(OfText):
    """Perplexity of the key tokens, which another run predicts much better with a long context than
    with a short one. They are the same tokens at each length.
    """

    key_run: str = option("", "work directory of the run that chooses the key tokens")
    key_length: int | None = option(
        None, "tokens of its long windows; defaults to its train_length", at_least=1
    )
    key_short: int | None = option(
        None, "tokens of its short windows; defaults to an eighth of the long ones", at_least=1
    )
    key_gain: float = option(2.0, "nats that a key token gains by the long context, at least")
    key_loss: float = option(2.0, "nats that it costs with the long context, at most")

    kinds: ClassVar = (KEY_PERPLEXITY,)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives(self.name(), config)
        if not self.key_run:
            raise ValueError(
                f"{self.name()} needs a run that chooses the key tokens, such as the one with the longest "
                "train_length; give --key_run=WORKDIR"
            )

    def text(self, subject: Subject, cell: Cell) -> Text:
        """Returns the text under a hash of its tokens and of the run that chooses among them."""
        text, key = super().text(subject, cell), RunDirectory(self.key_run)
        chosen_by = {"config": evaluation_hash(key.config()), "step": key.status()["step"]}
        key_sha256 = content_key({"tokens": text.tokens_sha256, "key_run": chosen_by})
        return dataclasses.replace(text, tokens_sha256=key_sha256)

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        key = _key_tokens(self, subject.output, text.tokens_sha256)
        if not key.any():
            raise NoResultError(f"none of the {key.size:,} tokens is a key token")
        windows = windows_of(len(text.tokens), row.cell["length"])
        score = subject.score(text.tokens, windows, self.title(row.cell))
        results = text_results(score.values[key], score.seconds, read=key.size)
        return results | {"text_tokens": key.size}

    def windows(self, panel: Panel) -> str:
        run = self.key_run.rstrip("/").rpartition("/")[-1]
        shares = {
            row.results["tokens"] / row.results["text_tokens"]
            for row in panel.rows
            if row.is_measured
        }
        share = ", ".join(f"{share:.1%}" for share in sorted(shares))
        return f"{share} of the tokens, which {run} predicts better by {self.key_gain:g} nats with a long context"


@functools.lru_cache(maxsize=2)
def _key_tokens(
    evaluator: LongPPL, output: "Output", tokens_sha256: str
) -> Bool[np.ndarray, " tokens"]:
    """Returns which tokens of a text are key tokens. Raises ValueError for a run with other tokens."""
    from alibi.evaluation.subject import Subject
    from alibi.runs.trained import TrainedRun

    run = TrainedRun(evaluator.key_run)
    subject, long = Subject(run, output), evaluator.key_length or run.config.train_length
    text = evaluator.text(subject, {})
    if text.tokens_sha256 != tokens_sha256:
        raise ValueError(
            f"key_run={evaluator.key_run} reads the text as other tokens; use a run with the same tokenizer and text"
        )
    nats = []
    for length in (long, evaluator.key_short or max(1, long // 8)):
        windows = windows_of(len(text.tokens), length, max(1, length // 4))
        nats.append(subject.score(text.tokens, windows, "key tokens").values)
    return (nats[1] - nats[0] > evaluator.key_gain) & (nats[0] < evaluator.key_loss)
