"""Words for benchmarks: how often each occurs decides how much of an adaptive softmax is computed."""

import numpy as np


def zipf_words(vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Words by Zipf's law with Mandelbrot's shift: as often in each band as in a text."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    return np.random.default_rng(0).choice(vocab_size, size=shape, p=weights / weights.sum()).astype(np.int32)
