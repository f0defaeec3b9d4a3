"""A model's floating-point operations, counted from its config."""

from alibi.config import Config
from alibi.objectives import make_objective

# Training speed on two CPU cores, a guess before the first measurement. In float32 machines reached 20
# to 70 GFLOP/s at width 64 with adaptive embeddings, and 85 to 150 at width 128.
CPU_FLOPS_PER_SECOND = 60e9
# A backward pass has twice the products of a forward pass. Remat adds a forward pass.
TRAIN_PASSES, REMAT_PASSES = 3, 4


def model_flops(config: Config, vocab_size: int) -> float:
    """Returns training operations per token, without the forward pass that remat repeats.

    Model FLOPs utilisation is these operations per second over the devices' peak (PaLM, arXiv
    2204.02311, appendix B, which also counts keys that the causal mask hides).
    """
    return TRAIN_PASSES * forward_flops(config, vocab_size, config.train_length)


def training_flops(config: Config, vocab_size: int) -> float:
    """Returns training operations per token."""
    passes = REMAT_PASSES if config.model.remat else TRAIN_PASSES
    return passes * forward_flops(config, vocab_size, config.train_length)


def forward_flops(config: Config, vocab_size: int, length: int) -> float:
    """Returns forward operations per token in a sequence with `length` tokens: two per weight, and
    attention to visible keys.

    An adaptive softmax counts its head and the first band's projection. Tails see a few tokens in a
    hundred.
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
        ends += model.masked_head * model.width**2
    causal = make_objective(config).causal
    keys = sum(keys_seen(window, length, causal=causal) for window in model.by_layer("window"))
    attention = 2 * model.num_heads * model.head_dim * keys / length
    return 2 * (layers + ends + attention)


def keys_seen(window: int, length: int, *, causal: bool = True) -> int:
    """Returns how many keys all `length` queries in a sequence see together."""
    reach = min(window or length, length)
    before = reach * length - reach * (reach - 1) // 2  # and its own
    return before if causal else 2 * before - length
