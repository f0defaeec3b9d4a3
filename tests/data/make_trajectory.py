"""Writes tests/data/trajectory.npz: updates of the paper's recipe by an implementation which shares
nothing with ours.

    python tests/data/make_trajectory.py RECORDING.npz    # needs PyTorch

RECORDING.npz has 60 updates of the paper's own code (see README.md here). The model, loss
and optimizer below first run on it and must give its numbers; then they run on a
smaller model cut out of it, whose updates are written.
"""

import itertools
import math
import pathlib
import sys

import numpy as np
import torch
from torch.nn import functional

HEADS, PADDING = 8, 1
# updates of the recording: later, what rounding does to two inputs of ReLU near zero shows
CHECKED = 25
Tensors = dict[str, torch.Tensor]


def sizes_of(tensors: Tensors) -> list[int]:
    """Returns the end of each band."""
    bands = [
        len(v)
        for k, v in sorted(tensors.items())
        if k.startswith("decoder.embed_tokens.embeddings") and ".0.w" in k
    ]
    return np.cumsum(bands).tolist()


def embed(tensors: Tensors, words: torch.Tensor, ends: list[int]) -> torch.Tensor:
    width = tensors["decoder.embed_tokens.embeddings.0.1.weight"].shape[0]
    out = torch.zeros(*words.shape, width, dtype=torch.float64)
    for band, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        prefix = f"decoder.embed_tokens.embeddings.{band}"
        mask = (words >= start) & (words < end)
        out[mask] = (
            functional.embedding(words[mask] - start, tensors[f"{prefix}.0.weight"])
            @ tensors[f"{prefix}.1.weight"].T
        )
    return math.sqrt(width) * out


def attention(tensors: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    q, k, v = (
        (x @ tensors[f"{prefix}.{name}_proj.weight"].T + tensors[f"{prefix}.{name}_proj.bias"])
        .view(batch, length, HEADS, -1)
        .transpose(1, 2)
        for name in "qkv"
    )
    slopes = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64))
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    logits = q @ k.transpose(2, 3) / math.sqrt(width // HEADS) - slopes[:, None, None] * distance
    weights = logits.masked_fill(distance < 0, -math.inf).softmax(-1)
    out = (weights @ v).transpose(1, 2).reshape(batch, length, width)
    return out @ tensors[f"{prefix}.out_proj.weight"].T + tensors[f"{prefix}.out_proj.bias"]


def norm(tensors: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(
        x, x.shape[-1:], tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"], 1e-5
    )


def features(tensors: Tensors, words: torch.Tensor, ends: list[int]) -> torch.Tensor:
    x = embed(tensors, words, ends)
    layers = sum(name.endswith("fc1.weight") for name in tensors)
    for prefix in (f"decoder.layers.{layer}" for layer in range(layers)):
        x = x + attention(
            tensors, f"{prefix}.self_attn", norm(tensors, f"{prefix}.self_attn_layer_norm", x)
        )
        y = norm(tensors, f"{prefix}.final_layer_norm", x)
        y = functional.relu(y @ tensors[f"{prefix}.fc1.weight"].T + tensors[f"{prefix}.fc1.bias"])
        x = x + y @ tensors[f"{prefix}.fc2.weight"].T + tensors[f"{prefix}.fc2.bias"]
    return x


def total_nll(
    tensors: Tensors, words: torch.Tensor, targets: torch.Tensor, ends: list[int]
) -> torch.Tensor:
    """fairseq's adaptive loss, which ignores the padding's row in every band."""
    x, targets = features(tensors, words, ends).flatten(0, 1), targets.flatten()
    embedding = "decoder.embed_tokens.embeddings"
    head = torch.cat(
        [
            tensors[f"{embedding}.0.0.weight"],
            tensors["decoder.adaptive_softmax.head.class_proj.weight"],
        ]
    )
    of_head = targets.clone()
    total = torch.zeros((), dtype=torch.float64)
    for band, (start, end) in enumerate(itertools.pairwise(ends), start=1):
        mask = (targets >= start) & (targets < end)
        of_head[mask] = ends[0] + band - 1
        hidden = x[mask] @ tensors[f"{embedding}.{band}.1.weight"]
        logits = hidden @ tensors[f"{embedding}.{band}.0.weight"].T
        total = total + functional.cross_entropy(
            logits, targets[mask] - start, ignore_index=PADDING, reduction="sum"
        )
    return total + functional.cross_entropy(
        x @ head.T, of_head, ignore_index=PADDING, reduction="sum"
    )


def learning_rate(update: int, warmup: int, period: int) -> float:
    """fairseq's cosine: peak 1, from 1e-7, minimum 1e-4, t_mult 2, shrink 0.75."""
    if update < warmup:
        return 1e-7 + (1 - 1e-7) * update / warmup
    update -= warmup
    cycle = math.floor(math.log(1 + update / period, 2))
    length, start = 2**cycle * period, (2**cycle - 1) * period
    low, high = 1e-4 * 0.75**cycle, 0.75**cycle
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * (update - start) / length))


