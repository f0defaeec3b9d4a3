"""The peers in PyTorch: a decoder in two layouts, its training step and scorer, and attention alone.

The layout "fused" is the quickstart's kind of model, written for speed: one projection to query, key
and value, fused AdamW, and one of three attentions (`ATTENTION`).
The layout "paper" follows the paper's code: time before batch, three projections, explicit logits and
their softmax, boolean masks that pick bands, Nesterov's momentum one parameter at a time. Its
evaluation computes all positions in each window, and for each the whole vocabulary's
log-probabilities.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn import functional

from alibi.config import Config
from benchmarks.attention_contenders import Shape

FLEX_BLOCK = 128  # queries and keys of a tile of FlexAttention's mask

# Takes query, key and value `[batch, heads, length, head_dim]`.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Append = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of keys and values, to a cache
Batch = tuple[np.ndarray, np.ndarray]


class Layer(nn.Module):
    """A pre-norm layer. Its attention is fused, or laid out as the paper's."""

    def __init__(self, config: Config, *, fused: bool):
        super().__init__()
        width, self.num_heads, self.fused = config.model.width, config.model.num_heads, fused
        epsilon = 1e-6 if fused else 1e-5  # Flax's; PyTorch's default
        self.attention_norm, self.feed_forward_norm = (
            nn.LayerNorm(width, eps=epsilon) for _ in range(2)
        )
        if fused:
            self.query_key_value = nn.Linear(width, 3 * width)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, config.model.feed_forward)
        self.down = nn.Linear(config.model.feed_forward, width)

    def forward(self, x: Tensor, attend: Any, append: Append | None = None) -> Tensor:
        """Returns the layer's output, of the shape of `x`.

        Args:
          x: `[batch, length, width]` if fused, else `[length, batch, width]`.
          attend: an `Attention` if fused, else the bias `[batch * heads, length, length]`.
          append: puts keys and values into a cache and returns all of its, only if fused.
        """
        normed = self.attention_norm(x)
        x = x + self.out(
            self._fused(normed, attend, append)
            if self.fused
            else self._as_the_paper(normed, attend)
        )
        return x + self.down(functional.relu(self.up(self.feed_forward_norm(x))))

    def _fused(self, x: Tensor, attend: Attention, append: Append | None) -> Tensor:
        joint = self.query_key_value(x).view(*x.shape[:2], 3, self.num_heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        if append is not None:
            key, value = append(key, value)
        return attend(query, key, value).transpose(1, 2).reshape(x.shape)

    def _as_the_paper(self, x: Tensor, bias: Tensor) -> Tensor:
        length, batch, width = x.shape
        head_dim = width // self.num_heads

        def heads(x: Tensor) -> Tensor:
            return x.contiguous().view(length, batch * self.num_heads, head_dim).transpose(0, 1)

        query = heads(self.query(x) * head_dim**-0.5)
        weights = functional.softmax(
            torch.bmm(query, heads(self.key(x)).transpose(1, 2)) + bias, dim=-1
        )
        return torch.bmm(weights, heads(self.value(x))).transpose(0, 1).reshape(x.shape)


class FusedDecoder(nn.Module):
    """Tied embeddings. Gives the mean NLL of the targets, for a batch of the config's size.

    `attention` is a name in `ATTENTION`.
    """

    def __init__(self, config: Config, vocabulary: int, attention: str = "sdpa"):
        super().__init__()
        model = config.model
        self.scale = math.sqrt(model.width)
        self.embedding = nn.Embedding(vocabulary, model.width)
        nn.init.normal_(self.embedding.weight, std=model.width**-0.5)
        self.layers = nn.ModuleList(Layer(config, fused=True) for _ in range(model.num_layers))
        self.norm = nn.LayerNorm(model.width, eps=1e-6)
        batch, length = config.train.batch_tokens // config.train_length, config.train_length
        shape = Shape(length, batch, model.num_heads, model.head_dim, model.dtype)
        self.attend, _ = ATTENTION[attention](shape, torch.float32, config.position)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs) * self.scale
        for layer in self.layers:
            x = layer(x, self.attend)
        logits = (self.norm(x) @ self.embedding.weight.T).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten())


