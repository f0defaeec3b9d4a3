"""The experiments' configs: whole batches at every length and device count, and tuples on the
command line.
"""

import importlib

import pytest

from alibi.attention.backends import OF_SEQUENCES
from alibi.config import Config, ModelConfig, flatten, make_config, read_config, replaced
from alibi.model.block import ACTIVATIONS
from alibi.model.decoder import build_model, count_parameters
from alibi.model.initialization import INITIALIZATIONS
from alibi.optimizers import make_optimizer
from alibi.training.setup import micro_batches, sequences_per_update
from configs import base
from tests.refusals import assert_refused


def get(name: str, arg: str = "") -> Config:
    return read_config(importlib.import_module(f"configs.{name}").get_config(arg))


@pytest.mark.parametrize(
    "name",
    [
        "wikitext103",
        "wikitext2",
        "books",
        "long_books",
        "study",
        "gpt2_small",
        "bookcorpus",
        "cc100_1b3",
        "mlm",
    ],
)
def test_each_config_is_a_model_and_an_optimizer_at_every_length(name: str) -> None:
    for length in (64, 512, 2048, 3072) if name.startswith("wiki") else (512,):
        config = get(name, f"position=sinusoidal,length={length}")
        assert sequences_per_update(config, 1) * length == config.train.batch_tokens
        build_model(config, vocab_size=267_744)
        make_optimizer(config.optimizer, config.train.steps)


WIKITEXT103 = {
    "train_length": 512,
    "model.num_layers": 16,
    "model.width": 1024,
    "model.num_heads": 8,
    "model.feed_forward": 4096,
    "model.activation": "relu",
    "model.final_norm": False,
    "model.norm_epsilon": 1e-5,
    "model.initialization": "paper",
    "model.embedding": "adaptive",
    "model.cutoffs": [20_000, 60_000],
    "model.adaptive_factor": 4,
    "model.dropout": 0.3,
    "model.attention_dropout": 0.1,
    "model.activation_dropout": 0.1,
    "model.softmax_dropout": 0.2,
    "model.padding_rows": True,
    "data.tokenizer": "words",
    "data.subset": "wikitext-103-v1",
    "train.steps": 286_000,
    "train.batch_tokens": 8 * 9_216,
    "optimizer.name": "nag",
    "optimizer.momentum": 0.99,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.1,
    "optimizer.schedule": "cosine_restarts",
    "optimizer.warmup_init": 1e-7,
    "optimizer.learning_rate": 1.0,
    "optimizer.warmup_steps": 16_000,
    "optimizer.period_steps": 270_000,
    "optimizer.period_mult": 2.0,
    "optimizer.shrink": 0.75,
    "optimizer.min_learning_rate": 1e-4,
}
# Of appendix A.3 what differs, and that it leaves the rest.
BOOKCORPUS = {
    "model.embedding": "tied",
    "data.tokenizer": "bpe",
    "data.bpe_vocab_size": 29_000,
    "model.dropout": 0.3,
}
# All that section 4.2 publishes of a run.
CC100 = {
    "model.num_layers": 25,
    "model.width": 2048,
    "model.num_heads": 16,
    "model.feed_forward": 8192,
    "train.steps": 50_000,
}


@pytest.mark.parametrize(
    ("name", "published"),
    [("wikitext103", WIKITEXT103), ("bookcorpus", BOOKCORPUS), ("cc100_1b3", CC100)],
)
def test_the_published_recipe(name: str, published: dict[str, object]) -> None:
    """Literal numbers of the paper and its code: a config with other numbers is no reproduction."""
    found = flatten(get(name))
    assert {key: found[key] for key in published} == published


