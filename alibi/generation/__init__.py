"""Text from a trained model: prompts, sampling, the decoding loop."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])

from alibi.generation.decoding import decode, generate, new_cache, read, stream, unrolled
from alibi.generation.sampling import GREEDY, Sampler, Sampling

__all__ = [
    "GREEDY",
    "Sampler",
    "Sampling",
    "decode",
    "generate",
    "new_cache",
    "read",
    "stream",
    "unrolled",
]
