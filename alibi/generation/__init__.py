"""Text from a trained model: prompts, sampling, the decoding loop."""

from alibi.generation.decoding import decode, generate, new_cache, read, unrolled

__all__ = ["decode", "generate", "new_cache", "read", "unrolled"]
