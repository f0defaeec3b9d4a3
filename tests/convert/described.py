"""Language models with ALiBi that `transformers` lacks or has in part, in NumPy float64.

Each family is written from its public code and imports nothing of this project, so that imported
models can be compared with it. `tensors` and `logits` follow the config's keys; a value they do
not implement is a `ValueError`. Dropout and the scale of an embedding's gradient
(`embedding_fraction`) have no effect on logits and are not read. They were compared with
transformers 5.24 within 1e-5: with MPT itself and with normed queries and keys put into it, with
LLaMA with another mask or other norms, and with GPT-2 with SwiGLU.

Sources: each public function names repository and file. The values in the configs of BTLM, Jais
and Refact are made up; their keys are those that the named code reads.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Described:
    """One family.

    - `config(layers, width, heads, vocab, length, **changes)`: a small config.json. The width is
      8 per head unless given. `changes` replaces keys; a dict is merged into the dict it replaces.
    - `tensors(config, seed)`: random float32 tensors with the names and shapes of the hub's files.
    - `logits(config, tensors, tokens)`: float64 [batch, length, vocabulary].
    - `buffers(config)`: tensors without parameters that some files also hold.
    """

    config: Callable[..., dict]
    tensors: Callable[[dict, int], Tensors]
    logits: Callable[[dict, Tensors, np.ndarray], np.ndarray]
    buffers: Callable[[dict], Tensors]


# Parts.


def paper_slopes(heads: int) -> np.ndarray:
    """Returns ALiBi's slopes: 2^(-8h / heads), h from 1 on, for a power of two.

    Other counts take those of the power of two below, then every second slope of twice that power.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * power, 2) / power)])[:heads]


def mpt_slopes(heads: int, bias_max: float = 8) -> np.ndarray:
    """Returns MPT's slopes (mosaicml/llm-foundry, llmfoundry/models/layers/attention.py).

    They are 2^(-bias_max h / n) for the power of two n at or above `heads`; fewer heads than n
    take every second slope from the second on, then the rest from the first on.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-bias_max * np.arange(1, power + 1) / power)
    if power != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return slopes


def _layer_norm(x: np.ndarray, tensors: Tensors, name: str, epsilon: float) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * tensors[f"{name}.weight"] + tensors.get(f"{name}.bias", 0.0)


def _rms_norm(x: np.ndarray, tensors: Tensors, name: str, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * tensors[f"{name}.weight"]


def _linear(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
    """Multiplies by a matrix stored [out, in]."""
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def _conv1d(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
    """Multiplies by a matrix stored [in, out], as GPT-2 does."""
    return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def _heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Splits [batch, length, width] into [batch, heads, length, head_dim]."""
    return x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2)


