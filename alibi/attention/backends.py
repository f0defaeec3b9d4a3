"""The backends, and the table from which `auto` chooses: only here platforms decide."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from alibi.attention.accelerator.augmented import augmented_attention, cannot_augment
from alibi.attention.accelerator.fused import cannot_fuse, fused_attention
from alibi.attention.blocked import blocked_attention
from alibi.attention.call import AttentionCall
from alibi.attention.cpu.saved import cannot_save, saved_attention
from alibi.attention.cpu.single import cannot_single, single_attention
from alibi.attention.reference import dense
from alibi.attention.rows import rows_attention

# The features that not every backend has, with the reason why a backend refuses a call.
REASONS = {
    "weights": "it gives no weights and takes no einsum",
    "added values": "its bias adds to the values",
    "rows": "its bias reads the logits of whole rows",
    "dropout": "it has no dropout",
    "masks": "it has no masks or segments",
    "sink": "its softmax has no sink",
    "logit cap": "it caps no logits",
    "reach": "its queries see no later keys under the causal mask",
}


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to compute a call.

    Attributes:
      run: computes a call.
      features: the features in `REASONS` that it has. A call with any other is refused.
      cannot: returns another reason to refuse a call, in one sentence, or the empty string.
      shares_heads: True if it takes fewer key heads than query heads. Else keys and values are
        repeated.
      one_query: True if it needs a single query in each sequence, so that no model can choose it.
    """

    run: Callable[[AttentionCall], Array]
    features: frozenset[str]
    cannot: Callable[[AttentionCall], str] = lambda call: ""
    shares_heads: bool = False
    one_query: bool = False


def _by_tiles(call: AttentionCall) -> Array:
    return (rows_attention if "rows" in call.features else blocked_attention)(call)


