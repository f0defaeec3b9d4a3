"""Encoders with symmetric ALiBi in NumPy float64, in the words of `described`.

Sources: mosaicml/examples and llm-foundry, bert_layers.py (MosaicBERT; DNABERT-2 has the same class);
jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm, modeling_bert.py, and their
readers in huggingface/text-embeddings-inference (jina.rs, jina_code.rs). Their configs were not seen
whole; the keys are those that the code reads.
"""

import numpy as np

from tests.convert.described import (
    Described,
    Shapes,
    Tensors,
    _blocks,
    _family,
    _gelu,
    _heads,
    _layer_norm,
    _linear,
    _random,
    paper_slopes,
)


def _config(layers: int, width: int, heads: int, vocab: int, length: int) -> dict:
    return {
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": 2 * width,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": length,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": vocab,
    }


def mosaic_config(*sizes: int) -> dict:
    return _config(*sizes) | {
        "architectures": ["BertForMaskedLM"],
        "alibi_starting_size": sizes[-1],
        "auto_map": {"AutoModelForMaskedLM": "bert_layers.BertForMaskedLM"},
        "position_embedding_type": "absolute",  # which the class doesn't read
    }


def jina_config(*sizes: int) -> dict:
    return _config(*sizes) | {
        "architectures": ["JinaBertForMaskedLM"],
        "attn_implementation": None,
        "emb_pooler": "mean",
        "feed_forward_type": "geglu",
        "layer_norm_eps": 1e-2,  # large, so that each norm's shows
        "model_max_length": sizes[-1],
        "position_embedding_type": "alibi",
    }


def _of_dense(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _of_norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _tensors(config: dict, block: Shapes, prefix: str, bias: str, seed: int) -> Tensors:
    """Draws the tensors of a model with these layers. Without a prefix it has a pooler, and no head."""
    width, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        f"{prefix}embeddings.word_embeddings.weight": (vocab, width),
        f"{prefix}embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
        **_of_norm(f"{prefix}embeddings.LayerNorm", width),
        **_blocks(f"{prefix}encoder.layer", config["num_hidden_layers"], block),
    }
    if prefix:
        shapes |= _of_dense("cls.predictions.transform.dense", width, width)
        shapes |= _of_norm("cls.predictions.transform.LayerNorm", width)
        shapes |= {bias: (vocab,)}
    else:
        shapes |= _of_dense("pooler.dense", width, width)
    return _random(shapes, seed)


def _mixed(width: int, inner: int) -> Shapes:
    return {
        **_of_dense("attention.output.dense", width, width),
        **_of_norm("attention.output.LayerNorm", width),
        "mlp.gated_layers.weight": (2 * inner, width),
        **_of_dense("mlp.wo", width, inner),
        **_of_norm("mlp.layernorm", width),
    }


def _separate(width: int) -> Shapes:
    names = ("query", "key", "value")
    return {k: v for n in names for k, v in _of_dense(f"attention.self.{n}", width, width).items()}


def mosaic_tensors(config: dict, seed: int) -> Tensors:
    width = config["hidden_size"]
    block = _of_dense("attention.self.Wqkv", 3 * width, width)
    block |= _mixed(width, config["intermediate_size"])
    return _tensors(config, block, "bert.", "cls.predictions.decoder.bias", seed)


def jina_tensors(config: dict, seed: int) -> Tensors:
    width = config["hidden_size"]
    block = _separate(width) | _mixed(width, config["intermediate_size"])
    return _tensors(config, block, "bert.", "cls.predictions.bias", seed)


def jina_qk_tensors(config: dict, seed: int) -> Tensors:
    """As the files of jina-embeddings-v2-base-code, which are those of the model alone."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    block = {
        **_separate(width),
        **_of_norm("attention.self.layer_norm_q", width),
        **_of_norm("attention.self.layer_norm_k", width),
        **_of_dense("attention.output.dense", width, width),
        **_of_norm("attention.output.LayerNorm", width),
        **_of_norm("layer_norm_1", width),
        "mlp.up_gated_layer.weight": (2 * inner, width),
        **_of_dense("mlp.down_layer", width, inner),
        **_of_norm("layer_norm_2", width),
    }
    return _tensors(config, block, "", "", seed)


def _symmetric(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int) -> np.ndarray:
    """Returns attention to both sides, with -m |i - j| added to the scaled products."""
    q, k, v = (_heads(x, x.shape[-1] // heads) for x in (q, k, v))
    places = np.arange(q.shape[2])
    distance = abs(places[:, None] - places)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores - paper_slopes(heads)[:, None, None] * distance
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Returns the head's logits, or without a head the last layer's output. There is no padding:
    all of `tokens` is text.
    """
    prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
    heads, inner = config["num_attention_heads"], config["intermediate_size"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return _layer_norm(x, tensors, name, config["layer_norm_eps"])

    table = tensors[f"{prefix}embeddings.word_embeddings.weight"]
    x = table[tokens] + tensors[f"{prefix}embeddings.token_type_embeddings.weight"][0]
    x = norm(x, f"{prefix}embeddings.LayerNorm")
    for n in range(config["num_hidden_layers"]):
        name = f"{prefix}encoder.layer.{n}"
        attends = f"{name}.attention.self"
        if f"{attends}.Wqkv.weight" in tensors:
            q, k, v = np.split(_linear(x, tensors, f"{attends}.Wqkv"), 3, -1)
        else:
            q, k, v = (_linear(x, tensors, f"{attends}.{s}") for s in ("query", "key", "value"))
        second = f"{name}.layer_norm_1.weight" in tensors
        if second:
            q, k = norm(q, f"{attends}.layer_norm_q"), norm(k, f"{attends}.layer_norm_k")
        y = _linear(_symmetric(q, k, v, heads), tensors, f"{name}.attention.output.dense")
        y = norm(y + x, f"{name}.attention.output.LayerNorm")
        if second:  # the input is added a second time
            y = norm(x + y, f"{name}.layer_norm_1")
            both = _linear(y, tensors, f"{name}.mlp.up_gated_layer")
            hidden = both[..., :inner] * _gelu(both[..., inner:])
            x = norm(y + _linear(hidden, tensors, f"{name}.mlp.down_layer"), f"{name}.layer_norm_2")
        else:
            both = _linear(y, tensors, f"{name}.mlp.gated_layers")
            hidden = _gelu(both[..., :inner]) * both[..., inner:]
            x = norm(_linear(hidden, tensors, f"{name}.mlp.wo") + y, f"{name}.mlp.layernorm")
    if not prefix:
        return x
    y = _gelu(_linear(x, tensors, "cls.predictions.transform.dense"))
    y = norm(y, "cls.predictions.transform.LayerNorm")
    bias = tensors.get("cls.predictions.bias", tensors.get("cls.predictions.decoder.bias"))
    return y @ table.T + bias


def _buffers(config: dict) -> Tensors:
    """Returns a buffer that earlier files hold."""
    return {"embeddings.position_ids": np.arange(config["max_position_embeddings"])[None]}


ENCODERS: dict[str, Described] = {
    "mosaic_bert": _family(mosaic_config, mosaic_tensors, logits),
    "jina_bert": _family(jina_config, jina_tensors, logits),
    "jina_bert_qk": _family(jina_config, jina_qk_tensors, logits, _buffers),
}
