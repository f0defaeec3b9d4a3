"""Random models of other families, their own code's results beside ours, and the page of it.

    python -m tests.convert.imported results/imported/differences.md
    python -m tests.convert.imported    # records the logits of transformers for the tests
    python -m tests.convert.imported bert-masked-tokens FOLDER   # writes a recorded random model
    python -m tests.convert.imported --cost   # bytes and seconds of importing a BERT of base size

`transformers` computes what it has; the other families are in `described`.
"""

import dataclasses
import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers as hf
from jaxtyping import PyTree
from safetensors.numpy import load_file, save_file

from alibi.config import Config
from alibi.convert.exporting import export_model
from alibi.convert.families import family_of
from alibi.convert.folder import WEIGHTS
from alibi.convert.importing import import_model
from alibi.generation import generate
from alibi.model.decoder import DecoderLM
from alibi.objectives import make_objective
from alibi.runs.trained import TrainedRun
from tests.convert.described import FAMILIES as DESCRIBED
from tests.convert.described_encoders import ENCODERS

LENGTH = 16  # of training
LIMIT = 8 * LENGTH  # tokens compared; the training length where transformers goes no further
TEXT = "Ein Text, with çodes, 数字 12 345, tabs\t\tand  spaces — \U0001f600é\n\n  end" * 3
VOCABULARY = 320
RECORDED = pathlib.Path(__file__).parent / "imported.npz"
TOKENS = np.random.default_rng(0).integers(0, 300, (2, LIMIT))
SHOWN = slice(7, None, 16)  # the tokens whose logits are recorded
# Encoders read texts of L, 2 L and 8 L tokens in one batch, padded to the longest.
ENDS = np.array([LENGTH, 2 * LENGTH, LIMIT])
TEXTS = np.random.default_rng(1).integers(5, 300, (3, LIMIT))
VISIBLE = np.arange(LIMIT) < ENDS[:, None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model.

    Attributes:
      family: its name.
      peer: "transformers", or "NumPy float64".
      folder: a function that fills a folder, and returns the peer's function from tokens to
        logits.
      about: what differs from the family's default.
      exports: whether transformers loads what is exported.
      masked: whether the model predicts masked tokens.
    """

    family: str
    peer: str
    folder: Callable[[pathlib.Path], Callable[[np.ndarray], np.ndarray]]
    about: str
    exports: bool = True
    masked: bool = False

    @property
    def tokens(self) -> np.ndarray:
        """The tokens that are compared, [rows, LIMIT]."""
        return TEXTS if self.masked else TOKENS

    @property
    def visible(self) -> np.ndarray:
        """Which of them are no padding, [rows, LIMIT]."""
        return VISIBLE if self.masked else np.ones_like(TOKENS, bool)

    def __str__(self) -> str:
        return f"{self.family}-{self.about}".replace(" ", "-").replace(",", "")


SPECIAL = ["[SEP]", "[CLS]", "[MASK]", "[UNK]", "[PAD]"]


def save_tokenizer(folder: pathlib.Path, masked: bool = False) -> hf.Tokenizer:
    """Writes byte-level BPE with an end-of-text token, or with those of masked models, and returns it."""
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL if masked else ["</s>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if masked:
        tokenizer.post_processor = hf.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[SEP]", 0), ("[CLS]", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    about |= {"mask_token": "[MASK]"} if masked else {"eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer


def of_transformers(name: str, kind: str = "", **keys: Any) -> Callable[[pathlib.Path], Callable]:
    """Returns a function that makes a random model of `transformers`."""

    def make(folder: pathlib.Path) -> Callable[[np.ndarray], np.ndarray]:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{"vocab_size": VOCABULARY} | keys)
        how = {"attn_implementation": implementation(name.lower())}
        model = getattr(transformers, kind or f"{name}ForCausalLM")._from_config(config, **how)
        model.save_pretrained(folder)
        tensors = weights({name: x.shape for name, x in load_file(folder / WEIGHTS).items()})
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        # some names in files are others than the model's
        model, found = type(model).from_pretrained(folder, output_loading_info=True, **how)
        assert not found["unexpected_keys"]
        return transformers_logits(model.eval())

    return make


def jina(folder: pathlib.Path, name: str = "jina_bert", **options: Any) -> pathlib.Path:
    """Makes a work directory of a random jina-embeddings-v2 of one layer; the second layout has no head."""
    hub = folder / "hub"
    hub.mkdir()
    of_description(name, layers=1, heads=4)(hub)
    save_tokenizer(hub, masked=True)
    import_model(str(hub), folder / "run", Config(), **options)
    return folder / "run"


def weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Returns random tensors: matrices that keep the size of their input, norms about 1."""
    random, made = np.random.default_rng(0), {}
    for name, shape in sorted(shapes.items()):
        scale, center = (1.5 / shape[-1] ** 0.5, 0) if len(shape) > 1 else (0.2, 1)
        made[name] = scale * random.normal(size=shape) + center * name.endswith("weight")
    return {name: x.astype(np.float32) for name, x in made.items()}


def record() -> None:
    """Writes config.json, the tensors' shapes and the logits of each case of transformers."""
    content = {}
    for case in CASES:
        if case.peer == "transformers":
            with tempfile.TemporaryDirectory() as folder:
                logits = case.folder(pathlib.Path(folder))(case.tokens)
                config = json.loads(pathlib.Path(folder, "config.json").read_text())
                tensors = load_file(pathlib.Path(folder, WEIGHTS))
            about = {"config": config, "shapes": {name: x.shape for name, x in tensors.items()}}
            content |= {f"{case}/about": json.dumps(about), f"{case}/logits": logits[:, SHOWN]}
    np.savez_compressed(RECORDED, **content)


def recorded(case: Case, folder: pathlib.Path) -> np.ndarray:
    """Makes the folder of a recorded case; returns its logits at the tokens `SHOWN`."""
    with np.load(RECORDED) as file:
        about, logits = json.loads(str(file[f"{case}/about"])), file[f"{case}/logits"]
    (folder / "config.json").write_text(json.dumps(about["config"]))
    save_file(weights(about["shapes"]), folder / WEIGHTS)
    save_tokenizer(folder, case.masked)
    return logits


def unrounded(make: Callable[[pathlib.Path], Callable]) -> Callable[[pathlib.Path], Callable]:
    """Returns `make` for a Falcon whose bias m j, with m in bfloat16, is float32."""

    def made(folder: pathlib.Path) -> Callable[[np.ndarray], np.ndarray]:
        import torch
        from transformers.models.bloom import modeling_bloom
        from transformers.models.falcon import modeling_falcon

        logits, rounded = make(folder), modeling_falcon.build_alibi_tensor

        def bias(mask: Any, num_heads: int, dtype: Any) -> Any:
            one = modeling_bloom.build_alibi_tensor(mask[:, :2], num_heads, torch.float32)[..., 1:]
            return one.bfloat16().float() * torch.arange(mask.shape[1])

        def patched(tokens: np.ndarray) -> np.ndarray:
            modeling_falcon.build_alibi_tensor = bias
            try:
                return logits(tokens)
            finally:
                modeling_falcon.build_alibi_tensor = rounded

        return patched

    return made


def implementation(family: str) -> str:
    """Returns the attention of transformers that is compared: its eager one adds Falcon's bias
    twice (transformers 5.24, and issue 29946).
    """
    return "sdpa" if family == "falcon" else "eager"


def transformers_logits(model: Any) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    def logits(tokens: np.ndarray) -> np.ndarray:
        masks = {"attention_mask": torch.from_numpy(VISIBLE.astype(int))} if tokens is TEXTS else {}
        with torch.no_grad():
            return model(torch.from_numpy(tokens), **masks)[0].float().numpy()

    return logits


def of_description(name: str, **keys: Any) -> Callable[[pathlib.Path], Callable]:
    """Returns a function that makes a random model of `described`."""

    def make(folder: pathlib.Path) -> Callable[[np.ndarray], np.ndarray]:
        family = (DESCRIBED | ENCODERS)[name]
        config = family.config(vocab=VOCABULARY, length=LENGTH, **keys)
        tensors = family.tensors(config, 0)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors | family.buffers(config), folder / WEIGHTS)

        def logits(tokens: np.ndarray) -> np.ndarray:
            if name in DESCRIBED:
                return family.logits(config, tensors, tokens)
            # each text alone, so that no padding can matter
            rows = zip(tokens, ENDS, strict=True)
            alone = [family.logits(config, tensors, row[None, :end])[0] for row, end in rows]
            return np.stack([np.pad(row, ((0, LIMIT - len(row)), (0, 0))) for row in alone])

        return logits

    return make


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
}


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 2 * LENGTH,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4 * LENGTH}


