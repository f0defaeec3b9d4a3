"""Objectives from outside the package: named, trained, recorded, and refused with class and file."""

import dataclasses
import re

import numpy as np
import pytest

from alibi.config import make_config
from alibi.config.fields import number
from alibi.objectives import OBJECTIVES, REGISTRY, Batch, NextToken, Objective, make_objective
from alibi.objectives.checks import check_batch
from tests.refusals import assert_refused

HERE = __name__


@dataclasses.dataclass(frozen=True)
class Every(NextToken):
    """Each n-th token."""

    selects = True

    n: int = number(2, at_least=1)
    mask_rate: float = dataclasses.field(kw_only=True)

    def batch(self, sequences, seed=0, step=0, *, training=False):
        batch = super().batch(sequences, seed, step)
        kept = np.arange(batch.targets.shape[1]) % self.n == 0
        return batch._replace(targets=np.where(kept, batch.targets, np.int32(-1)))


class Undecorated(NextToken):
    n: int = 2


@dataclasses.dataclass(frozen=True)
class Silent(Objective):
    """It doesn't say whether it is causal."""

    def batch(self, sequences, seed=0, step=0, *, training=False):
        return Batch(sequences.tokens[:, :-1], sequences.tokens[:, 1:])


@dataclasses.dataclass(frozen=True)
class Wide(NextToken):
    def batch(self, sequences, seed=0, step=0, *, training=False):
        inputs, targets, *_ = super().batch(sequences)
        return Batch(inputs.astype(np.int64), targets)


@dataclasses.dataclass(frozen=True)
class Beyond(NextToken):
    def batch(self, sequences, seed=0, step=0, *, training=False):
        return super().batch(sequences)._replace(inputs=np.full_like(sequences.tokens[:, 1:], 256))


@dataclasses.dataclass(frozen=True)
class Reaching(NextToken):
    def batch(self, sequences, seed=0, step=0, *, training=False):
        return super().batch(sequences)._replace(reach=sequences.tokens[:, 1:])


@dataclasses.dataclass(frozen=True)
class Old(NextToken):
    def batch(self, sequences, seed=0, step=0):
        return super().batch(sequences)


@dataclasses.dataclass(frozen=True)
class OneTooFar(NextToken):
    """A prefix of four tokens whose last one is also predicted, by a token that sees it."""

    both_sides = scored_as_text = True
    predicted_from: int = 2

    def batch(self, sequences, seed=0, step=0, *, training=False):
        batch = super().batch(sequences)
        if not training:
            return batch
        places = np.arange(batch.inputs.shape[1], dtype=np.int32)
        targets = np.where(places < self.predicted_from, np.int32(-1), batch.targets)
        reach = np.broadcast_to(np.maximum(places, 3), targets.shape)
        return batch._replace(targets=targets, reach=reach)


@dataclasses.dataclass(frozen=True)
class Copying(Objective):
    causal = False
    shift: int = 1

    def batch(self, sequences, seed=0, step=0, *, training=False):
        tokens = sequences.tokens
        return Batch(tokens[:, self.shift :][:, : tokens.shape[1] - 1], tokens[:, 1:])


@dataclasses.dataclass(frozen=True)
class BothSides(NextToken):
    """The row of a guide, for a model that sees both sides."""

    causal = False


@dataclasses.dataclass(frozen=True)
class Blind(NextToken):
    both_sides = causal = False


@dataclasses.dataclass(frozen=True)
class Hidden(NextToken):
    """It leaves out tokens, and doesn't say so."""

    def batch(self, sequences, seed=0, step=0, *, training=False):
        batch = super().batch(sequences)
        return batch._replace(targets=np.where(batch.targets % 2, batch.targets, np.int32(-1)))


@dataclasses.dataclass(frozen=True)
class AsText(Every):
    scored_as_text = True


@dataclasses.dataclass(frozen=True)
class Plain(NextToken):
    """A plain tuple is a batch too."""

    def batch(self, sequences, seed=0, step=0, *, training=False):
        return tuple(super().batch(sequences))[:2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "maskd",
            "unknown objective 'maskd'; did you mean 'masked'? there are: next_token, masked",
        ),
        ("fim", "unknown objective 'fim'; did you mean 'fill_in_the_middle'?"),
        ("absent.module:One", "objective.name=absent.module:One: No module named 'absent'; write"),
        (
            "json:loads",
            "objective.name=json:loads is no subclass of alibi.objectives.Objective, but",
        ),
        (f"{HERE}:Undecorated", "has n, which are no options of it; put @dataclasses.dataclass"),
        (f"{HERE}:Silent", f"objective '{HERE}:Silent' can't be made (Silent, {__file__}:"),
        (f"{HERE}:Wide", f"(Wide, {__file__}:"),
        (f"{HERE}:Wide", "inputs of its batch are int64[16, 16]; they must be int32[16, 16]"),
        (f"{HERE}:Beyond", "its batch has tokens outside of 0 to 255"),
        (f"{HERE}:Reaching", "its batch has a reach; only an objective with causal=True and both_"),
        (f"{HERE}:Old", "batch(training=False) fails: TypeError"),
        (f"{HERE}:OneTooFar", "inputs of batch(training=True) see the tokens that they predict"),
        (f"{HERE}:Copying", "inputs of batch(training=False) see the tokens that they predict"),
        (f"{HERE}:BothSides", "inputs of batch(training=False) see the tokens that they predict"),
        (f"{HERE}:Blind", "has causal=False and both_sides=False; set one of them to True"),
        (f"{HERE}:Hidden", "has targets below 0, which are not predicted; say selects = True"),
        (f"{HERE}:AsText", "with scored_as_text, batch(training=False) must be that of next_token"),
    ],
)
def test_a_wrong_one_is_a_line(name, words):
    assert_refused(
        re.escape(words), make_objective, make_config(objective__name=name), vocab_size=256
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("OneTooFar", {"predicted_from": 3}), ("Plain", {}), ("Every", {"n": 16})],
)
def test_a_right_one_is_none(name, options):
    """A prefix that ends one token earlier is right."""
    config = make_config(objective__name=f"{HERE}:{name}", objective__options=options)
    make_objective(config, vocab_size=256)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("vocabulary", [20, 256])
def test_this_librarys_are_right(name, vocabulary):
    check_batch(name, make_objective(make_config(objective__name=name), vocab_size=vocabulary))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"m": 2}, f"objective '{HERE}:Every' has no option 'm'; there are: n, mask_rate"),
        ({"n": 0}, f"option n=0 of objective '{HERE}:Every' must be at least 1"),
        ({"n": "two"}, "option n='two' of objective"),
    ],
)
def test_an_option_is_checked(options, words):
    config = make_config(objective__name=f"{HERE}:Every", objective__options=options)
    assert_refused(re.escape(words), make_objective, config)


def test_an_option_without_a_default_is_the_key_of_its_name():
    keys = f"objective={HERE}:Every,objective.options.n=3,objective.mask_rate=0.25"
    made = make_objective(make_config(keys))
    assert (made.n, made.mask_rate) == (3, 0.25)
    own = make_config(f"{keys},objective.options.mask_rate=0.5")
    assert_refused("'mask_rate' of objective", make_objective, own)
    hiding = dataclasses.make_dataclass(
        "Hiding", [("mask_rate", float, 0.5)], bases=(NextToken,), frozen=True
    )
    assert_refused(
        "default for 'mask_rate'",
        REGISTRY.make,
        hiding,
        {},
        own.objective,
        vocab_size=4,
        boundary_id=0,
    )
