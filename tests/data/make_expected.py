"""Writes the expected numbers of this folder's recordings, by the formulas of the paper's code.

    python -m tests.data.make_expected                  # needs PyTorch
    python -m tests.data.make_expected --check=FOLDER   # shows how far the paper's own numbers are

The formulas are plain PyTorch in float64 and share nothing with the library, which only reads the
checkpoint. See README.md for the files, and for the recordings of the paper's own code in FOLDER.
"""

import itertools
import math
import pathlib
import re
import sys

import numpy as np
import torch
from torch.nn import functional

from alibi.convert.families.fairseq import read_checkpoint

PADDING = 1
# updates of the recording: later, what rounding does to two inputs of ReLU near zero shows
CHECKED = 25
Tensors = dict[str, torch.Tensor]
WORDS = "decoder.embed_tokens.embeddings"


def slopes(heads: int) -> torch.Tensor:
    """Returns the slopes of the paper's code: for 6 heads those of 4, then every other one of 8."""
    power = 2 ** math.floor(math.log2(heads))
    heights = [8 * h / power for h in range(1, power + 1)]
    heights += [4 * h / power for h in range(1, 2 * power, 2)]
    return 2.0 ** -torch.tensor(heights[:heads], dtype=torch.float64)


def band_ends(tensors: Tensors) -> list[int]:
    bands = [len(tensors[k]) for k in sorted(tensors) if re.fullmatch(rf"{WORDS}\.\d\.0.weight", k)]
    return np.cumsum(bands).tolist()


def embed(tensors: Tensors, words: torch.Tensor) -> torch.Tensor:
    width = tensors[f"{WORDS}.0.1.weight"].shape[0]
    out = torch.zeros(*words.shape, width, dtype=torch.float64)
    for band, (start, end) in enumerate(itertools.pairwise([0, *band_ends(tensors)])):
        mask = (words >= start) & (words < end)
        rows = functional.embedding(words[mask] - start, tensors[f"{WORDS}.{band}.0.weight"])
        out[mask] = rows @ tensors[f"{WORDS}.{band}.1.weight"].T
    return math.sqrt(width) * out