def _cases() -> Iterator[Case]:
    made, said = "transformers", "NumPy float64"
    for heads in (8, 12, 40):
        sizes = {"hidden_size": 8 * heads, "n_layer": 2, "n_head": heads, "seq_length": LENGTH}
        yield Case("bloom", made, of_transformers("Bloom", **sizes), f"{heads} heads")
    for heads in (8, 12, 56):
        sizes = {"d_model": 8 * heads, "n_layers": 2, "n_heads": heads, "max_seq_len": LIMIT}
        yield Case("mpt", made, of_transformers("Mpt", **sizes), f"{heads} heads")
    clipped = {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}}
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 8, "max_seq_len": LIMIT}
    yield Case("mpt", made, of_transformers("Mpt", **sizes, **clipped), "clip_qkv, softmax_scale")
    falcon = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    rw = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    for heads in (8, 16):
        keys = falcon | rw | {"num_attention_heads": heads, "ffn_hidden_size": 256}
        # Beyond powers of two it rounds m j to bfloat16, so that far keys change places.
        about = f"RW, {heads} heads" + (", m j unrounded" if heads > 8 else "")
        make = of_transformers("Falcon", **keys)
        yield Case(
            "falcon", made, unrounded(make) if heads > 8 else make, about, exports=heads == 8
        )
    keys = falcon | {"num_attention_heads": 4, "ffn_hidden_size": 96}
    yield Case("falcon", made, of_transformers("Falcon", **keys), "7B, parallel, rotary")
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LIMIT}
    yield Case(
        "gpt2", made, of_transformers("GPT2", "GPT2LMHeadModel", **gpt2), "learned positions"
    )
    for name, heads, kv_heads, more in (
        ("Llama", 8, 2, {"attention_bias": True, "mlp_bias": True}),
        (
            "Llama",
            12,
            12,
            {"hidden_size": 96, "tie_word_embeddings": True, "rope_scaling": LLAMA_3},
        ),
        ("Mistral", 8, 4, {"sliding_window": 24}),
        ("Qwen2", 8, 2, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("Qwen3", 4, 2, {"head_dim": 32, "rope_scaling": YARN}),
        ("Gemma", 4, 1, {"head_dim": 32}),
        # with a large epsilon, whose key shows
        ("Olmo2", 8, 2, {"attention_bias": True, "rms_norm_eps": 0.1}),
        ("Starcoder2", 8, 2, {"sliding_window": 24, "norm_epsilon": 0.1}),
        ("StableLm", 8, 2, {"use_qkv_bias": True, "layer_norm_eps": 0.1}),
        ("StableLm", 4, 4, {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    ):
        keys = LLAMA | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | more
        about = f"{heads} heads, {kv_heads} of keys"
        about += f", {more['rope_scaling']['rope_type']}" if "rope_scaling" in more else ""
        yield Case(name.lower(), made, of_transformers(name, **keys), about)
    half = {"rotary_pct": 0.5, "rotary_emb_base": 500}
    for heads, about, more in (
        (8, "parallel", {"layer_norm_eps": 0.1}),
        (
            4,
            "one after the other",
            {"use_parallel_residual": False, "attention_bias": False} | half,
        ),
    ):
        keys = LLAMA | {"num_attention_heads": heads} | more
        yield Case("gpt_neox", made, of_transformers("GPTNeoX", **keys), about)
    for name, heads in (
        ("btlm", 8),
        ("jais", 12),
        ("baichuan", 40),
        ("baichuan2", 40),
        ("refact", 8),
        ("replit", 8),
    ):
        yield Case(name, said, of_description(name, heads=heads), f"{heads} heads", exports=False)
    full = {"attn_config": {"qk_ln": True, "clip_qkv": 0.7, "alibi_bias_max": 16}}
    mpt = of_description("mpt", heads=12, logit_scale="inv_sqrt_d_model", **full)
    yield Case("mpt", said, mpt, "qk_ln, clip_qkv, bias_max 16, logit_scale", exports=False)
    keys = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    keys |= {"num_attention_heads": 4, "max_position_embeddings": LIMIT}
    for kind, about, epsilon in (
        ("BertForMaskedLM", "masked tokens", 1e-12),
        ("BertModel", "without a head", 1e-2),  # large, so that each norm's shows
    ):
        make = of_transformers("Bert", kind, layer_norm_eps=epsilon, **keys)
        yield Case("bert", made, make, about, masked=True)
    for name, heads in (("mosaic_bert", 12), ("jina_bert", 8), ("jina_bert_qk", 8)):
        make = of_description(name, heads=heads)
        yield Case(name, said, make, f"{heads} heads", exports=False, masked=True)


CASES = tuple(_cases())


@dataclasses.dataclass(frozen=True)
class Differences:
    """The comparison of a case. Numbers are largest absolute differences.

    Attributes:
      logits, nll: at up to `LIMIT` tokens, float32.
      spread: the standard deviation of the peer's logits.
      tokens_equal: how many of 8 greedily generated tokens equal the peer's. A model of masked tokens has
        None.
      ids_equal: whether the tokenizer gives the ids of the folder's.
      exported_equal: whether tensors written again are equal bit for bit.
      exported_logits: transformers' with the exported folder, or None if it lacks the family.
    """

    logits: float
    nll: float
    spread: float
    tokens_equal: int | None
    ids_equal: bool
    exported_equal: bool
    exported_logits: float | None


def compare(case: Case, folder: pathlib.Path) -> Differences:
    """Makes the case's model in `folder`, imports it, exports it again, and compares."""
    hub, workdir, out = (folder / name for name in ("hub", "run", "out"))
    hub.mkdir(parents=True)
    peer = case.folder(hub)
    tokenizer = save_tokenizer(hub, case.masked)
    import_model(str(hub), workdir, Config())
    run = TrainedRun(workdir)
    tokens, expected = case.tokens, peer(case.tokens)
    ours = our_logits(run.config, run.model, run.params)
    expected, ours = expected[case.visible], ours[case.visible]
    targets = (tokens if case.masked else np.roll(tokens, -1, 1))[case.visible]
    nll, our_nll = (
        np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))
        + x.max(-1)
        - np.take_along_axis(x, targets[:, None] % x.shape[-1], -1)[:, 0]
        for x in (expected.astype(np.float64), ours.astype(np.float64))
    )
    alike = None if case.masked else _alike(run, peer)
    export_model(workdir, out)
    same = are_equal(hub, load_file(out / WEIGHTS))
    again = None
    if case.exports:
        import transformers

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            named = json.loads((out / "config.json").read_text())["architectures"][0]
            loaded = getattr(transformers, named).from_pretrained(
                out, attn_implementation=implementation(case.family)
            )
        found = transformers_logits(loaded.eval())(tokens)[case.visible]
        again = float(np.abs(found - expected).max())
    return Differences(
        logits=float(np.abs(ours - expected).max()),
        nll=float(np.abs(nll - our_nll).max()),
        spread=float(expected.std()),
        tokens_equal=alike,
        ids_equal=run.tokenizer.encode(TEXT).tolist()[:-1]
        == tokenizer.encode(TEXT, add_special_tokens=False).ids,
        exported_equal=same,
        exported_logits=again,
    )


def _alike(run: TrainedRun, peer: Callable[[np.ndarray], np.ndarray]) -> int:
    """Returns how many of 8 tokens that are generated greedily equal the peer's."""
    prompt, alike = TOKENS[:1, :LENGTH], 0
    generated = np.asarray(generate(run.model, run.params, prompt.astype(np.int32), 8))[0]
    following = prompt
    for token in generated[-8:]:
        best = peer(following)[0, -1].argmax()
        alike += int(best == token)
        following = np.append(following, [[best]], axis=1)
    return alike


def our_logits(config: Config, model: DecoderLM, params: PyTree) -> np.ndarray:
    """Returns the logits, or the last layer's output of a masked model without a head."""
    masked = not make_objective(config).causal
    method = "features" if masked and not config.model.masked_head else None
    apply = jax.jit(functools.partial(model.apply, method=method))
    tokens, segments = (TEXTS, {"segment_ids": 1 - VISIBLE.astype(int)}) if masked else (TOKENS, {})
    return np.asarray(apply({"params": params}, jnp.asarray(tokens, jnp.int32), **segments))


def are_equal(hub: pathlib.Path, after: dict[str, np.ndarray]) -> bool:
    """Returns whether exported tensors are those of the imported folder, without buffers and copies of a
    tied matrix.
    """
    before = load_file(hub / WEIGHTS)
    family = family_of(json.loads((hub / "config.json").read_text()), before)
    lost = {x for x in before.keys() - after.keys() if not re.fullmatch(family.buffers, x)}
    same = all(np.array_equal(after[name], before[name]) for name in after)
    return same and lost <= {"lm_head.weight", *family.tied}


def page(rows: list[tuple[Case, Differences]]) -> str:
    lines = [
        "# Imported models",
        "",
        "Random models of other families, imported by `scripts/import_hf.py`'s code and compared with "
        f"their own code in float32, at up to {LIMIT} tokens with L = {LENGTH} (L = {LIMIT} for MPT and GPT-2 of "
        "transformers, which go no further); written again by `scripts/export_hf.py`'s code. Encoders (bert and "
        f"below) read texts of {', '.join(map(str, ENDS))} tokens in one padded batch; their NLL is that of the "
        "token at its own place, and without a head their last layer's output is compared.",
        "",
        "    python -m tests.convert.imported results/imported/differences.md",
        "",
        f"JAX {jax.__version__} on a CPU ({platform.machine()}). Columns: largest differences of logits (whose "
        "standard deviation is in brackets) and of a token's NLL in nats; tokens of 8 generated greedily that are "
        "equal; ids of a text with many kinds of characters; tensors of the exported folder, bit for bit; logits of "
        "transformers with the exported folder.",
        "",
        "| family | model | compared with | logits | NLL | generated | ids | exported | loaded again |",
        "|:--|:--|:--|--:|--:|--:|:--|:--|--:|",
    ]
    for case, found in rows:
        again = "-" if found.exported_logits is None else f"{found.exported_logits:.0e}"
        words = ["equal" if same else "differ" for same in (found.ids_equal, found.exported_equal)]
        alike = "-" if found.tokens_equal is None else f"{found.tokens_equal} of 8"
        lines.append(
            f"| {case.family} | {case.about} | {case.peer} | {found.logits:.0e} ({found.spread:.1f}) | "
            f"{found.nll:.0e} | {alike} | {words[0]} | {words[1]} | {again} |"
        )
    return "\n".join(lines) + "\n"


def cost() -> str:
    """Returns a line about the import of a random BERT of base size, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        hub = pathlib.Path(folder, "hub")
        hub.mkdir()
        of_transformers("Bert", "BertModel", vocab_size=30522)(
            hub
        )  # its other defaults are the base's
        save_tokenizer(hub, masked=True)
        size = (hub / WEIGHTS).stat().st_size
        code = (
            "import re, sys, time\n"
            "from alibi.config import Config\n"
            "from alibi.convert.importing import import_model\n"
            "import jax; jax.devices()\n"
            # not getrusage, which begins with the peak of the process that started this one
            "most = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
            "before, begun = most(), time.perf_counter()\n"
            "import_model(sys.argv[1], sys.argv[2], Config())\n"
            "print(most() - before, time.perf_counter() - begun)\n"
        )
        words = [sys.executable, "-c", code, str(hub), f"{folder}/run"]
        printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    grown, seconds = map(float, printed.split())
    return (
        f"The import of a BERT of base size ({size / 1e9:.2f} GB in float32) grew the process by {grown / 1e9:.2f} GB "
        f"and took {seconds:.0f} s on {os.cpu_count()} cores, which other work used too."
    )


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if len(sys.argv) < 2:
        return record()
    if sys.argv[1] == "--cost":
        return print(cost())
    if len(sys.argv) > 2:
        folder = pathlib.Path(sys.argv[2])
        folder.mkdir(parents=True)
        recorded(next(case for case in CASES if str(case) == sys.argv[1]), folder)
        return None
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for case in CASES:
            rows.append((case, compare(case, pathlib.Path(folder, str(case)))))
            print(case, rows[-1][1], flush=True)
    pathlib.Path(sys.argv[1]).write_text(page(rows))
    return None


if __name__ == "__main__":
    main()