class PaperDecoder(nn.Module):
    """Adaptive input and softmax, tied, with ALiBi and without dropout."""

    def __init__(self, config: Config, vocabulary: int):
        super().__init__()
        model = config.model
        self.width, self.num_heads = model.width, model.num_heads
        self.starts = [0, *model.cutoffs, vocabulary]
        sizes = [(stop - start) for start, stop in itertools.pairwise(self.starts)]
        features = [model.width // model.adaptive_factor**band for band in range(len(sizes))]
        self.words = nn.ModuleList(
            nn.Embedding(*shape) for shape in zip(sizes, features, strict=True)
        )
        for words, size in zip(self.words, features, strict=True):
            nn.init.normal_(words.weight, std=size**-0.5)
        self.projections = nn.ModuleList(
            nn.Linear(size, model.width, bias=False) for size in features
        )
        self.clusters = nn.Linear(model.width, len(model.cutoffs), bias=False)
        self.layers = nn.ModuleList(Layer(config, fused=False) for _ in range(model.num_layers))
        self.bias = torch.empty(0, 0, 0)

    def features(self, tokens: Tensor) -> Tensor:
        """Returns `[batch * length, width]` for `[batch, length]`."""
        x = torch.zeros(*tokens.shape, self.width)
        for band, (start, stop) in enumerate(itertools.pairwise(self.starts)):
            inside = (tokens >= start) & (tokens < stop)
            x[inside] = self.projections[band](self.words[band](tokens[inside] - start))
        x = (x * self.width**0.5).transpose(0, 1)
        batch, length = tokens.shape
        # The bias is made again only if it doesn't fit.
        if self.bias.shape[-1] != length or len(self.bias) < batch * self.num_heads:
            self.bias = alibi_bias(self.num_heads, length)[0].repeat(batch, 1, 1)
        for layer in self.layers:
            x = layer(x, self.bias[: batch * self.num_heads])
        return x.transpose(0, 1).reshape(-1, self.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean NLL of the targets, each through its own bands, as in
        training.
        """
        features, targets = self.features(tokens), targets.flatten()
        of_head, nll = targets.clone(), torch.zeros(())
        for band, inside in self._tails(targets):
            of_head[inside] = self.starts[1] + band - 1
            logits = self._tail(features[inside], band)
            nll = nll + functional.cross_entropy(
                logits, targets[inside] - self.starts[band], reduction="sum"
            )
        nll = nll + functional.cross_entropy(self._head(features), of_head, reduction="sum")
        return nll / targets.numel()

    def log_probabilities(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns `[batch * length, vocabulary]`. A tail is computed only for targets in it."""
        features, targets = self.features(tokens), targets.flatten()
        first = self.starts[1]
        result = features.new_zeros(len(features), self.starts[-1])
        head = functional.log_softmax(self._head(features), dim=-1)
        result[:, :first] = head[:, :first]
        for band, inside in self._tails(targets):
            tail = functional.log_softmax(self._tail(features[inside], band), dim=-1)
            result[inside, self.starts[band] : self.starts[band + 1]] = (
                tail + head[inside, first + band - 1, None]
            )
        return result

    def _tails(self, targets: Tensor) -> list[tuple[int, Tensor]]:
        """Returns the bands after the first that have targets, with the targets' indices."""
        bands = range(1, len(self.words))
        members = [
            (band, (targets >= self.starts[band]) & (targets < self.starts[band + 1]))
            for band in bands
        ]
        return [(band, inside.nonzero().squeeze(1)) for band, inside in members if inside.any()]

    def _head(self, features: Tensor) -> Tensor:
        return torch.cat(
            [functional.linear(features, self.words[0].weight), self.clusters(features)], dim=-1
        )

    def _tail(self, features: Tensor, band: int) -> Tensor:
        hidden = functional.linear(features, self.projections[band].weight.t())
        return functional.linear(hidden, self.words[band].weight)


def make_train_step(
    config: Config, vocabulary: int, batch: Batch, *, compiled: bool, attention: str = "sdpa"
) -> tuple[Callable[[], Tensor], nn.Module]:
    """Returns a function that makes an update on the batch and returns its loss, and the model.

    Both are on the current default device. Adaptive embeddings select the paper's layout and
    optimizer, others the fused ones. With `model.dtype=bfloat16` the model runs under autocast, with
    float32 parameters. As in the project, only matrices decay.
    """
    settings, device = config.optimizer, torch.get_default_device()
    torch.manual_seed(config.seed)
    optimizer: torch.optim.Optimizer
    decoder: nn.Module
    if config.model.embedding == "adaptive":
        decoder = PaperDecoder(config, vocabulary)
        optimizer = torch.optim.SGD(
            decoder.parameters(),
            lr=settings.learning_rate,
            momentum=settings.momentum,
            nesterov=True,
        )
    else:
        decoder = FusedDecoder(config, vocabulary, attention)
        parts: tuple[list[Tensor], list[Tensor]] = [], []
        for parameter in decoder.parameters():
            parts[parameter.ndim > 1].append(parameter)
        optimizer = torch.optim.AdamW(
            [{"params": parts[0], "weight_decay": 0.0}, {"params": parts[1]}],
            lr=settings.learning_rate,
            betas=(settings.b1, settings.b2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    model = torch.compile(decoder) if compiled else decoder
    inputs, targets = (torch.from_numpy(x).long().to(device) for x in batch)

    def train_step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16"):
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), settings.clip_norm)
        optimizer.step()
        return loss.detach()

    return train_step, decoder


def make_scorer(
    decoder: PaperDecoder, tokens: np.ndarray, length: int, stride: int, rows: int
) -> Callable[[], Tensor]:
    """Returns a function that scores the last `stride` targets in each whole window, `rows` windows at a
    time.
    """
    windows = torch.from_numpy(tokens).long().unfold(0, length + 1, stride)

    @torch.no_grad()
    def score() -> Tensor:
        scored = []
        for batch in windows.split(rows):
            targets = batch[:, 1:]
            of_all = decoder.log_probabilities(batch[:, :-1], targets)
            nll = -of_all.gather(1, targets.reshape(-1, 1)).view(targets.shape)
            scored.append(nll[:, -stride:])
        return torch.cat(scored)

    return score


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns the paper's slopes: those of the power of two below, then every other of the next one's."""
    below = 2 ** (num_heads.bit_length() - 1)
    between = torch.arange(num_heads - below) + 0.5
    return 2.0 ** (-8.0 / below * torch.cat([torch.arange(1.0, below + 1), between]))


def alibi_bias(num_heads: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns `[1, heads, length, length]`, with the causal mask."""
    bias = torch.empty(1, num_heads, length, length, dtype=dtype)
    positions = torch.arange(length)
    # no other tensor of its size
    for query, rows in zip(positions, bias[0].unbind(1), strict=True):
        distance = query - positions
        rows.copy_(
            (-alibi_slopes(num_heads)[:, None] * distance).masked_fill_(distance < 0, -math.inf)
        )
    return bias


def dense_attention(shape: Shape, dtype: torch.dtype, position: str) -> tuple[Attention, int]:
    """Returns attention with ALiBi and the causal mask in a tensor, and its bytes."""
    bias = alibi_bias(shape.heads, shape.length, dtype)
    return biased(bias), bias.nbytes


def biased(bias: Tensor) -> Attention:
    """Returns attention with a bias `[1, heads, length, keys]`, which holds the mask."""
    return functools.partial(functional.scaled_dot_product_attention, attn_mask=bias)


def rotary_attention(shape: Shape, dtype: torch.dtype, position: str) -> tuple[Attention, int]:
    """Returns causal attention with rotary positions, whose angles are float32, and its bytes."""
    half = shape.head_dim // 2
    angles = torch.outer(torch.arange(shape.length), 10_000.0 ** (-torch.arange(half) / half))
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        pairs = first * cos - second * sin, second * cos + first * sin
        return torch.cat(pairs, dim=-1).type_as(x)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            turned(query), turned(key), value, is_causal=True
        )

    return attend, cos.nbytes + sin.nbytes


def flex_attention(shape: Shape, dtype: torch.dtype, position: str) -> tuple[Attention, int]:
    """Returns FlexAttention, compiled, with the bias as a score_mod and a causal block mask, and 0 bytes
    held. The bias comes from slopes (ALiBi), sums (FoX) or a table over distance (others), without
    gradients.
    """
    length, compiled = shape.length, torch.compile(flex.flex_attention, dynamic=False)
    slopes = alibi_slopes(shape.heads)
    sums = torch.zeros(shape.batch, shape.heads, length).cumsum(dim=2)
    table = torch.zeros(shape.heads, length)

    def alibi(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    def fox(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + sums[batch, head, query] - sums[batch, head, key]

    def by_distance(
        score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        return score + table[head, query - key]

    scores = {"alibi": alibi, "fox": fox, "none": None}

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
    score = scores.get(position, by_distance)
    # With a table its own choice asks for more shared memory than an H200 has.
    options = {} if position in scores else {"num_stages": 1}
    return lambda query, key, value: compiled(
        query, key, value, score_mod=score, block_mask=mask, kernel_options=options
    ), 0


ATTENTION = {"sdpa": dense_attention, "rotary": rotary_attention, "flex": flex_attention}