def linear(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def norm(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    scale, shift = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return functional.layer_norm(x, x.shape[-1:], scale, shift, 1e-5)


def attention(tensors: Tensors, prefix: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    batch, length, width = x.shape
    q, k, v = (
        linear(tensors, f"{prefix}.{name}_proj", x).view(batch, length, heads, -1).transpose(1, 2)
        for name in "qkv"
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    logits = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    logits = logits - slopes(heads)[:, None, None] * distance
    weights = logits.masked_fill(distance < 0, -math.inf).softmax(-1)
    out = (weights @ v).transpose(1, 2).reshape(batch, length, width)
    return linear(tensors, f"{prefix}.out_proj", out)


def features(tensors: Tensors, words: torch.Tensor, heads: int) -> torch.Tensor:
    x = embed(tensors, words)
    layers = sum(name.endswith("fc1.weight") for name in tensors)
    for prefix in (f"decoder.layers.{layer}" for layer in range(layers)):
        y = norm(tensors, f"{prefix}.self_attn_layer_norm", x)
        x = x + attention(tensors, f"{prefix}.self_attn", y, heads)
        y = norm(tensors, f"{prefix}.final_layer_norm", x)
        x = x + linear(tensors, f"{prefix}.fc2", linear(tensors, f"{prefix}.fc1", y).relu())
    return x


def token_nll(
    tensors: Tensors, words: torch.Tensor, targets: torch.Tensor, heads: int, ignored: int = -100
) -> torch.Tensor:
    """Returns the NLL of each target by the adaptive softmax.

    fairseq's loss of training ignores the padding's row in every band, and so `ignored` is an index
    within a band.
    """
    ends, targets = band_ends(tensors), targets.flatten()
    x = features(tensors, words, heads).flatten(0, 1)
    clusters = tensors["decoder.adaptive_softmax.head.class_proj.weight"]
    head = torch.cat([tensors[f"{WORDS}.0.0.weight"], clusters])
    how = {"ignore_index": ignored, "reduction": "none"}
    of_head, of_tails = targets.clone(), torch.zeros(targets.shape, dtype=torch.float64)
    for band, (start, end) in enumerate(itertools.pairwise(ends), start=1):
        mask = (targets >= start) & (targets < end)
        of_head[mask] = ends[0] + band - 1
        hidden = x[mask] @ tensors[f"{WORDS}.{band}.1.weight"]
        logits = hidden @ tensors[f"{WORDS}.{band}.0.weight"].T
        of_tails[mask] = functional.cross_entropy(logits, targets[mask] - start, **how)
    return of_tails + functional.cross_entropy(x @ head.T, of_head, **how)


def windows_nll(
    tensors: Tensors,
    tokens: list[int],
    heads: int,
    length: int,
    stride: int,
    most: int | None = None,
) -> np.ndarray:
    """Returns the NLL of each token (of the first `most` windows), from the recipe's words."""
    inputs, found = [2, *tokens], []  # </s> stands before the first token
    for start in range(0, len(tokens), stride)[:most]:
        first, end = max(0, start - (length - stride)), min(start + stride, len(tokens))
        window = torch.tensor([inputs[first:end]]), torch.tensor([tokens[first:end]])
        found += token_nll(tensors, *window, heads)[start - first :].tolist()
    return np.array(found)


def learning_rate(update: int, warmup: int, period: int) -> float:
    """Returns the rate of fairseq's cosine: peak 1, from 1e-7, minimum 1e-4, t_mult 2, shrink 0.75."""
    if update < warmup:
        return 1e-7 + (1 - 1e-7) * update / warmup
    update -= warmup
    cycle = math.floor(math.log(1 + update / period, 2))
    length, start = 2**cycle * period, (2**cycle - 1) * period
    low, high = 1e-4 * 0.75**cycle, 0.75**cycle
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * (update - start) / length))


def train(
    recording: dict[str, np.ndarray], updates: int, warmup: int, period: int
) -> dict[str, np.ndarray]:
    """Trains from the recording's start on its batches, with 8 heads.

    Returns lr, loss in nats per token and gradient norm of each update, and the last parameters.
    """
    start = {k.removeprefix("init/"): x for k, x in recording.items() if k.startswith("init/")}
    copies = "decoder.adaptive_softmax.tail", "decoder.adaptive_softmax.head.word_proj"
    tensors = {
        name: torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for name, x in start.items()
        if not name.startswith(copies) and not name.endswith(("version", "_float_tensor"))
    }
    momentum, rows = {name: torch.zeros_like(x) for name, x in tensors.items()}, []
    for update in range(updates):
        words, targets = (
            torch.tensor(recording[f"{side}/{update}"], dtype=torch.long) for side in ("src", "tgt")
        )
        nll = token_nll(tensors, words, targets, heads=8, ignored=PADDING)
        loss = nll.sum() / (targets != PADDING).sum()
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        size = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        rate = learning_rate(update, warmup, period)
        rows.append((rate, loss.item(), size))
        with torch.no_grad():
            for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True):
                clipped = gradient * min(1.0, 0.1 / (size + 1e-6))
                momentum[name] = 0.99 * momentum[name] + clipped
                tensor -= rate * (clipped + 0.99 * momentum[name])
    found = dict(zip(("lr", "loss_nats", "gradient_norm"), np.transpose(rows), strict=True))
    return found | {f"final/{name}": x.detach().numpy() for name, x in tensors.items()}


def double(checkpoint: pathlib.Path) -> Tensors:
    tensors = read_checkpoint(checkpoint).tensors
    return {name: torch.tensor(x.read(), dtype=torch.float64) for name, x in tensors.items()}


def check(folder: pathlib.Path) -> None:
    """Prints the largest differences from the recordings of the paper's own code."""
    recording, scored = (dict(np.load(folder / f"{n}.npz")) for n in ("trajectory", "expected"))
    found = train(recording, CHECKED, warmup=16, period=40)
    recording["loss_nats"] = recording["loss_base2"] * math.log(2)
    for ours, theirs in (("lr", "lr"), ("loss_nats", "loss_nats"), ("gradient_norm", "gnorm")):
        error = np.abs(found[ours] / recording[theirs][:CHECKED] - 1).max()
        print(f"{ours}: within {error:.1e} of the recording")
    tokens, nll = scored["targets"].tolist(), scored["nll/length=128,stride=64"]
    ours = windows_nll(double(folder / "checkpoint.pt"), tokens, 8, 128, 64, most=20)
    print(f"NLL: within {np.abs(ours - nll[: ours.size]).max():.1e} nats of the recording")


def main() -> None:
    folder = pathlib.Path(__file__).parent
    recording, scored = (dict(np.load(folder / f"{n}.npz")) for n in ("trajectory", "fairseq-tiny"))
    trained = train(recording, 20, warmup=4, period=12)  # one restart falls inside
    for name in trained.keys() & recording.keys():
        recording[name] = trained[name].astype(recording[name].dtype)
    np.savez_compressed(folder / "trajectory.npz", **recording)
    tensors, tokens = double(folder / "fairseq-tiny.pt"), scored["targets"].tolist()
    for name in scored.keys() - {"targets"}:
        length, stride = map(int, re.findall(r"\d+", name))
        scored[name] = windows_nll(tensors, tokens, 6, length, stride)
    np.savez_compressed(folder / "fairseq-tiny.npz", **scored)


if __name__ == "__main__":
    check(pathlib.Path(sys.argv[1].removeprefix("--check="))) if len(sys.argv) > 1 else main()
