"""Makes fairseq-tiny.{pt,npz}, dict.txt and text: python tests/data/make_fairseq_tiny.py (needs
PyTorch).

A checkpoint of random weights with the pickle structure of the paper's code, and the NLL
of each token of a text by the formulas of this code, written out here in NumPy and float64
for single windows. `--check=FOLDER` applies the same formulas to a checkpoint.pt,
dict.txt, valid.txt and expected.npz made by the paper's code itself.
"""

import collections
import pathlib
import sys
import types

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
WIDTH, HEADS, HIDDEN, LAYERS, FACTOR, CUTOFFS, LENGTH = 24, 6, 40, 2, 2, (40, 72), 16
SHAPES = ((16, 16), (32, 32), (32, 16), (16, 1), (16, 5))
WORDS = [f"w{i}" for i in range(92)]  # with the 4 special symbols 96, a multiple of 8


def slopes(n):
    """Returns the slopes of the paper's code: for 6 heads the slopes of 4, then every other slope
    of 8.
    """
    power = 2 ** int(np.floor(np.log2(n)))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return np.array((first + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)])[:n])


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def log_probabilities(tensors, heads, cutoffs, inputs):
    """Returns log probabilities of every word after each input: adaptive input, ALiBi and adaptive
    softmax.
    """
    t = {name.removeprefix("decoder."): np.asarray(x, np.float64) for name, x in tensors.items()}
    band = np.searchsorted(cutoffs, inputs, side="right")
    starts = (0, *cutoffs)
    x = np.stack([
        t[f"embed_tokens.embeddings.{b}.1.weight"] @ t[f"embed_tokens.embeddings.{b}.0.weight"][token - starts[b]]
        for token, b in zip(inputs, band, strict=True)
    ])  # fmt: skip
    x = x * np.sqrt(x.shape[1])
    distance = np.arange(len(inputs))[:, None] - np.arange(len(inputs))[None, :]
    layers = 1 + max(int(name.split(".")[1]) for name in t if name.startswith("layers."))
    for p in (f"layers.{i}." for i in range(layers)):
        y = norm(x, t[p + "self_attn_layer_norm.weight"], t[p + "self_attn_layer_norm.bias"])
        q, k, v = (
            y @ t[f"{p}self_attn.{s}_proj.weight"].T + t[f"{p}self_attn.{s}_proj.bias"]
            for s in "qkv"
        )
        size, attended = q.shape[1] // heads, []
        for h, slope in enumerate(slopes(heads)):
            part = slice(h * size, (h + 1) * size)
            logits = q[:, part] @ k[:, part].T / np.sqrt(size) - slope * distance
            attended.append(
                np.exp(log_softmax(np.where(distance < 0, -np.inf, logits))) @ v[:, part]
            )
        x = (
            x
            + np.hstack(attended) @ t[p + "self_attn.out_proj.weight"].T
            + t[p + "self_attn.out_proj.bias"]
        )
        y = norm(x, t[p + "final_layer_norm.weight"], t[p + "final_layer_norm.bias"])
        x = (
            x
            + np.maximum(y @ t[p + "fc1.weight"].T + t[p + "fc1.bias"], 0) @ t[p + "fc2.weight"].T
            + t[p + "fc2.bias"]
        )
    head = [
        t["adaptive_softmax.head.word_proj.weight"],
        t["adaptive_softmax.head.class_proj.weight"],
    ]
    head = log_softmax(x @ np.concatenate(head).T)
    found = [head[:, : cutoffs[0]]]
    for i in range(len(cutoffs)):
        # tied to the inputs' projection, transposed
        hidden = x @ t[f"adaptive_softmax.tail.{i}.0.weight"]
        tail = log_softmax(hidden @ t[f"adaptive_softmax.tail.{i}.2.weight"].T)
        found.append(head[:, cutoffs[0] + i, None] + tail)
    return np.hstack(found)


def nll(tensors, heads, cutoffs, tokens, length, stride, windows=None):
    """Returns the NLL of each token (of the first `windows` windows), from the recipe's words."""
    inputs, found = [2, *tokens], []  # </s> stands before the first token
    for start in range(0, len(tokens), stride)[:windows]:
        end = min(start + stride, len(tokens))
        log_p = log_probabilities(
            tensors, heads, cutoffs, inputs[max(0, start - (length - stride)) : end]
        )
        found += list(-log_p[-(end - start) :][np.arange(end - start), tokens[start:end]])
    return np.array(found)


