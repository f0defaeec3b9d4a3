"""Floating-point operations of a model, counted from its config."""

from alibi.config import Config

# Speed of training on two CPU cores, a guess before the first measurement. In float32, counted as
# here, machines reached 20 to 70 GFLOP/s at width 64 with adaptive embeddings, and 85 to 150 at
# width 128.
CPU_FLOPS_PER_SECOND = 60e9
# A forward pass and a backward pass of twice its products; remat adds a forward pass.
TRAIN_PASSES, REMAT_PASSES = 3, 4


def model_flops(config: Config, vocab_size: int) -> float:
    """Returns the operations of training on a token, without those that remat repeats.

    Model FLOPs utilisation is their number a second divided by the devices' peak (PaLM, arXiv
    2204.02311, appendix B, which also counts keys hidden by the causal mask).
    """
    return TRAIN_PASSES * forward_flops(config, vocab_size, config.train_length)


def training_flops(config: Config, vocab_size: int) -> float:
    """Returns the operations of training on a token."""
    passes = REMAT_PASSES if config.model.remat else TRAIN_PASSES
    return passes * forward_flops(config, vocab_size, config.train_length)


def forward_flops(config: Config, vocab_size: int, length: int) -> float:
    """Returns the operations of a token in a sequence of `length`: two a weight, and attention to
    visible keys.

    An adaptive softmax counts with its head and the first band's projection: tails see a few
    tokens in a hundred.
    """
    model = config.model
    projected = (2 + model.attention_gate) * model.num_heads + 2 * model.kv_heads
    hidden = (2 + model.gated) * model.feed_forward
    layers = model.num_layers * model.width * (projected * model.head_dim + hidden)
    if model.embedding == "adaptive":
        rows = model.cutoffs[0] + len(model.cutoffs)
        ends = model.width * (rows + model.width)
    else:
        ends = model.width * max(vocab_size, model.vocab_rows)
    causal = config.objective.causal
    keys = sum(keys_seen(window, length, causal=causal) for window in model.by_layer("window"))
    attention = 2 * model.num_heads * model.head_dim * keys / length
    return 2 * (layers + ends + attention)


def keys_seen(window: int, length: int, *, causal: bool = True) -> int:
    """Returns the number of keys that the `length` queries of a sequence see in all."""
    reach = min(window or length, length)
    before = reach * length - reach * (reach - 1) // 2  # and its own
    return before if causal else 2 * before - length
