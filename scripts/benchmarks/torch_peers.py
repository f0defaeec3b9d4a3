"""The peer of scripts/benchmark.py: the quickstart's kind of model in PyTorch, written for speed, and its attention.

Fused projections of query, key and value; scaled_dot_product_attention with ALiBi's bias
and the causal mask as one tensor, made once; AdamW as one fused kernel.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn import functional

from alibi.config import Config

EPSILON = 1e-6  # of layer norms, as in Flax
FLEX_BLOCK = 128  # queries and keys of a tile of FlexAttention's mask

# Of query, key and value `[batch, heads, length, head_dim]`.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, feed_forward: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width, eps=EPSILON)
        self.up = nn.Linear(width, feed_forward)
        self.down = nn.Linear(feed_forward, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.query_key_value(self.attention_norm(x))
        query, key, value = joint.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.relu(self.up(self.feed_forward_norm(x))))


class Decoder(nn.Module):
    """Gives the mean NLL of the targets."""

    def __init__(self, config: Config, vocabulary: int):
        super().__init__()
        model = config.model
        self.scale = math.sqrt(model.width)
        self.embedding = nn.Embedding(vocabulary, model.width)
        nn.init.normal_(self.embedding.weight, std=model.width**-0.5)
        self.blocks = nn.ModuleList(
            Block(model.width, model.num_heads, model.feed_forward) for _ in range(model.num_layers)
        )
        self.norm = nn.LayerNorm(model.width, eps=EPSILON)
        self.register_buffer("bias", alibi_bias(model.num_heads, config.train_length))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs) * self.scale
        for block in self.blocks:
            x = block(x, self.bias)
        logits = self.norm(x) @ self.embedding.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def alibi_slopes(num_heads: int) -> Tensor:
    """The paper's, for a power of two."""
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)


def alibi_bias(num_heads: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[1, heads, length, length]`, with the causal mask."""
    bias = torch.empty(1, num_heads, length, length, dtype=dtype)
    positions = torch.arange(length)
    for query, rows in zip(positions, bias[0].unbind(1), strict=True):  # no other tensor of its size
        distance = query - positions
        rows.copy_((-alibi_slopes(num_heads)[:, None] * distance).masked_fill_(distance < 0, -math.inf))
    return bias


def dense_attention(num_heads: int, length: int, dtype: torch.dtype) -> tuple[Attention, int]:
    """With the bias and the causal mask as one tensor; also its bytes."""
    bias = alibi_bias(num_heads, length, dtype)
    attend = functional.scaled_dot_product_attention
    return lambda query, key, value: attend(query, key, value, attn_mask=bias), bias.nbytes


def flex_attention(num_heads: int, length: int, dtype: torch.dtype) -> tuple[Attention, int]:
    """FlexAttention, compiled, with the bias as a score_mod and a causal block mask; it holds nothing."""
    slopes, compiled = alibi_slopes(num_heads), torch.compile(flex.flex_attention, dynamic=False)

    def alibi(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    # flex.create_block_mask would make a tensor [length, length] first.
    blocks = torch.arange(-(-length // FLEX_BLOCK), dtype=torch.int32)
    diagonal_first = ((blocks[:, None] - blocks) % len(blocks)).to(torch.int32)
    mask = flex.BlockMask.from_kv_blocks(
        torch.ones_like(blocks)[None, None],
        diagonal_first[None, None],
        blocks[None, None],
        blocks.repeat(1, 1, len(blocks), 1),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=causal,
        seq_lengths=(length, length),
    )
    return lambda query, key, value: compiled(query, key, value, score_mod=alibi, block_mask=mask), 0


ATTENTION = {"dense": dense_attention, "flex": flex_attention}


def make_train_step(
    config: Config, vocabulary: int, batch: tuple[np.ndarray, np.ndarray], *, compiled: bool
) -> Callable[[], Tensor]:
    """A function that makes one update on the batch and gives its loss.

    Raises:
      ValueError: a config that this peer is not.
    """
    model = config.model
    if (config.position, model.activation, model.dtype) != ("alibi", "relu", "float32"):
        raise ValueError("the PyTorch peer has position=alibi, activation=relu and dtype=float32 only")
    torch.manual_seed(config.seed)
    inputs, targets = (torch.from_numpy(x).long() for x in batch)
    decoder = Decoder(config, vocabulary)
    optimizer = torch.optim.AdamW(
        decoder.parameters(),
        lr=config.optimizer.learning_rate,
        betas=(config.optimizer.b1, config.optimizer.b2),
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )
    loss_of = torch.compile(decoder) if compiled else decoder

    def train_step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        return loss.detach()

    return train_step
