"""Validation during training, by the evaluator's own protocol."""

from collections.abc import Callable

import ml_collections
from jax.sharding import Mesh
from jaxtyping import PyTree

from alibi.data.tokens import TokenFile
from alibi.evaluation.perplexity import Scorer, model_nll
from alibi.model.decoder import DecoderLM, evaluated
from alibi.parallel.sharding import batch_sharding

# Parameters to the mean NLL of a text in nats per token.
Validator = Callable[[PyTree], float]


def make_validator(
    config: ml_collections.ConfigDict, model: DecoderLM, mesh: Mesh, file: TokenFile | None
) -> Validator | None:
    """Scores the first `config.eval.max_tokens` tokens of `file` at the training length; None without a file."""
    if file is None:
        return None
    limit = config.eval.max_tokens
    tokens = file.tokens if limit < 0 else file.tokens[:limit]
    scorer = Scorer(
        model_nll(evaluated(model, config)),
        boundary_id=file.manifest.boundary_id,
        batch_tokens=config.eval.batch_tokens,
        sharding=batch_sharding(mesh),
    )

    def validate(params: PyTree) -> float:
        score = scorer.score(params, tokens, config.train_length)
        return score.total_nats / score.tokens

    return validate
