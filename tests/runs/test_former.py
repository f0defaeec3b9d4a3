"""Runs and rows of earlier versions keep their meaning and their hashes."""

import dataclasses
import json

import pytest

from alibi.config import make_config, read_config
from alibi.config.override import Override
from alibi.model.positions import layer_pattern
from alibi.positions.t5 import T5
from alibi.runs import RunDirectory, config_hash
from alibi.runs.former import changed_defaults, saved, upgraded
from alibi.runs.overrides import effective

# The hashes of version 1, from its own code, and keys that mean the same now.
HASHES = {
    "position=t5": ("8f7c1e40df39", "position=t5,position_options.max_distance=128"),
    "position=fire": ("c8f398d94654", "position=fire,position_options.threshold=512"),
    "position=xpos": ("3035efd5a114", "position=xpos,position_options.scale_base=512"),
    "position=yarn": ("6130af7ea54a", "position=yarn,position_options.fast=32"),
    "position=rotary,t5": (
        "34285ad289fd",
        "position=rotary,t5,position_options.max_distance=128",
    ),
    # for T5, and the default of the others
    "position=t5,shaw": ("d20e8170c164", "position=t5,shaw,position_options.max_distance=128:16"),
    "position=deberta,t5": (
        "564c5dae0023",
        "position=deberta,t5,position_options.max_distance=0:128",
    ),
    "position=rotary,yarn": ("dd0a964be48c", "position=rotary,yarn,position_options.fast=32"),
    "model.logit_scale=log_n": ("c06002fcd334", "model.logit_scale=log_n_beyond"),
    "model.logit_scale=ssmax": ("a5c1f7cd68f1", "model.logit_scale=ssmax_queries"),
    "model.logit_scale=,log_n": ("7ebbefe31511", "model.logit_scale=,log_n_beyond"),
}
# Keys that mean the same in both versions, with their hashes in version 1.
SAME = {
    "position=alibi": "a282cdc13f56",
    "position=t5,position_options.max_distance=64": "b39e6ea7fb24",
    "position=rotary,t5,position_options.max_distance=128:64": "d92c8c980497",
    "model.logit_scale=llama4": "c040340d68a1",
}


@dataclasses.dataclass(frozen=True)
class Mine(T5):
    """A class of a user's own, with T5's default."""


@dataclasses.dataclass(frozen=True)
class Farther(T5):
    max_distance: int = 64


def by_version_1(keys: str) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(make_config(keys))))


@pytest.mark.parametrize("keys", HASHES)
def test_what_changed_its_meaning_changed_its_hash_and_the_former_meaning_kept_it(keys) -> None:
    former, now = HASHES[keys]
    assert config_hash(make_config(now)) == former
    assert config_hash(make_config(keys)) != former
    assert config_hash(read_config(upgraded(by_version_1(keys)))) == former


@pytest.mark.parametrize("keys", SAME)
def test_what_kept_its_meaning_kept_its_hash(keys) -> None:
    config = make_config(keys)
    assert config_hash(config) == SAME[keys]
    assert read_config(upgraded(by_version_1(keys))) == config


def test_a_default_that_is_given_is_the_default() -> None:
    for option, keys in (("max_distance=0", "position=t5"), ("fast=0.0", "position=yarn")):
        given = make_config(f"{keys},position_options.{option}")
        assert config_hash(given) == config_hash(make_config(keys))
    listed = make_config("position=t5,shaw,position_options.max_distance=0:16")
    assert config_hash(listed) == config_hash(make_config("position=t5,shaw"))


def test_a_run_of_an_earlier_version_is_computed_as_it_was_trained(tmp_path) -> None:
    """Its config names no version; a config that goes on with it must say what it was."""
    run = RunDirectory(tmp_path)
    keys = "position=t5,rotary,model.logit_scale=,log_n"
    run.write("config.json", by_version_1(keys))
    kinds = layer_pattern(run.config())
    assert (kinds[0].position.farthest, kinds[1].logit_scale) == (128, "log_n_beyond")
    assert run.differing(make_config(keys)) == {
        "position_options.max_distance": (128, None),
        "model.logit_scale": (["", "log_n_beyond"], ["", "log_n"]),
    }
    explicit = "model.logit_scale=,log_n_beyond,position_options.max_distance=128"
    assert run.differing(make_config(f"position=t5,rotary,{explicit}")) == {}


def test_a_saved_config_is_read_as_it_was_written(tmp_path) -> None:
    run, config = RunDirectory(tmp_path), make_config("position=t5,model.logit_scale=ssmax")
    run.write("config.json", saved(config))
    assert run.config() == config
    assert config.position_options == {}


def test_classes_of_ones_own_take_over_the_default_of_theirs() -> None:
    here = f"{__name__}:"
    assert changed_defaults(f"{here}Mine", former=True) == {"max_distance": 128}
    assert changed_defaults(f"{here}Mine,{here}Farther", former=True) == {"max_distance": (128, 64)}
    assert changed_defaults(f"{here}Farther,none", former=True) == {}
    assert changed_defaults("no.such:Class", former=True) == {}


def test_rows_say_which_yarn_and_which_scale_they_are_of() -> None:
    """An earlier row without them is of 32 turns, and of queries beyond the training length."""
    config = make_config("position=rotary")
    now = effective(Override("yarn"), config)
    former = Override.from_json({"position": "yarn", "options": {}, "window": None})
    assert (str(now), str(former)) == ("as yarn(fast=0)", "as yarn(fast=32)")
    assert effective(Override("yarn", (("fast", 32.0),)), config) == former
    for one in (now, former):
        assert effective(one, config) == Override.from_json(one.to_json()) == one
    row = {"position": None, "options": {}, "window": None, "logit_scale": "log_n"}
    assert Override.from_json(row) == Override(logit_scale="log_n_beyond")
    scaled = Override(logit_scale="log_n")
    assert Override.from_json(scaled.to_json()) == scaled
    assert str(scaled) == "with logit scale log_n"


def test_a_run_with_the_default_tested_as_itself_is_not_changed() -> None:
    config = make_config("position=yarn")
    assert effective(Override("yarn"), config) is None
    assert effective(Override("yarn", (("fast", 0.0),)), config) is None
    stretched = effective(Override("yarn", (("factor", 4),)), config)
    assert str(stretched) == "as yarn(factor=4, fast=0)"
    assert effective(stretched, config) == stretched