def train(
    init: dict[str, np.ndarray], batches: list, warmup: int, period: int
) -> dict[str, np.ndarray]:
    """Returns lr, loss in nats per token and gradient norm of each update, and the last parameters."""
    tied = ("decoder.adaptive_softmax.tail", "decoder.adaptive_softmax.head.word_proj")
    names = [
        k for k in init if not k.startswith(tied) and not k.endswith(("version", "_float_tensor"))
    ]
    tensors = {
        name: torch.tensor(init[name], dtype=torch.float64, requires_grad=True) for name in names
    }
    momentum = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ends, rows = sizes_of(tensors), []
    for update, (words, targets) in enumerate(batches):
        words, targets = (
            torch.tensor(words, dtype=torch.long),
            torch.tensor(targets, dtype=torch.long),
        )
        loss = total_nll(tensors, words, targets, ends) / (targets != PADDING).sum()
        gradients = dict(
            zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True)
        )
        size = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        rate = learning_rate(update, warmup, period)
        rows.append((rate, loss.item(), size))
        with torch.no_grad():
            for name, tensor in tensors.items():
                gradient = gradients[name] * min(1.0, 0.1 / (size + 1e-6))
                momentum[name] = 0.99 * momentum[name] + gradient
                tensor -= rate * (gradient + 0.99 * momentum[name])
    lr, losses, norms = (np.array(column) for column in zip(*rows, strict=True))
    final = {f"final/{name}": tensor.detach().numpy() for name, tensor in tensors.items()}
    return {"lr": lr, "loss_nats": losses, "gradient_norm": norms, **final}


def check(recording: dict[str, np.ndarray]) -> None:
    """Raises AssertionError if this file computes other numbers than the paper's code."""
    init = {k.removeprefix("init/"): v for k, v in recording.items() if k.startswith("init/")}
    batches = [(recording[f"src/{k}"], recording[f"tgt/{k}"]) for k in range(CHECKED)]
    found = train(init, batches, warmup=16, period=40)
    nats = recording["loss_base2"] * math.log(2)
    for name, expected in (
        ("lr", recording["lr"]),
        ("loss_nats", nats),
        ("gradient_norm", recording["gnorm"]),
    ):
        errors = np.abs(found[name] / expected[:CHECKED] - 1)
        print(f"{name}: within {errors.max():.1e} of the recording")
        assert errors.max() < (5e-3 if name == "gradient_norm" else 1e-4)


def cut(
    recording: dict[str, np.ndarray], ends: tuple[int, ...], updates: int
) -> tuple[dict[str, np.ndarray], list]:
    """Keeps the first words of each band; folds the words of the batches into them, band by band."""
    init = {k.removeprefix("init/"): v for k, v in recording.items() if k.startswith("init/")}
    old = [
        0,
        *np.cumsum(
            [len(init[f"decoder.embed_tokens.embeddings.{band}.0.weight"]) for band in range(3)]
        ),
    ]
    new = [0, *ends]
    for band in range(3):
        kept = init[f"decoder.embed_tokens.embeddings.{band}.0.weight"][: new[band + 1] - new[band]]
        place = "head.word_proj" if band == 0 else f"tail.{band - 1}.2"
        init[f"decoder.embed_tokens.embeddings.{band}.0.weight"] = init[
            f"decoder.adaptive_softmax.{place}.weight"
        ] = kept

    def fold(words: np.ndarray) -> np.ndarray:
        band = np.searchsorted(old, words, side="right") - 1
        start, size = np.array(new)[band], np.diff(new)[band]
        return (start + (words - np.array(old)[band]) % size).astype(np.int32)

    batches = [
        (fold(recording[f"src/{k}"][:4, :32]), fold(recording[f"tgt/{k}"][:4, :32]))
        for k in range(updates)
    ]
    return {name: tensor.astype(np.float32) for name, tensor in init.items()}, batches


def main() -> None:
    recording = dict(np.load(sys.argv[1]))
    check(recording)
    init, batches = cut(recording, (200, 500, 1000), updates=20)
    result = {f"init/{name}": tensor for name, tensor in init.items()}
    for k, (words, targets) in enumerate(batches):
        result |= {f"src/{k}": words.astype(np.int16), f"tgt/{k}": targets.astype(np.int16)}
    trained = train(init, batches, warmup=4, period=12)  # one restart falls inside
    result |= {k: v.astype(np.float32) if k.startswith("final/") else v for k, v in trained.items()}
    result = {
        k: v
        for k, v in result.items()
        if not k.startswith(("final/decoder.layers.1", "final/decoder.embed"))
    }
    target = pathlib.Path(__file__).with_name("trajectory.npz")
    np.savez_compressed(target, **result)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
