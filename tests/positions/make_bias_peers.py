"""Makes bias_peers.npz: biases of the same inputs by `transformers` and `x-transformers`.

They need PyTorch, which is no requirement of the project, so they run once, in an environment of
their own:

    python -m venv peers
    peers/bin/pip install torch==2.13.0+cpu transformers==5.23.0 x-transformers==2.31.10
    peers/bin/python tests/positions/make_bias_peers.py

The file holds their inputs, their biases, and under `NAME gradient INPUT` the gradients of the
product of a bias with `NAME weights`; float32, positions from 0 on.
"""

import pathlib

import numpy as np
import torch
from transformers import DebertaConfig
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from x_transformers import x_transformers

HEADS, HEAD_DIM, WIDTH, LENGTH, CLIP = 2, 4, 8, 12, 5
FARTHEST = 300


def numbers(*shape: int) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
    ).requires_grad_()


def with_gradients(
    name: str, bias: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    weights = numbers(*bias.shape).detach()
    (bias * weights).sum().backward()
    found = {"": bias, " weights": weights} | {f" {key}": x for key, x in inputs.items()}
    found |= {f" gradient {key}": x.grad for key, x in inputs.items()}
    return {f"{name}{key}": x for key, x in found.items()}


def deberta(part: str) -> dict[str, torch.Tensor]:
    """Returns a part of DeBERTa's logit: content to position, or position to content."""
    config = DebertaConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        relative_attention=True,
        max_relative_positions=CLIP,
        pos_att_type=[part],
        hidden_dropout_prob=0.0,
    )
    layer = DisentangledSelfAttention(config)
    inputs = {
        "query": numbers(1, HEADS, LENGTH, HEAD_DIM),
        "key": numbers(2, HEADS, LENGTH, HEAD_DIM)[:1].detach(),
    }
    inputs |= {"table": numbers(2 * CLIP, WIDTH), "kernel": numbers(HEADS * HEAD_DIM, WIDTH)}
    inputs = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    projection = layer.pos_proj if part == "c2p" else layer.pos_q_proj
    del projection.weight
    projection.weight = inputs["kernel"]
    if projection.bias is not None:
        torch.nn.init.zeros_(projection.bias)  # the paper has none
    relative = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scaled = inputs["query"] / (3 * HEAD_DIM) ** 0.5
    bias = layer.disentangled_att_bias(scaled, inputs["key"], relative, inputs["table"], 3)
    used = {name: x for name, x in inputs.items() if name != ("key" if part == "c2p" else "query")}
    return with_gradients(part, bias, used)


def fox() -> dict[str, torch.Tensor]:
    layer = x_transformers.DataDependentAlibi(WIDTH, HEADS)
    inputs = {"x": numbers(1, LENGTH, WIDTH)}
    bias = layer(inputs["x"])
    weights = numbers(*bias.shape).detach().tril()
    (bias * weights).sum().backward()
    linear = layer.to_forget_gates[0]
    found = {
        "fox": bias,
        "fox weights": weights,
        "fox x": inputs["x"],
        "fox gradient x": inputs["x"].grad,
    }
    for name, x in (("kernel", linear.weight), ("bias", linear.bias)):
        found |= {f"fox {name}": x, f"fox gradient {name}": x.grad}
    return found


def t5(causal: bool) -> dict[str, torch.Tensor]:
    name = "t5 causal" if causal else "t5 both"
    distance = torch.arange(-FARTHEST, FARTHEST + 1)
    buckets = T5Attention._relative_position_bucket(-distance, bidirectional=not causal)
    layer = x_transformers.RelativePositionBias(1.0, causal=causal, heads=HEADS)
    return {f"{name} buckets": buckets} | with_gradients(
        name, layer(LENGTH, LENGTH), {"table": layer.relative_attention_bias.weight}
    )


def main() -> None:
    found = {"alibi": x_transformers.AlibiPositionalBias(12)(LENGTH, LENGTH)}
    for heads in (1, 2, 3, 6, 8, 12, 16, 40):
        for most in (8, 16):
            found[f"mpt {heads} {most}"] = -build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0]
    found |= t5(True) | t5(False) | deberta("c2p") | deberta("p2c") | fox()
    arrays = {name: np.asarray(x.detach()) for name, x in found.items()}
    np.savez_compressed(pathlib.Path(__file__).with_name("bias_peers.npz"), **arrays)


if __name__ == "__main__":
    main()