TILED = frozenset({"added values", "rows", "dropout", "masks", "sink", "logit cap"})
BACKENDS = {
    "reference": Backend(dense, TILED | {"weights", "reach"}),
    "saved": Backend(saved_attention, frozenset({"sink"}), cannot_save),
    "blocked": Backend(_by_tiles, TILED | {"reach"}),
    "augmented": Backend(augmented_attention, frozenset(), cannot_augment),
    "fused": Backend(
        fused_attention,
        frozenset({"masks", "sink", "logit cap"}),
        cannot_fuse,
        shares_heads=True,
    ),
    "single": Backend(
        single_attention,
        TILED,
        cannot_single,
        shares_heads=True,
        one_query=True,
    ),
}
OF_SEQUENCES = tuple(name for name, backend in BACKENDS.items() if not backend.one_query)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A row in the table from which `auto` chooses a backend: it takes the first row that fits.

    Attributes:
      platforms: "cpu", "gpu" or "tpu".
      when: the condition in words.
      applies: the condition.
      backend: taken if it can do the call.
      reason: why, and whether it was measured.
    """

    platforms: tuple[str, ...]
    when: str
    applies: Callable[[AttentionCall], bool]
    backend: str
    reason: str


SAVED_WEIGHTS = 2**27  # half a GiB of exponentials in float32
DENSE_WEIGHTS = 2**26  # a quarter of a GiB of logits
MIXED_WEIGHTS = 2**22  # for each weight some 12 numbers are kept
WORTH_SAVING = 1024  # keys, at most
WORTH_A_KERNEL = {"gpu": 1024, "tpu": 512}  # keys
WORTH_TILES = 512  # keys
FUSED_FEATURES = 128  # the widest heads with which `fused` was measured on a GPU

EVERYWHERE = ("cpu", "gpu", "tpu")


RULES = (
    Rule(
        ("cpu",),
        "one device, one query",
        lambda call: call.devices == 1 and call.query.shape[-3] == 1,
        "single",
        "reads the cache as it lies, without a copy of it for each token (measured)",
    ),
    Rule(
        ("cpu",),
        f"{WORTH_SAVING:,} keys or fewer, at most 2^{SAVED_WEIGHTS.bit_length() - 1} weights",
        lambda call: (
            call.key.shape[-3] <= WORTH_SAVING and math.prod(call.weights_shape) <= SAVED_WEIGHTS
        ),
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
        ("gpu", "tpu"),
        f"one device, or several with a sharding, bfloat16, on TPUs also float32, {WORTH_A_KERNEL['gpu']:,} keys or "
        f"more, on TPUs {WORTH_A_KERNEL['tpu']}, two queries or more, no bias or one of slopes (on GPUs with heads of "
        "at most 128 features, or slopes that learn), of distances, or of a term of the query and one of the key, no "
        "dropout",
        lambda call: (
            call.devices == 1
            and call.key.shape[-3] >= WORTH_A_KERNEL[call.options.platform]
            and call.query.shape[-3] > 1
            and (
                call.options.platform == "tpu"
                or (
                    call.query.dtype == jnp.bfloat16
                    and (
                        call.known_slopes is None
                        or max(call.query.shape[-1], call.value.shape[-1]) <= FUSED_FEATURES
                    )
                )
            )
        ),
        "fused",
        "a flash kernel that makes the bias in its tiles, leaves out those out of reach, and sums its gradients "
        "(measured on an H200 with heads of 64 and 128, without masks; for TPUs by their compiler's estimate)",
    ),
    Rule(
        ("gpu",),
        f"bfloat16, {WORTH_A_KERNEL['gpu']:,} keys or more, heads of at most 120 features (248 from compute capability "
        "9.0 on), slopes that don't learn, no dropout or mask",
        lambda call: call.key.shape[-3] >= WORTH_A_KERNEL["gpu"] and call.known_slopes is not None,
        "augmented",
        "cuDNN's flash kernel, with no bias tensor, which XLA splits over devices (speed on several not measured)",
    ),
    Rule(
        EVERYWHERE,
        f"more than 2^{DENSE_WEIGHTS.bit_length() - 1} weights, or 2^{MIXED_WEIGHTS.bit_length() - 1} with a bias that "
        "mixes heads",
        lambda call: (
            math.prod(call.weights_shape)
            > (MIXED_WEIGHTS if call.bias is not None and call.bias.mixes_heads else DENSE_WEIGHTS)
        ),
        "blocked",
        "memory linear in the length (speed on GPU and TPU not measured)",
    ),
    Rule(
        EVERYWHERE,
        "all else",
        lambda call: True,
        "reference",
        "the logits are small, and XLA fuses the operations",
    ),
)


def refusal(name: str, call: AttentionCall) -> str:
    """Returns why the backend `name` can't do the call, in one sentence, or the empty string."""
    backend = BACKENDS[name]
    lacking = call.features - backend.features
    reasons = [reason for feature, reason in REASONS.items() if feature in lacking]
    return reasons[0] if reasons else backend.cannot(call)


def choose(call: AttentionCall) -> str:
    """Returns the backend that `auto` takes for a call on its platform."""
    fitting = (
        rule for rule in RULES if call.options.platform in rule.platforms and rule.applies(call)
    )
    return next(rule.backend for rule in fitting if not refusal(rule.backend, call))


def compute(call: AttentionCall, name: str) -> Array:
    """Computes the call with the backend `name`.

    Raises:
      ValueError: an unknown or unable backend.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; use auto, {', '.join(BACKENDS)}")
    if reason := refusal(name, call):
        raise ValueError(
            f"attention backend {name!r} can't do this call: {reason}; use backend='auto' (model.attention=auto)"
        )
    return BACKENDS[name].run(call if BACKENDS[name].shares_heads else call.with_own_heads())


def table() -> str:
    """Returns `auto`'s rules as a Markdown table."""
    lines = ["| device | call | backend | why |", "|:--|:--|:--|:--|"]
    lines += [
        f"| {', '.join(rule.platforms)} | {rule.when} | {rule.backend} | {rule.reason} |"
        for rule in RULES
    ]
    return "\n".join(lines)