@pytest.mark.parametrize(
    "name", ["wikitext103", "wikitext2", "books", "books_tables", "bookcorpus"]
)
def test_the_schedule_ends_with_the_run(name: str) -> None:
    """A shorter run anneals too, with a warm-up of the same share; a key given by name stays."""
    whole, short = get(name), get(name, "train.steps=110")
    for config in (whole, short):
        assert config.optimizer.warmup_steps + config.optimizer.period_steps == config.train.steps
    share = whole.optimizer.warmup_steps / whole.train.steps
    assert short.optimizer.warmup_steps == pytest.approx(110 * share, abs=1)
    assert get(name, "train.steps=110,optimizer.warmup_steps=3").optimizer.warmup_steps == 3


LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072)  # of table 5


def divides(config: Config, devices: int) -> bool:
    try:
        return sequences_per_update(config, devices) > 0
    except ValueError:
        return False


def test_the_papers_batch_by_length_and_devices() -> None:
    """8 x 9,216 tokens (8 x 8,192 at L = 2,048), in as many micro-batches as the devices leave."""
    for length, tokens in ((512, 73_728), (2048, 65_536), (3072, 73_728)):
        config = get("wikitext103", f"length={length}")
        assert config.train.batch_tokens == tokens
        assert [micro_batches(config, devices) for devices in (1, 2, 4, 8)] == [8, 4, 2, 1]
    refused = {length: {5, 7} | ({3, 6} if length == 2048 else set()) for length in LENGTHS}
    for length in LENGTHS:  # up to 8 devices, as the docstring says
        config = get("wikitext103", f"length={length}")
        assert {devices for devices in range(1, 9) if not divides(config, devices)} == refused[
            length
        ]
    for length in LENGTHS:  # more devices, as the docstring says: the heads are split too
        config = get("wikitext103", f"length={length}")
        assert [
            micro_batches(config, devices // tensor)
            for devices, tensor in ((16, 2), (32, 4), (64, 8))
        ] == [1] * 3
        assert sequences_per_update(config, 8) * length == config.train.batch_tokens
    config = get("wikitext103", "length=512,train.max_device_tokens=1024,train.batch_tokens=9216")
    assert (config.train.batch_tokens, micro_batches(config, 1)) == (9_216, 9)
    few = replaced(config, {"train.max_device_tokens": 100})  # less than a sequence: one at a time
    assert micro_batches(few, 1) == 18
    assert (
        micro_batches(replaced(config, {"train.max_device_tokens": 0, "train.accumulation": 3}), 1)
        == 3
    )


def test_the_sizes_of_the_largest_model() -> None:
    """Section 4.2: 1.3B parameters. 25 layers of 12 w^2 and biases and norms, the vocabulary, the
    last norm.
    """
    width = 2048
    layers = 25 * (12 * width**2 + 4 * width + 8192 + width + 4 * width)
    model = build_model(get("cc100_1b3", "model.scan_layers=True"), 50_264)
    assert count_parameters(model) == layers + 50_264 * width + 2 * width == 1_361_901_568


def test_a_short_name_of_a_key_does_wherever_keys_are_set() -> None:
    config = base.get_config("length=64")
    assert config.train_length == 64
    base.set_key(config, "length", "32")
    assert config.train_length == 32
    assert make_config("length=16").train_length == 16
    assert_refused("length='x' .* int", base.set_key, config, "length", "x")


def test_a_tuple_of_integers_is_spelt_with_colons() -> None:
    assert make_config("model.cutoffs=2000:6000,length=64").model.cutoffs == (2000, 6000)
    assert make_config("model.cutoffs=500").model.cutoffs == (500,)
    assert ModelConfig(cutoffs=[1, 2]).cutoffs == (1, 2)
    for text in ("2000:x", "2.5:4", ""):
        assert_refused(r"model\.cutoffs=.* 20000:60000", make_config, f"model.cutoffs={text}")


def test_the_names_of_choices_are_those_of_the_code() -> None:
    """alibi.config lists them by itself, since it imports none of the model."""
    names = {
        name: field.metadata.get("names")
        for name, field in ModelConfig.__dataclass_fields__.items()
    }
    assert names["activation"] == tuple(ACTIVATIONS)
    assert names["initialization"] == tuple(INITIALIZATIONS)
    assert names["attention"] == ("auto", *OF_SEQUENCES)
