"""The peer of `scripts/benchmark.py adaptive` and `evaluate`: the paper's model in PyTorch, laid out as its code is.

Time before batch, projections of their own for query, key and value, products of
explicit logits, their softmax; bands picked out by boolean masks; Nesterov's momentum a
parameter at a time. Evaluation computes all positions of each window, and the
log-probabilities of the whole vocabulary for each.
"""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from alibi.config import Config
from benchmarks.torch_peers import alibi_bias


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, feed_forward: int):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, feed_forward), nn.Linear(feed_forward, width)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Of `[length, batch, width]`; the bias is `[batch * heads, length, length]`."""
        length, batch, width = x.shape
        normed = self.attention_norm(x)
        query = self._heads(self.query(normed) * (width // self.num_heads) ** -0.5)
        weights = functional.softmax(torch.bmm(query, self._heads(self.key(normed)).transpose(1, 2)) + bias, dim=-1)
        attended = torch.bmm(weights, self._heads(self.value(normed)))
        x = x + self.out(attended.transpose(0, 1).reshape(length, batch, width))
        return x + self.down(functional.relu(self.up(self.feed_forward_norm(x))))

    def _heads(self, x: Tensor) -> Tensor:
        length, batch, width = x.shape
        return x.contiguous().view(length, batch * self.num_heads, width // self.num_heads).transpose(0, 1)


class Decoder(nn.Module):
    """Adaptive input and softmax, tied; ALiBi; no dropout."""

    def __init__(self, config: Config, vocabulary: int):
        super().__init__()
        model = config.model
        self.width, self.num_heads = model.width, model.num_heads
        self.starts = [0, *model.cutoffs, vocabulary]
        sizes = [(stop - start) for start, stop in itertools.pairwise(self.starts)]
        features = [model.width // model.adaptive_factor**band for band in range(len(sizes))]
        self.words = nn.ModuleList(nn.Embedding(*shape) for shape in zip(sizes, features, strict=True))
        for words, size in zip(self.words, features, strict=True):
            nn.init.normal_(words.weight, std=size**-0.5)
        self.projections = nn.ModuleList(nn.Linear(size, model.width, bias=False) for size in features)
        self.clusters = nn.Linear(model.width, len(model.cutoffs), bias=False)
        layers = (Layer(model.width, model.num_heads, model.feed_forward) for _ in range(model.num_layers))
        self.layers = nn.ModuleList(layers)
        self.bias = torch.empty(0, 0, 0)

    def features(self, tokens: Tensor) -> Tensor:
        """`[batch * length, width]` of `[batch, length]`."""
        x = torch.zeros(*tokens.shape, self.width)
        for band, (start, stop) in enumerate(itertools.pairwise(self.starts)):
            inside = (tokens >= start) & (tokens < stop)
            x[inside] = self.projections[band](self.words[band](tokens[inside] - start))
        x = (x * self.width**0.5).transpose(0, 1)
        batch, length = tokens.shape
        for layer in self.layers:
            x = layer(x, self._bias(batch, length))
        return x.transpose(0, 1).reshape(-1, self.width)

    def _bias(self, batch: int, length: int) -> Tensor:
        """With the causal mask, `[batch * heads, length, length]`; made again only where it doesn't fit."""
        if self.bias.shape[-1] != length or len(self.bias) < batch * self.num_heads:
            self.bias = alibi_bias(self.num_heads, length)[0].repeat(batch, 1, 1)
        return self.bias[: batch * self.num_heads]

    def summed_nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Of all targets, each through the bands that it needs, as in training."""
        features, targets = self.features(tokens), targets.flatten()
        of_head, nll = targets.clone(), torch.zeros(())
        for band, inside in self._tails(targets):
            of_head[inside] = self.starts[1] + band - 1
            nll = nll + functional.cross_entropy(
                self._tail(features[inside], band), targets[inside] - self.starts[band], reduction="sum"
            )
        return nll + functional.cross_entropy(self._head(features), of_head, reduction="sum")

    def log_probabilities(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`[batch * length, vocabulary]`; of a tail only where the target is in it."""
        features, targets = self.features(tokens), targets.flatten()
        first = self.starts[1]
        result = features.new_zeros(len(features), self.starts[-1])
        head = functional.log_softmax(self._head(features), dim=-1)
        result[:, :first] = head[:, :first]
        for band, inside in self._tails(targets):
            tail = functional.log_softmax(self._tail(features[inside], band), dim=-1)
            result[inside, self.starts[band] : self.starts[band + 1]] = tail + head[inside, first + band - 1, None]
        return result

    def _tails(self, targets: Tensor) -> list[tuple[int, Tensor]]:
        """The bands after the first that have targets, and which."""
        bands = range(1, len(self.words))
        found = [(band, (targets >= self.starts[band]) & (targets < self.starts[band + 1])) for band in bands]
        return [(band, inside.nonzero().squeeze(1)) for band, inside in found if inside.any()]

    def _head(self, features: Tensor) -> Tensor:
        return torch.cat([functional.linear(features, self.words[0].weight), self.clusters(features)], dim=-1)

    def _tail(self, features: Tensor, band: int) -> Tensor:
        hidden = functional.linear(features, self.projections[band].weight.t())
        return functional.linear(hidden, self.words[band].weight)


def make_decoder(config: Config, vocabulary: int) -> Decoder:
    """With initial parameters.

    Raises:
      ValueError: a config that this peer is not.
    """
    model = config.model
    needed = {"embedding": "adaptive", "activation": "relu", "final_norm": False, "window": 0}
    needed |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "softmax_dropout"), 0.0)
    others = [f"model.{key}={model[key]}" for key, value in needed.items() if model[key] != value]
    others += [f"position={config.position}"] if config.position != "alibi" else []
    if others:
        raise ValueError(f"the PyTorch peer has no {', '.join(others)}; measure such a model without --peer=torch")
    torch.manual_seed(config.seed)
    return Decoder(config, vocabulary)


def make_train_step(config: Config, vocabulary: int, batch: tuple[np.ndarray, np.ndarray]) -> Callable[[], Tensor]:
    """A function that makes one update on the batch and gives its loss."""
    decoder = make_decoder(config, vocabulary)
    inputs, targets = (torch.from_numpy(x).long() for x in batch)
    optimizer = torch.optim.SGD(
        decoder.parameters(), lr=config.optimizer.learning_rate, momentum=config.optimizer.momentum, nesterov=True
    )

    def train_step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = decoder.summed_nll(inputs, targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        return loss.detach()

    return train_step


def make_scorer(decoder: Decoder, tokens: np.ndarray, length: int, stride: int, rows: int) -> Callable[[], Tensor]:
    """A function that gives the NLL of the last `stride` targets of each whole window of tokens, `rows` at a time."""
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
