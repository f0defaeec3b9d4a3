"""A look at an objective from outside: whether its batches are what the contract says."""

import numpy as np

from alibi.config.classes import place_of
from alibi.objectives.base import Batch, Objective, Sequences
from alibi.objectives.next_token import NextToken


def check_batch(name: str, objective: Objective) -> None:
    """Raises ValueError, with class and file, unless an objective from outside returns what the contract
    says: batches of 16 rows of 16 tokens tell.
    """
    named, rows, length = f"objective {name!r} ({place_of(type(objective))})", 16, 16
    vocabulary, highest = objective.vocab_size, objective.vocab_size + objective.added_tokens
    random = np.random.default_rng(0)
    drawn = [random.choice(vocabulary, length + 1, vocabulary <= length) for _ in range(rows)]
    sequences = Sequences(np.array(drawn, np.int32), np.arange(rows) * length)
    for training in (False, True):
        try:
            batch = Batch(*objective.batch(sequences, 0, 0, training=training))
        except Exception as error:
            raise ValueError(
                f"{named}: batch(training={training}) fails: {type(error).__name__}: {error}"
            ) from error
        for field, array in batch._asdict().items():
            if array is None and field not in ("inputs", "targets"):
                continue
            got = f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"
            if got != f"int32{[rows, length]}":
                raise ValueError(
                    f"{named}: {field} of its batch are {got}; they must be int32{[rows, length]}"
                )
        if batch.inputs.min() < 0 or max(batch.inputs.max(), batch.targets.max()) >= highest:
            raise ValueError(
                f"{named}: its batch has tokens outside of 0 to {highest - 1}; inputs are from 0, and added_tokens "
                "says how many follow the vocabulary"
            )
        if batch.reach is not None and not (objective.causal and objective.both_sides):
            raise ValueError(
                f"{named}: its batch has a reach; only an objective with causal=True and both_sides=True has one"
            )
        if _sees_targets(objective, batch):
            raise ValueError(
                f"{named}: inputs of batch(training={training}) see the tokens that they predict; make those targets "
                "-1, hide the tokens, or let reach end before them"
            )
        if training:
            continue
        if not objective.selects and batch.targets.min() < 0:
            raise ValueError(
                f"{named}: batch(training=False) has targets below 0, which are not predicted; say selects = True"
            )
        text = NextToken(vocabulary, objective.boundary_id).batch(sequences)
        alike = [np.array_equal(*each) for each in zip(batch, text, strict=True)]
        if objective.scored_as_text and not all(alike):
            raise ValueError(
                f"{named}: with scored_as_text, batch(training=False) must be that of next_token; return "
                "super().batch(sequences) there, or say scored_as_text = False"
            )


def _sees_targets(objective: Objective, batch: Batch) -> bool:
    """Returns whether an input that reaches the next one predicts it, or all inputs that predict see their
    targets: in a model for both sides some may, as a masked token may stay.
    """
    predicted, unchanged = batch.targets >= 0, batch.inputs == batch.targets
    following = (batch.inputs[:, 1:] == batch.targets[:, :-1]) & predicted[:, :-1]
    if batch.segment_ids is not None:
        following &= batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    if batch.reach is not None:
        places = np.arange(predicted.shape[1]) if batch.positions is None else batch.positions
        reached = batch.reach[:, :-1] >= np.broadcast_to(places, predicted.shape)[:, 1:]
        if (following & reached).any():
            return True
    if not objective.causal:
        predicted[:, -1] &= unchanged[:, -1]  # the last input has no next one
        unchanged[:, :-1] |= following
    return bool(predicted.any() and unchanged[predicted].all())
