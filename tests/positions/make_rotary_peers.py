"""Makes rotary_peers.npz: logits of the same queries and keys by `transformers` and
`x-transformers`.

They need PyTorch, which is no requirement of the project, so they run once, in an environment of
their own:

    python -m venv peers
    peers/bin/pip install torch==2.13.0+cpu transformers==5.23.0 x-transformers==2.31.10
    peers/bin/python tests/positions/make_rotary_peers.py

For each case of `CASES` the file holds the logits of all queries and keys, and the gradients of
their product with `weights`; float32, positions 0 to 23, after a training length of 16, one head of
16 features.
"""

import json
import pathlib

import numpy as np
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from x_transformers import x_transformers

HEADS, HEAD_DIM, TRAIN_LENGTH, LENGTH = 1, 16, 16, 24
ROTARY = {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
# What our method and options are called there.
CASES = {
    "rotary": ROTARY | {"rope_type": "default"},
    "rotary share=0.5": ROTARY | {"rope_type": "default", "partial_rotary_factor": 0.5},
    "rotary share=0.75 share_of=frequencies": ROTARY
    | {"rope_type": "proportional", "partial_rotary_factor": 0.75},
    "rotary_interpolated factor=4.0": ROTARY | {"rope_type": "linear", "factor": 4.0},
    "rotary_ntk": ROTARY | {"rope_type": "dynamic", "factor": 1.0},
    "yarn factor=4.0": ROTARY | {"rope_type": "yarn", "factor": 4.0},
    # With a base of 10 the ramp has a pair on each side and several inside.
    "yarn factor=2.5 base=10.0 fast=8.0": ROTARY
    | {"rope_type": "yarn", "factor": 2.5, "rope_theta": 10.0, "beta_fast": 8.0},
    "yarn factor=4.0 share=0.5": ROTARY
    | {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5},
    "xpos": None,
    "xpos scale_base=16.0": None,
}


def by_transformers(
    query: torch.Tensor, key: torch.Tensor, rope: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    rope = dict(rope)
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = TRAIN_LENGTH
    config = GPTNeoXConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=TRAIN_LENGTH,
        rope_parameters=rope,
    )
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(query, torch.arange(LENGTH)[None])
    return modeling_gpt_neox.apply_rotary_pos_emb(query, key, cos, sin)


def by_x_transformers(
    query: torch.Tensor, key: torch.Tensor, scale_base: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = x_transformers.RotaryEmbedding(HEAD_DIM, use_xpos=True, scale_base=scale_base)
    angles, scale = rotary.forward_from_seq_len(LENGTH)
    # It pairs neighbouring features.
    order = torch.arange(HEAD_DIM).reshape(2, -1).T.reshape(-1)
    turned = x_transformers.apply_rotary_pos_emb
    return turned(query[..., order], angles, scale), turned(key[..., order], angles, scale**-1)


def main() -> None:
    rng = np.random.default_rng(0)
    query, key = (
        rng.normal(size=(1, HEADS, LENGTH, HEAD_DIM)).astype(np.float32) for _ in range(2)
    )
    weights = rng.normal(size=(1, HEADS, LENGTH, LENGTH)).astype(np.float32)
    arrays = {"query": query, "key": key, "weights": weights}
    for name, rope in CASES.items():
        inputs = [torch.tensor(x, requires_grad=True) for x in (query, key)]
        if rope is None:
            turned = by_x_transformers(*inputs, scale_base=16.0 if "16" in name else 512)
        else:
            turned = by_transformers(*inputs, rope)
        logits = turned[0] @ turned[1].mT
        gradients = torch.autograd.grad((logits * torch.tensor(weights)).sum(), inputs)
        found = {"logits": logits, "query_gradient": gradients[0], "key_gradient": gradients[1]}
        arrays |= {f"{name}/{what}": value.detach().numpy() for what, value in found.items()}
    arrays["cases"] = np.asarray(json.dumps(list(CASES)))
    np.savez_compressed(pathlib.Path(__file__).parent / "rotary_peers.npz", **arrays)


if __name__ == "__main__":
    main()
