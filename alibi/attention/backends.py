"""What can compute a call of attention, and which of them `auto` takes."""

import dataclasses
import math
from collections.abc import Callable

from jaxtyping import Array

from alibi.attention.accelerator.augmented import augmented_attention, cannot_augment
from alibi.attention.blocked import blocked_attention
from alibi.attention.call import AttentionCall, dense
from alibi.cpu.decoding import cannot_decode, decoding_attention
from alibi.cpu.saved import attention_by_saving, cannot_save


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute a call.

    Attributes:
      run: computes it.
      cannot: says in one sentence why it can't do a call; the empty string says that it can.
      shares_heads: whether it takes fewer key than query heads; for other backends keys and values are repeated.
      one_query: whether it computes only calls with one query for each sequence, so that no model can choose it.
    """

    run: Callable[[AttentionCall], Array]
    cannot: Callable[[AttentionCall], str]
    shares_heads: bool = False
    one_query: bool = False


BACKENDS = {
    "reference": Backend(dense, lambda call: ""),
    "saved": Backend(attention_by_saving, cannot_save),
    "blocked": Backend(blocked_attention, lambda call: call.wants_weights),
    "augmented": Backend(augmented_attention, cannot_augment),
    "decoding": Backend(decoding_attention, cannot_decode, shares_heads=True, one_query=True),
}
OF_SEQUENCES = tuple(name for name, backend in BACKENDS.items() if not backend.one_query)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table by which `auto` chooses a backend: the first row that fits is taken.

    Attributes:
      platforms: the platforms that the row is for.
      when: what `applies` tests, in words.
      applies: whether the row fits a call.
      backend: the name of what then computes the call, if it can.
      reason: why, and whether it was measured.
    """

    platforms: tuple[str, ...]
    when: str
    applies: Callable[[AttentionCall], bool]
    backend: str
    reason: str


SAVED_WEIGHTS = 2**27  # half a GiB of exponentials in float32
DENSE_WEIGHTS = 2**26  # a quarter of a GiB of logits
WORTH_SAVING = 1024  # keys, at most
WORTH_A_KERNEL = 1024  # keys
WORTH_A_LOOP = 1024  # keys, if their largest norm is known
WORTH_A_PASS = 32768  # keys, if that norm must be found first
WORTH_TILES = 512  # keys

EVERYWHERE = ("cpu", "gpu", "tpu")


RULES = (
    Rule(
        ("cpu",),
        f"one device, or several with a sharding, one query, {WORTH_A_LOOP:,} keys or more whose largest norm is "
        f"known, or {WORTH_A_PASS:,}, a bias that bounds itself, no dropout",
        lambda call: (
            call.devices == 1 and call.key.shape[-3] >= (WORTH_A_PASS if call.key_norm is None else WORTH_A_LOOP)
        ),
        "decoding",
        "reads what the bias leaves in reach, not the whole cache (measured on two cores, of which it takes one); "
        "accelerators would start several kernels for each block (not measured), several devices without a sharding "
        "would gather the heads",
    ),
    Rule(
        ("cpu",),
        f"{WORTH_SAVING:,} keys or fewer, at most 2^{SAVED_WEIGHTS.bit_length() - 1} weights",
        lambda call: call.key.shape[-3] <= WORTH_SAVING and math.prod(call.weights_shape) <= SAVED_WEIGHTS,
        "saved",
        "fastest forward and backward at these lengths (measured)",
    ),
    Rule(
        ("cpu",),
        f"two queries or more, {WORTH_TILES} keys or more",
        lambda call: call.query.shape[-3] > 1 and call.key.shape[-3] >= WORTH_TILES,
        "blocked",
        "memory linear in the length; fastest where keys are out of reach (measured)",
    ),
    Rule(
        ("gpu",),
        f"bfloat16, {WORTH_A_KERNEL:,} keys or more, heads of at most 120 features (248 from compute capability 9.0 "
        "on), slopes that don't learn, no dropout or mask",
        lambda call: call.key.shape[-3] >= WORTH_A_KERNEL and call.known_slopes is not None,
        "augmented",
        "cuDNN's flash kernel, with no bias tensor (speed not measured)",
    ),
    Rule(
        ("tpu",),
        f"one device, or several with a sharding, bfloat16 or float32, {WORTH_A_KERNEL:,} keys or more, slopes that "
        "don't learn, no dropout or mask",
        lambda call: call.devices == 1 and call.key.shape[-3] >= WORTH_A_KERNEL and call.known_slopes is not None,
        "augmented",
        "splash attention, with no bias tensor (speed not measured)",
    ),
    Rule(
        EVERYWHERE,
        f"more than 2^{DENSE_WEIGHTS.bit_length() - 1} weights",
        lambda call: math.prod(call.weights_shape) > DENSE_WEIGHTS,
        "blocked",
        "memory linear in the length (speed on GPU and TPU not measured)",
    ),
    Rule(EVERYWHERE, "all else", lambda call: True, "reference", "the logits are small; XLA fuses what it can"),
)


def choose(call: AttentionCall) -> str:
    """The name of the backend that `auto` takes for `call` on the platform of its options."""
    fitting = (rule for rule in RULES if call.options.platform in rule.platforms and rule.applies(call))
    return next(rule.backend for rule in fitting if not BACKENDS[rule.backend].cannot(call))


def compute(call: AttentionCall, backend: str) -> Array:
    """The call by the backend of that name.

    Raises:
      ValueError: an unknown backend, or one that can't do the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; use auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].cannot(call)
    if reason:
        raise ValueError(f"attention backend {backend!r} can't do this call: {reason}; use backend='auto'")
    return BACKENDS[backend].run(call if BACKENDS[backend].shares_heads else call.with_own_heads())


def table() -> str:
    """The rules of `auto` as a Markdown table."""
    lines = ["| device | call | backend | why |", "|:--|:--|:--|:--|"]
    lines += [f"| {', '.join(rule.platforms)} | {rule.when} | {rule.backend} | {rule.reason} |" for rule in RULES]
    return "\n".join(lines)