def _attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, slopes: np.ndarray
) -> np.ndarray:
    """Returns causal attention as [batch, length, width], from inputs split into heads.

    Consecutive query heads share a key head where there are fewer of those. The bias
    -slope (i - j) comes after the scale.
    """
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    distance = np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])
    scores = q @ k.swapaxes(-1, -2) * scale
    scores = np.where(distance >= 0, scores - slopes[:, None, None] * distance, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def _blocks(prefix: str, layers: int, block: Shapes) -> Shapes:
    return {f"{prefix}.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}


def _random(shapes: Shapes, seed: int, inputs_first: bool = False) -> Tensors:
    """Draws norm weights near 1, biases of 0.3, and matrices that double a normed input."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in shapes.items():
        fan_in = shape[0 if inputs_first and "wte" not in name else -1]
        mean, deviation = (1, 0.2) if len(shape) == 1 else (0, 2 / math.sqrt(fan_in))
        if name.endswith(".bias"):
            mean, deviation = 0, 0.3
        drawn[name] = (mean + deviation * rng.normal(size=shape)).astype(np.float32)
    return drawn


def _require(config: dict, **values) -> None:
    """Raises a `ValueError` for a key that is there with another value."""
    for key, value in values.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]!r} is not described here, only {value!r}")


def _family(
    template: Callable[..., dict],
    tensors: Callable[[dict, int], Tensors],
    logits: Callable[[dict, Tensors, np.ndarray], np.ndarray],
    buffers: Callable[[dict], Tensors] = lambda config: {},
) -> Described:
    """Gives the template of a config its default sizes and changes, and `logits` float64."""

    def config(layers=2, width=None, heads=8, vocab=96, length=32, **changes) -> dict:
        made = template(layers, width or 8 * heads, heads, vocab, length)
        for key, value in changes.items():
            merge = isinstance(value, dict) and isinstance(made.get(key), dict)
            made[key] = made[key] | value if merge else value
        return made

    def float64_logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
        return logits(config, {name: x.astype(np.float64) for name, x in tensors.items()}, tokens)

    return Described(config, tensors, float64_logits, buffers)


# BTLM and Jais.


def gpt2_keys(layers: int, width: int, heads: int, vocab: int, length: int) -> dict:
    """Returns the keys that BTLM and Jais share (vllm-project/vllm,
    vllm/transformers_utils/configs/jais.py, and the defaults of GPT-2 in `transformers`).

    The files of the hub were not seen: other keys of theirs are unknown.
    """
    return {
        "activation_function": "swiglu",
        "alibi_scaling": None,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "embd_pdrop": 0.0,
        "eos_token_id": 0,
        "initializer_range": 0.073,
        "layer_norm_epsilon": 1e-05,
        "n_embd": width,
        "n_head": heads,
        "n_inner": 8 * width // 3,
        "n_layer": layers,
        "n_positions": length,
        "pad_token_id": 0,
        "position_embedding_type": "alibi",
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "torch_dtype": "float32",
        "transformers_version": "4.30.0",
        "use_cache": True,
        "vocab_size": vocab,
    }


def btlm_config(*sizes: int) -> dict:
    """Returns a config of BTLM, whose keys of muP begin with `mup_` (Cerebras/modelzoo, the
    converter of BTLM's config; the README of cerebras/btlm-3b-8k-base names the four of muP).
    """
    return gpt2_keys(*sizes) | {
        "architectures": ["BTLMLMHeadModel"],
        "auto_map": {
            "AutoConfig": "configuration_btlm.BTLMConfig",
            "AutoModel": "modeling_btlm.BTLMModel",
            "AutoModelForCausalLM": "modeling_btlm.BTLMLMHeadModel",
        },
        "model_type": "btlm",
        "mup_embeddings_scale": 14.6,
        "mup_output_alpha": 2.2,
        "mup_scale_qk_dot_by_d": True,
        "mup_width_scale": 0.4,
    }


def jais_config(*sizes: int) -> dict:
    """Returns a config of Jais-13B, whose keys of muP have older names (vllm-project/vllm,
    vllm/model_executor/models/jais.py; later models of the family use those of `btlm_config`).
    """
    return gpt2_keys(*sizes) | {
        "architectures": ["JAISLMHeadModel"],
        "auto_map": {
            "AutoConfig": "configuration_jais.JAISConfig",
            "AutoModel": "modeling_jais.JAISModel",
            "AutoModelForCausalLM": "modeling_jais.JAISLMHeadModel",
        },
        "embeddings_scale": 14.6,
        "model_type": "jais",
        "scale_qk_dot_by_d": True,
        "width_scale": 0.9,
    }


def gpt2_tensors(config: dict, seed: int) -> Tensors:
    """Returns tensors of BTLM or Jais (vllm-project/vllm, vllm/model_executor/models/jais.py).

    Files hold the slopes, [heads, 1], as a parameter that is not trained.
    """
    width, inner = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    sizes = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    sizes |= {"mlp.c_fc": (width, inner), "mlp.c_fc2": (width, inner), "mlp.c_proj": (inner, width)}
    block = {f"{name}.{part}": (width,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    for name, shape in sizes.items():
        block |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
    shapes = {"transformer.wte.weight": (config["vocab_size"], width)}
    shapes |= _blocks("transformer.h", config["n_layer"], block)
    shapes |= {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
    slopes = paper_slopes(config["n_head"]).astype(np.float32)[:, None]
    return _random(shapes, seed, inputs_first=True) | {"transformer.relative_pe.slopes": slopes}


def gpt2_buffers(config: dict) -> Tensors:
    """Returns the masks that files of GPT-2 can hold, which vLLM skips in files of Jais."""
    length = config["n_positions"]
    block = {
        "attn.bias": np.tril(np.ones((1, 1, length, length), np.uint8)),
        "attn.masked_bias": np.float32(-10000.0),
    }
    return {
        f"transformer.h.{n}.{name}": np.asarray(x)
        for n in range(config["n_layer"])
        for name, x in block.items()
    }


def mup_scales(config: dict) -> tuple[float, float, float]:
    """Returns the factors of embeddings and logits, and the power of 1 / head_dim in attention.

    Source: vllm-project/vllm, vllm/model_executor/models/jais.py. Absent keys are 1, 1 and 1/2,
    the defaults of its JAISConfig.
    """
    embedding = config.get("embeddings_scale", config.get("mup_embeddings_scale", 1.0))
    output = config.get("mup_output_alpha", 1.0) * config.get("mup_width_scale", 1.0)
    by_dim = config.get("scale_qk_dot_by_d", config.get("mup_scale_qk_dot_by_d", False))
    return embedding, config.get("width_scale", output), 1.0 if by_dim else 0.5


def gpt2_logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of BTLM or Jais (vllm-project/vllm, vllm/model_executor/models/jais.py).

    `c_fc2` is the gate of SwiGLU. The head is tied to the embedding, whose factor it does not
    share.
    """
    _require(config, activation_function="swiglu", position_embedding_type="alibi")
    _require(config, scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True)
    _require(config, tie_word_embeddings=True, alibi_scaling=None)
    epsilon, head_dim = config["layer_norm_epsilon"], config["n_embd"] // config["n_head"]
    embedding_scale, logits_scale, power = mup_scales(config)
    slopes = paper_slopes(config["n_head"])
    table = tensors["transformer.wte.weight"]
    x = table[tokens] * embedding_scale
    for n in range(config["n_layer"]):
        name = f"transformer.h.{n}"
        y = _layer_norm(x, tensors, f"{name}.ln_1", epsilon)
        qkv = np.split(_conv1d(y, tensors, f"{name}.attn.c_attn"), 3, -1)
        y = _attention(*(_heads(y, head_dim) for y in qkv), head_dim**-power, slopes)
        x = x + _conv1d(y, tensors, f"{name}.attn.c_proj")
        y = _layer_norm(x, tensors, f"{name}.ln_2", epsilon)
        gate = _silu(_conv1d(y, tensors, f"{name}.mlp.c_fc2"))
        x = x + _conv1d(
            gate * _conv1d(y, tensors, f"{name}.mlp.c_fc"), tensors, f"{name}.mlp.c_proj"
        )
    return _layer_norm(x, tensors, "transformer.ln_f", epsilon) @ table.T * logits_scale


# Baichuan.


def baichuan_config(layers: int, width: int, heads: int, vocab: int, length: int) -> dict:
    """Returns a config of Baichuan-13B (keys as in a config.json of it, shown in the README of a
    model tuned from it, DISC-FinLLM). A 7B model's has `max_position_embeddings`, and it is rotary.
    """
    return {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_baichuan.BaichuanConfig",
            "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": 8 * width // 3,
        "model_max_length": length,
        "model_type": "baichuan",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.29.2",
        "use_cache": True,
        "vocab_size": vocab,
    }


def baichuan2_config(*sizes: int) -> dict:
    """Returns a config of Baichuan2-13B: that of Baichuan-13B and `z_loss_weight`.

    The real vocabularies are 64,000 and 125,696; loaders tell 1 and 2 by them (vLLM,
    TensorRT-LLM), which a small model cannot.
    """
    return baichuan_config(*sizes) | {"z_loss_weight": 0}


def baichuan_tensors(config: dict, seed: int) -> Tensors:
    """Returns tensors of any Baichuan (vllm-project/vllm, vllm/model_executor/models/baichuan.py;
    a copy of modeling_baichuan.py of Baichuan2-13B).
    """
    width, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    block = {
        "input_layernorm.weight": (width,),
        "self_attn.W_pack.weight": (3 * width, width),
        "self_attn.o_proj.weight": (width, width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    shapes = {"model.embed_tokens.weight": (vocab, width)}
    shapes |= _blocks("model.layers", config["num_hidden_layers"], block)
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    return _random(shapes, seed)


def baichuan_logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of any Baichuan (the sources of `baichuan_tensors`).

    Baichuan 2 divides each row of the head by its norm, which is at least 1e-12.
    """
    _require(config, hidden_act="silu", tie_word_embeddings=False)
    heads, epsilon = config["num_attention_heads"], config["rms_norm_eps"]
    head_dim = config["hidden_size"] // heads
    x = tensors["model.embed_tokens.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        name = f"model.layers.{n}"
        y = _rms_norm(x, tensors, f"{name}.input_layernorm", epsilon)
        packed = np.split(_linear(y, tensors, f"{name}.self_attn.W_pack"), 3, -1)
        q, k, v = (_heads(y, head_dim) for y in packed)
        y = _attention(q, k, v, head_dim**-0.5, paper_slopes(heads))
        x = x + _linear(y, tensors, f"{name}.self_attn.o_proj")
        y = _rms_norm(x, tensors, f"{name}.post_attention_layernorm", epsilon)
        gate = _silu(_linear(y, tensors, f"{name}.mlp.gate_proj"))
        x = x + _linear(
            gate * _linear(y, tensors, f"{name}.mlp.up_proj"), tensors, f"{name}.mlp.down_proj"
        )
    head = tensors["lm_head.weight"]
    if "z_loss_weight" in config:
        head = head / np.maximum(np.linalg.norm(head, axis=1, keepdims=True), 1e-12)
    return _rms_norm(x, tensors, "model.norm", epsilon) @ head.T


# Refact.


def refact_config(layers: int, width: int, heads: int, vocab: int, length: int) -> dict:
    """Returns a config of Refact-1.6B: the keys that ggml-org/llama.cpp
    (convert_hf_to_gguf.py, RefactModel) and a port of its modeling code to MLX read, and those of
    GPTBigCode in `transformers`, from which it derives. The hub's file was not seen.
    """
    return {
        "architectures": ["GPTRefactForCausalLM"],
        "attention_bias_in_fp32": True,
        "attention_softmax_in_fp32": True,
        "attn_pdrop": 0.1,
        "auto_map": {
            "AutoConfig": "configuration_gpt_refact.GPTRefactConfig",
            "AutoModelForCausalLM": "modeling_gpt_refact.GPTRefactForCausalLM",
        },
        "bos_token_id": -1,
        "embd_pdrop": 0.1,
        "eos_token_id": 0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt_refact",
        "multi_query": True,
        "n_embd": width,
        "n_head": heads,
        "n_inner": None,
        "n_layer": layers,
        "n_positions": length,
        "resid_pdrop": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "vocab_size": vocab,
    }


def refact_inner(config: dict) -> int:
    """Returns the width between SwiGLU's matrices: two thirds of 4 widths (or of `n_inner`),
    rounded up to a multiple of 256.
    """
    return 256 * math.ceil(int(2 * (config["n_inner"] or 4 * config["n_embd"]) / 3) / 256)


def refact_tensors(config: dict, seed: int) -> Tensors:
    """Returns tensors of Refact (ggml-org/llama.cpp, convert_hf_to_gguf.py, RefactModel;
    vllm-project/vllm has the same model).

    `kv` is [key; value] of one head, `gate_up_proj` is [gate; up]. `ln_f` and `lm_head` stand
    outside `transformer` in the modeling code.
    """
    width, inner, vocab = config["n_embd"], refact_inner(config), config["vocab_size"]
    block = {
        "ln_1.weight": (width,),
        "attn.q.weight": (width, width),
        "attn.kv.weight": (2 * width // config["n_head"], width),
        "attn.c_proj.weight": (width, width),
        "ln_2.weight": (width,),
        "mlp.gate_up_proj.weight": (2 * inner, width),
        "mlp.c_proj.weight": (width, inner),
    }
    shapes = {"transformer.wte.weight": (vocab, width)}
    shapes |= _blocks("transformer.h", config["n_layer"], block)
    return _random(shapes | {"ln_f.weight": (width,), "lm_head.weight": (vocab, width)}, seed)


def refact_logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of Refact (the sources of `refact_tensors`).

    The norms subtract the mean, as the model card says; llama.cpp takes RMS norms. The head is
    not tied: 1.59 billion parameters with it, 1.49 without.
    """
    _require(config, multi_query=True, scale_attn_weights=True)
    heads, epsilon = config["n_head"], config["layer_norm_epsilon"]
    head_dim = config["n_embd"] // heads
    x = tensors["transformer.wte.weight"][tokens]
    for n in range(config["n_layer"]):
        name = f"transformer.h.{n}"
        y = _layer_norm(x, tensors, f"{name}.ln_1", epsilon)
        k, v = np.split(_linear(y, tensors, f"{name}.attn.kv"), 2, -1)
        qkv = (_linear(y, tensors, f"{name}.attn.q"), k, v)
        y = _attention(*(_heads(y, head_dim) for y in qkv), head_dim**-0.5, paper_slopes(heads))
        x = x + _linear(y, tensors, f"{name}.attn.c_proj")
        y = _layer_norm(x, tensors, f"{name}.ln_2", epsilon)
        gate, up = np.split(_linear(y, tensors, f"{name}.mlp.gate_up_proj"), 2, -1)
        x = x + _linear(_silu(gate) * up, tensors, f"{name}.mlp.c_proj")
    return _linear(_layer_norm(x, tensors, "ln_f", epsilon), tensors, "lm_head")


# MPT and Replit.


def mpt_config(layers: int, width: int, heads: int, vocab: int, length: int) -> dict:
    """Returns a config of MPT with the keys of mpt-7b and of replit/ReplitLM,
    replit-code-v1-3b/config.json. `learned_pos_emb` true has no effect beside ALiBi.
    """
    return {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "auto_map": {
            "AutoConfig": "configuration_mpt.MPTConfig",
            "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
        },
        "d_model": width,
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_config": {
            "emb_init_std": None,
            "emb_init_uniform_lim": None,
            "fan_mode": "fan_in",
            "init_div_is_residual": True,
            "init_gain": 0,
            "init_nonlinearity": "relu",
            "init_std": 0.02,
            "name": "kaiming_normal_",
            "verbose": 0,
        },
        "init_device": "cpu",
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": length,
        "model_type": "mpt",
        "n_heads": heads,
        "n_layers": layers,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1",
        "use_cache": False,
        "verbose": 0,
        "vocab_size": vocab,
    }


def replit_config(layers: int, width: int, heads: int, vocab: int, length: int) -> dict:
    """Returns a flat config of Replit code v1, the first form of replit/ReplitLM,
    replit-code-v1-3b/config.json. Later revisions have the form of `mpt_config` and MPT's names.
    """
    return {
        "alibi": True,
        "alibi_bias_max": 8,
        "architectures": ["ReplitLM"],
        "attn_clip_qkv": None,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_qk_ln": False,
        "attn_uses_sequence_id": False,
        "auto_map": {
            "AutoConfig": "configuration_replit_lm.ReplitLMConfig",
            "AutoModelForCausalLM": "replit_lm.ReplitLM",
        },
        "d_model": width,
        "emb_init_std": None,
        "emb_init_uniform_lim": None,
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "fan_mode": "fan_in",
        "init_device": "cpu",
        "init_div_is_residual": True,
        "init_gain": 0,
        "init_nonlinearity": "relu",
        "init_std": 0.02,
        "logit_scale": None,
        "low_precision_layernorm": True,
        "max_seq_len": length,
        "mlp_ratio": 4,
        "model_type": "replit_lm",
        "n_heads": heads,
        "n_layers": layers,
        "no_bias": True,
        "param_init_fn": "kaiming_normal_",
        "prefix_lm": False,
        "resid_pdrop": 0,
        "softmax_scale": None,
        "tokenizer_name": "replit/replit-code-v1-3b",
        "torch_dtype": "float32",
        "transformers_version": "4.26.1",
        "use_cache": False,
        "verbose": 0,
        "vocab_size": vocab,
    }


# The names of ReplitLM for those of MPT (replit/ReplitLM, gpt_blocks.py and replit_lm.py).
REPLIT_NAMES = {
    ".norm_1.": ".ln_1.",
    ".norm_2.": ".ln_2.",
    ".norm_f.": ".ln_f.",
    ".ffn.up_proj.": ".mlp.mlp_up.",
    ".ffn.down_proj.": ".mlp.mlp_down.",
}


def nested(config: dict) -> dict:
    """Returns a flat config in the form of MPT's; a nested one as it is.

    Source: mosaicml/llm-foundry, scripts/inference/convert_composer_to_hf.py.
    """
    if "attn_config" in config:
        return config
    flat = ("alibi", "alibi_bias_max", "prefix_lm", "softmax_scale")
    attention = {key: config[key] for key in flat}
    attention |= {"clip_qkv": config["attn_clip_qkv"], "qk_ln": config["attn_qk_ln"]}
    return config | {"attn_config": attention, "expansion_ratio": config["mlp_ratio"]}


def mpt_tensors(config: dict, seed: int) -> Tensors:
    """Returns tensors of MPT (mosaicml/llm-foundry, llmfoundry/models/layers/blocks.py,
    attention.py and ffn.py, llmfoundry/models/mpt/modeling_mpt.py).

    Wqkv is [query; key; value]. The norms of `qk_ln` span all heads.
    """
    config = nested(config)
    attention, width, vocab = config["attn_config"], config["d_model"], config["vocab_size"]
    inner = int(config["expansion_ratio"] * width)
    block = {"norm_1": (width,), "attn.Wqkv": (3 * width, width)}
    if attention.get("qk_ln"):
        block |= {"attn.q_ln": (width,), "attn.k_ln": (width,)}
    block |= {"attn.out_proj": (width, width), "norm_2": (width,)}
    block |= {"ffn.up_proj": (inner, width), "ffn.down_proj": (width, inner)}
    shapes = {"transformer.wte": (vocab, width)}
    shapes |= _blocks("transformer.blocks", config["n_layers"], block)
    shapes |= {"transformer.norm_f": (width,)}
    return _random({f"{name}.weight": shape for name, shape in shapes.items()}, seed)


def _renamed(tensors: Tensors, parts: dict[str, str]) -> Tensors:
    renamed = {}
    for name, x in tensors.items():
        for old, new in parts.items():
            name = name.replace(old, new)
        renamed[name] = x
    return renamed


def replit_tensors(config: dict, seed: int) -> Tensors:
    """Returns tensors of Replit code v1 under the names of its flat form."""
    return _renamed(mpt_tensors(config, seed), REPLIT_NAMES)


def mpt_logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of MPT (the sources of `mpt_tensors`).

    `clip_qkv` clips before `qk_ln` norms queries and keys, by layer norm whatever `norm_type` is.
    `logit_scale` may be "inv_sqrt_d_model". All norms have an epsilon of 1e-5, the default
    of `norm_eps`.

    `transformers` 5.24 reads only `clip_qkv` and `softmax_scale` of these options. Its slopes are
    those of `alibi_bias_max` 8, and its hidden width is 4 d_model.
    """
    config = nested(config)
    attention, width, heads = config["attn_config"], config["d_model"], config["n_heads"]
    _require(attention, alibi=True, prefix_lm=False, softmax_scale=None)
    _require(config, no_bias=True, norm_type="low_precision_layernorm")
    epsilon, head_dim = 1e-5, width // heads
    slopes = mpt_slopes(heads, attention["alibi_bias_max"])
    x = tensors["transformer.wte.weight"][tokens]
    for n in range(config["n_layers"]):
        name = f"transformer.blocks.{n}"
        y = _layer_norm(x, tensors, f"{name}.norm_1", epsilon)
        y = _linear(y, tensors, f"{name}.attn.Wqkv")
        if attention.get("clip_qkv"):
            y = np.clip(y, -attention["clip_qkv"], attention["clip_qkv"])
        q, k, v = np.split(y, 3, -1)
        if attention.get("qk_ln"):
            q = _layer_norm(q, tensors, f"{name}.attn.q_ln", epsilon)
            k = _layer_norm(k, tensors, f"{name}.attn.k_ln", epsilon)
        y = _attention(*(_heads(y, head_dim) for y in (q, k, v)), head_dim**-0.5, slopes)
        x = x + _linear(y, tensors, f"{name}.attn.out_proj")
        y = _layer_norm(x, tensors, f"{name}.norm_2", epsilon)
        y = _gelu(_linear(y, tensors, f"{name}.ffn.up_proj"))
        x = x + _linear(y, tensors, f"{name}.ffn.down_proj")
    factor = {None: 1.0, "inv_sqrt_d_model": width**-0.5}[config["logit_scale"]]
    x = _layer_norm(x, tensors, "transformer.norm_f", epsilon)
    return x @ tensors["transformer.wte.weight"].T * factor


def replit_logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of Replit code v1 from tensors under the names of its flat form."""
    mpt_names = {replit: mpt for mpt, replit in REPLIT_NAMES.items()}
    return mpt_logits(config, _renamed(tensors, mpt_names), tokens)


FAMILIES = {
    "btlm": _family(btlm_config, gpt2_tensors, gpt2_logits, gpt2_buffers),
    "jais": _family(jais_config, gpt2_tensors, gpt2_logits, gpt2_buffers),
    "baichuan": _family(baichuan_config, baichuan_tensors, baichuan_logits),
    "baichuan2": _family(baichuan2_config, baichuan_tensors, baichuan_logits),
    "refact": _family(refact_config, refact_tensors, refact_logits),
    "mpt": _family(mpt_config, mpt_tensors, mpt_logits),
    "replit": _family(replit_config, replit_tensors, replit_logits),
}
