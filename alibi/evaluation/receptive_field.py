"""The empirical receptive field (Chi et al. 2023, arXiv 2212.10356, section 4): how many of the newest
tokens have 99% of the influence on a prediction.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from alibi.config import Config
from alibi.evaluation.base import (
    NoResultError,
    Subject,
    Text,
    mean_results,
    option,
    refuse_other_objectives,
)
from alibi.evaluation.perplexity import OfText
from alibi.evaluation.windows import Windows
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Row
from alibi.reporting.tables import mean_kind

FIELD = mean_kind("Receptive field", "{:,.0f}".format, "field", axis=", tokens", merit=0)


@dataclasses.dataclass(frozen=True)
class ReceptiveField(OfText):
    """The least number of newest tokens that hold 99% of the squared gradients of the last token's
    loss, as a mean over windows.
    """

    field_windows: int = option(64, "windows, spread evenly over the text", at_least=2)

    kinds: ClassVar = (FIELD,)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives(self.name(), config)

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        length = row.cell["length"]
        count = min(self.field_windows, len(text.tokens) // length)
        spacing = len(text.tokens) // count
        last = Windows(length - 1, (count - 1) * spacing + length, length, 1, spacing)
        sizes = subject.score(text.tokens, last, self.title(row.cell), fields).values
        if not sizes.any():
            raise NoResultError("no window has a token with influence on its prediction")
        return mean_results("field", sizes[sizes != 0])

    def windows(self, panel: Panel) -> str:
        return "tokens with 99% of the influence on the last one"


def fields(model: Any) -> Callable[..., Any]:
    """Returns the function of parameters, inputs and targets to the receptive field of each row's
    last target, `[rows, 1]`: 0 if no token has influence, NaN if one is not finite.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from alibi.evaluation.scorer import model_nll

    def field(params: Any, inputs: Any, *others: Any) -> Any:
        def loss(change: Any) -> Any:
            def changed(embed: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
                embedded = embed(*args, **kwargs)
                is_input = context.module.name == "embedding_dropout"
                return embedded + change if is_input else embedded

            with nn.intercept_methods(changed):
                return model_nll(model)(params, inputs, *others).sum()

        gradient = jax.grad(loss)(jnp.zeros((*inputs.shape, model.config.width)))
        influence = jnp.cumsum(jnp.sum(gradient**2, axis=-1)[:, ::-1], axis=1)
        total = influence[:, -1:]
        field = 1 + jnp.sum(influence <= 0.99 * total, axis=1, keepdims=True, dtype=jnp.float32)
        return jnp.where(total == 0, 0.0, jnp.where(jnp.isfinite(total), field, jnp.nan))

    return field
