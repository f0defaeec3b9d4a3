"""The NumPy models of `described.py` compute recorded logits.

    python -m tests.convert.test_described   # records them anew

Before they were recorded, these variants were compared with transformers 5.24 within 1e-5: with MPT
itself and with normed queries and keys put into it, with LLaMA with another mask or other norms, and
with GPT-2 with SwiGLU.
"""

import pathlib

import numpy as np
import pytest

from tests.convert.described import FAMILIES

RECORDED = pathlib.Path(__file__).parent / "described.npz"
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))
ROTARY = {"max_position_embeddings": 24}
VARIANTS = {
    "mpt": ("mpt", {}),
    "mpt clipped": ("mpt", {"attn_config": {"alibi_bias_max": 16, "clip_qkv": 1.5}}),
    "mpt scaled": ("mpt", {"attn_config": {"softmax_scale": 0.1}}),
    "mpt normed": ("mpt", {"attn_config": {"qk_ln": True}, "logit_scale": "inv_sqrt_d_model"}),
    "mpt learned": ("mpt", {"no_bias": False, "attn_config": {"alibi": False}}),
    "replit": ("replit", {"attn_clip_qkv": 1.0}),
    "replit15": ("replit15", {}),
    "baichuan": ("baichuan", {}),
    "baichuan rotary": ("baichuan", ROTARY),
    "baichuan2": ("baichuan2", {}),
    "baichuan2 rotary": ("baichuan2", ROTARY),
    "btlm": ("btlm", {}),
    "jais": ("jais", {}),
    "refact": ("refact", {}),
}
CASES = [(variant, heads) for variant in VARIANTS for heads in (8, 12, 40)]


def logits(variant: str, heads: int) -> np.ndarray:
    """Returns the logits of a variant at every sixth token."""
    name, keys = VARIANTS[variant]
    family = FAMILIES[name]
    config = family.config(heads=heads, **keys)
    return family.logits(config, family.tensors(config, 1), TOKENS)[:, 5::6]


@pytest.mark.parametrize(("variant", "heads"), CASES)
def test_logits_are_the_recorded(variant: str, heads: int) -> None:
    with np.load(RECORDED) as file:
        expected = file[f"{variant}, {heads} heads"]
    assert 0.1 < expected.std() < 5
    np.testing.assert_allclose(logits(variant, heads), expected, atol=1e-6)


if __name__ == "__main__":
    made = {f"{variant}, {heads} heads": logits(variant, heads) for variant, heads in CASES}
    np.savez_compressed(RECORDED, **{name: x.astype(np.float32) for name, x in made.items()})