def random_tensors(rng):
    """Returns tensors by the names of the paper's code; tied tensors are the same objects."""
    t, ends = {"decoder.version": np.array([3.0])}, (*CUTOFFS, len(WORDS) + 4)
    e, s = "decoder.embed_tokens.", "decoder.adaptive_softmax."
    # the fork has both
    t[e + "_float_tensor"] = t["decoder.embed_positions._float_tensor"] = np.zeros(1)
    for band, (start, end) in enumerate(zip((0, *CUTOFFS), ends, strict=True)):
        size = WIDTH // FACTOR**band
        t[f"{e}embeddings.{band}.0.weight"] = rng.normal(0, size**-0.5, (end - start, size))
        t[f"{e}embeddings.{band}.1.weight"] = rng.normal(0, WIDTH**-0.5, (WIDTH, size))
    for p in (f"decoder.layers.{layer}." for layer in range(LAYERS)):
        for s_name in ("k", "v", "q", "out"):
            t[f"{p}self_attn.{s_name}_proj.weight"] = rng.normal(
                0, 1.5 * WIDTH**-0.5, (WIDTH, WIDTH)
            )
            t[f"{p}self_attn.{s_name}_proj.bias"] = rng.normal(0, 0.1, WIDTH)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            t[f"{p}{name}.weight"], t[f"{p}{name}.bias"] = (
                rng.normal(1, 0.1, WIDTH),
                rng.normal(0, 0.1, WIDTH),
            )
        for name, shape in (("fc1", (HIDDEN, WIDTH)), ("fc2", (WIDTH, HIDDEN))):
            t[f"{p}{name}.weight"], t[f"{p}{name}.bias"] = (
                rng.normal(0, 0.2, shape),
                rng.normal(0, 0.1, shape[0]),
            )
    t[s + "version"], t[s + "head._float_tensor"] = np.array([1]), np.zeros(1)
    t[s + "head.word_proj.weight"] = t[e + "embeddings.0.0.weight"]
    t[s + "head.class_proj.weight"] = rng.normal(0, 0.3, (len(CUTOFFS), WIDTH))
    for i in range(len(CUTOFFS)):
        t[f"{s}tail.{i}.0.weight"] = t[f"{e}embeddings.{i + 1}.1.weight"]
        t[f"{s}tail.{i}.2.weight"] = t[f"{e}embeddings.{i + 1}.0.weight"]
    return t


def settings():
    """Returns the settings in classes with the names of omegaconf, and an object of a class of
    fairseq.
    """
    module = {name: types.ModuleType(name) for name in ("omegaconf", "fairseq")}
    for package, name in (
        ("omegaconf", "DictConfig"),
        ("omegaconf", "AnyNode"),
        ("fairseq", "AverageMeter"),
    ):
        made = type(name, (), {"__module__": package})
        setattr(module[package], name, made)
    sys.modules.update(module)

    def node(value):
        is_section = isinstance(value, dict)
        made = (module["omegaconf"].DictConfig if is_section else module["omegaconf"].AnyNode)()
        content = {key: node(item) for key, item in value.items()} if is_section else value
        made.__dict__.update(
            {"_metadata": None, "_parent": None, "_content" if is_section else "_val": content}
        )
        return made

    cutoffs = ",".join(map(str, CUTOFFS))
    model = {
        "_name": "transformer_lm_wiki103", "activation_fn": "relu", "dropout": 0.3, "attention_dropout": 0.1,
        "activation_dropout": 0.1, "relu_dropout": 0.0, "decoder_embed_dim": WIDTH, "decoder_layers": LAYERS,
        "decoder_ffn_embed_dim": HIDDEN, "decoder_attention_heads": HEADS, "decoder_normalize_before": True,
        "no_decoder_final_norm": True, "adaptive_softmax_cutoff": cutoffs, "adaptive_input_cutoff": cutoffs,
        "adaptive_softmax_dropout": 0.2, "no_token_positional_embeddings": False, "decoder_learned_pos": False,
        "max_tokens": 512, "tokens_per_sample": LENGTH, "max_target_positions": LENGTH,
    }  # fmt: skip
    meter = module["fairseq"].AverageMeter()
    meter.val = 3.5
    return node({"_name": None, "common": {"seed": 7}, "model": model}), meter


def write_tiny():
    import torch

    rng = np.random.default_rng(0)
    tensors, kept = random_tensors(rng), {}
    for name, x in tensors.items():  # tied tensors share their storage
        kept.setdefault(
            id(x),
            torch.from_numpy(np.asarray(x, np.int64 if name.endswith("x.version") else np.float32)),
        )
    state = collections.OrderedDict((name, kept[id(x)]) for name, x in tensors.items())
    config, meter = settings()
    content = {
        "args": None, "cfg": config, "model": state, "criterion": None, "optimizer_history": [{"num_updates": 150}],
        "extra_state": {"metrics": {"default": meter}}, "last_optimizer_state": None,
    }  # fmt: skip
    torch.save(content, FOLDER / "fairseq-tiny.pt")
    (FOLDER / "fairseq-tiny-dict.txt").write_text(
        "".join(f"{word} {200 - i}\n" for i, word in enumerate(WORDS))
    )
    lines = [
        " ".join(rng.choice([*WORDS, "unheard", "<unk>"], rng.integers(0, 9))) for _ in range(40)
    ]
    (FOLDER / "fairseq-tiny.txt").write_text("".join(line + "\n" for line in lines))
    ids = {word: i + 4 for i, word in enumerate(WORDS)}
    tokens = [
        token for line in lines for token in [*(ids.get(word, 3) for word in line.split()), 2]
    ]
    float32 = {name: kept[id(x)].numpy() for name, x in tensors.items()}
    found = {
        f"nll/length={n},stride={s}": nll(float32, HEADS, CUTOFFS, tokens, n, s) for n, s in SHAPES
    }
    np.savez_compressed(FOLDER / "fairseq-tiny.npz", targets=np.array(tokens, np.int32), **found)


def check(folder):
    """Prints the largest difference from the paper's code in the first windows at (128, 64)."""
    import torch

    content = torch.load(folder / "checkpoint.pt", weights_only=False)
    tensors = {name: x.numpy() for name, x in content["model"].items()}
    expected = np.load(folder / "expected.npz")
    found = nll(tensors, 8, (2000, 6000), expected["targets"].tolist(), 128, 64, windows=20)
    print(np.abs(found - expected["nll/length=128,stride=64"][: found.size]).max())


if __name__ == "__main__":
    check(pathlib.Path(sys.argv[1].removeprefix("--check="))) if len(sys.argv) > 1 else write_tiny()
