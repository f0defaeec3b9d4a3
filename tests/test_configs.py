"""The experiments' configs: whole batches at every length, any number of devices, and tuples on the command line."""

import importlib

import ml_collections
import pytest

from alibi.model import build_model, count_parameters
from alibi.training.optimizer import make_optimizer
from alibi.training.setup import micro_batches, sequences_per_update
from configs import base, wikitext103


def get(name: str, arg: str = "") -> ml_collections.ConfigDict:
    return importlib.import_module(f"configs.{name}").get_config(arg)


@pytest.mark.parametrize("name", ["wikitext103", "wikitext2", "books", "bookcorpus", "cc100_1b3"])
def test_each_config_is_a_model_and_an_optimizer_at_every_length(name: str) -> None:
    for length in (64, 512, 2048, 3072) if name.startswith("wiki") else (512,):
        config = get(name, f"position=sinusoidal,length={length}")
        assert sequences_per_update(config, 1) * length == config.train.batch_tokens
        build_model(config, vocab_size=267_744)
        make_optimizer(config.optimizer, config.train.steps)


def test_the_papers_batch_by_length_and_devices() -> None:
    """8 x 9,216 tokens (8 x 8,192 at L = 2,048), in as many micro-batches as the devices leave."""
    for length, tokens in ((512, 73_728), (2048, 65_536), (3072, 73_728)):
        config = wikitext103.get_config(f"length={length}")
        assert config.train.batch_tokens == tokens
        assert [micro_batches(config, devices) for devices in (1, 2, 4, 8)] == [8, 4, 2, 1]
    config = wikitext103.get_config("length=512,train.max_device_tokens=1024,train.batch_tokens=9216")
    assert (config.train.batch_tokens, micro_batches(config, 1)) == (9_216, 9)
    config.train.max_device_tokens = 100  # less than a sequence: one at a time
    assert micro_batches(config, 1) == 18
    config.train.update(max_device_tokens=0, accumulation=3)
    assert micro_batches(config, 1) == 3


def test_the_sizes_of_the_largest_model() -> None:
    """Section 4.3: 1.3B parameters. 25 layers of 12 w^2 and biases and norms, the vocabulary, the last norm."""
    width = 2048
    layers = 25 * (12 * width**2 + 4 * width + 8192 + width + 4 * width)
    model = build_model(get("cc100_1b3"), 50_264)
    assert count_parameters(model) == layers + 50_264 * width + 2 * width == 1_361_901_568


def test_a_tuple_of_integers_is_spelt_with_colons() -> None:
    assert base.get_config("model.cutoffs=2000:6000,length=64").model.cutoffs == (2000, 6000)
    assert base.get_config("model.cutoffs=500").model.cutoffs == (500,)
    config = base.get_config()
    base.set_key(config, "model.cutoffs", [1, 2])
    assert config.model.cutoffs == (1, 2)
    for text in ("2000:x", "2.5:4", ""):
        with pytest.raises(ValueError, match=r"model.cutoffs=.* must be of type integers, such as 20000:60000"):
            base.get_config(f"model.cutoffs={text}")
