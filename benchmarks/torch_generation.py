"""The PyTorch peer for generation: the decoder in `torch_peer` with a preallocated key-value cache."""

import functools

import numpy as np
import torch
from torch import Tensor, nn

from alibi.config import Config
from benchmarks.processes import Step
from benchmarks.torch_peer import FusedDecoder, alibi_bias, biased

TOLERANCE = 1e-4  # of logits, with the cache and without


class CachedDecoder(nn.Module):
    """Greedy decoding. Eager code reads the filled part of the cache; compiled code reads all slots
    under a mask, since one program then serves all tokens (as gpt-fast does).
    """

    def __init__(self, decoder: FusedDecoder, config: Config, batch: int, slots: int):
        super().__init__()
        self.decoder = decoder
        model = config.model
        shape = (model.num_layers, 2, batch, model.num_heads, slots, model.head_dim)
        self.register_buffer("held", torch.zeros(shape))
        self.register_buffer("bias", alibi_bias(model.num_heads, slots))

    def forward(self, tokens: Tensor, first: int | Tensor) -> tuple[Tensor, Tensor]:
        """Returns the likeliest next token `[batch, 1]` and the logits `[batch, vocabulary]`.

        Args:
          tokens: `[batch, length]`.
          first: the slot of the first of them. With a tensor `[1]` of length 1, all slots are read.
        """
        if isinstance(first, int):
            stop = first + tokens.shape[1]
            bias = self.bias[:, :, first:stop, :stop]
        else:
            bias = self.bias.index_select(2, first)
        x = self.decoder.embedding(tokens) * self.decoder.scale
        for layer, held in zip(self.decoder.layers, self.held, strict=True):
            x = layer(x, biased(bias), functools.partial(_append, held, first))
        logits = self.decoder.norm(x[:, -1]) @ self.decoder.embedding.weight.T
        return logits.argmax(dim=-1, keepdim=True), logits


def _append(held: Tensor, first: int | Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values to attend to, `[batch, heads, _, head_dim]`, with these in the
    cache `held`.
    """
    if isinstance(first, int):
        stop = first + key.shape[2]
        held[0, :, :, first:stop], held[1, :, :, first:stop] = key, value
        return held[0, :, :, :stop], held[1, :, :, :stop]
    held[0].index_copy_(2, first, key)
    held[1].index_copy_(2, first, value)
    return held[0], held[1]


def generation_step(
    config: Config, vocabulary: int, batch: int, prompt: int, new_tokens: int, compiled: bool
) -> Step:
    """Returns the model with random parameters at reading a prompt, and at decoding after it.

    Raises:
      RuntimeError: its logits with the cache are not those of one pass over all tokens.
    """
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.seed)
    slots = prompt + new_tokens
    decoder = CachedDecoder(FusedDecoder(config, vocabulary), config, batch, slots).eval()
    mode = "reduce-overhead" if torch.cuda.is_available() else None
    read = torch.compile(decoder, dynamic=False, mode=mode) if compiled else decoder
    places = [torch.tensor([slot]) if compiled else slot for slot in range(slots)]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (batch, slots))).to(
        torch.get_default_device()
    )

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.inference_mode()
    def prefill(steps: int) -> None:
        for _ in range(steps):
            read(tokens[:, :prompt], 0)
        wait()

    @torch.inference_mode()
    def decode(steps: int) -> None:
        for _ in range(steps):
            token = tokens[:, prompt : prompt + 1].contiguous()
            for position in places[prompt:]:
                token = read(token, position)[0].clone()
            wait()

    @torch.inference_mode()
    def error() -> float:
        whole = decoder(tokens, 0)[1]
        logits = read(tokens[:, :prompt], 0)[1]
        for slot in range(prompt, slots):
            logits = read(tokens[:, slot : slot + 1].contiguous(), places[slot])[1]
        return float((logits - whole).abs().max())

    logits_error = error()
    if not logits_error < TOLERANCE:
        raise RuntimeError(f"logits with a cache are off by {logits_error:.2g}")
    return Step({"prefill": prefill, "decode": decode}, {"logits_error": logits_error})
