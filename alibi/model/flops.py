"""Floating-point operations of a model, counted from its config."""

from alibi.config import Config

# What one training reaches on two CPU cores, for a guess before any speed is known. In float32, counted as here, 20 to
# 70 GFLOP/s were measured at width 64 with adaptive embeddings, and 85 to 150 at width 128, by machine.
CPU_FLOPS_PER_SECOND = 60e9
# A forward pass, and a backward one of twice its products; with remat one more forward.
TRAIN_PASSES, REMAT_PASSES = 3, 4


def model_flops(config: Config, vocab_size: int) -> float:
    """The operations of training on one token that the model asks for: without those that remat repeats.

    Model FLOPs utilisation is these a second, divided by the devices' peak (PaLM, arXiv 2204.02311, appendix B; there
    attention counts the keys that the causal mask hides, and here it doesn't).
    """
    return TRAIN_PASSES * forward_flops(config, vocab_size, config.train_length)


def training_flops(config: Config, vocab_size: int) -> float:
    """The operations of training on one token."""
    passes = REMAT_PASSES if config.model.remat else TRAIN_PASSES
    return passes * forward_flops(config, vocab_size, config.train_length)


def forward_flops(config: Config, vocab_size: int, length: int) -> float:
    """The operations of one token in a sequence of `length`: two a weight, and attention to the keys it sees.

    Of an adaptive softmax only the head counts, which every token goes through, and of its
    inputs only the first band's projection: tails see a few tokens in a hundred.
    """
    model = config.model
    layers = model.num_layers * model.width * (4 * model.width + 2 * model.feed_forward)
    if model.embedding == "adaptive":
        rows = model.cutoffs[0] + len(model.cutoffs)
        ends = model.width * (rows + model.width)
    else:
        ends = model.width * vocab_size
    attention = 2 * model.num_layers * model.width * keys_seen(model.window, length) / length
    return 2 * (layers + ends + attention)


def keys_seen(window: int, length: int) -> int:
    """How many keys all `length` queries of a sequence see together, under `config.model.window`."""
    reach = min(window or length, length)
    return reach * length - reach * (reach - 1) // 2
