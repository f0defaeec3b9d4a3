"""The NumPy models of `described.py` against `transformers`, where it has the same model or parts
of which one can be put together.
"""

import functools

import numpy as np
import pytest
from described import FAMILIES, mpt_slopes, paper_slopes

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the project: --extra=torch")
transformers = pytest.importorskip("transformers", reason="not a requirement of the project")

HEADS = (8, 12, 40)
LENGTH = 24
TOKENS = np.random.default_rng(0).integers(0, 96, (2, LENGTH))
# float64 on both sides; `transformers` rounds slopes, angles and softmax's input to float32.
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def one_thread():
    """Products as small as these wait for each other's threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loaded(model, tensors: dict[str, np.ndarray]):
    """Returns a model in float64 with the tensors, each of which it must have."""
    missing, unexpected = model.double().load_state_dict(
        {name: torch.from_numpy(x).double() for name, x in tensors.items()}, strict=False
    )
    assert not unexpected
    assert {name for name in missing if not name.endswith(".attn.bias")} <= {"lm_head.weight"}
    return model.eval()


def logits(model, **inputs) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS), **inputs).logits.numpy()


def alibi_mask(slopes: np.ndarray):
    """Returns ALiBi's bias and the causal mask, [1, heads, length, length]."""
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    mask = np.where(distance >= 0, -slopes[:, None, None] * distance, np.finfo(np.float32).min)
    return torch.from_numpy(mask[None])


# Slopes.


@pytest.mark.parametrize("heads", [1, 8, 12, 32, 40, 56])
def test_slopes_are_those_of_bloom_and_of_mpt(heads):
    bloom = transformers.models.bloom.modeling_bloom.build_alibi_tensor(
        torch.ones(1, 2), heads, torch.float32
    )
    np.testing.assert_allclose(paper_slopes(heads), bloom[:, 0, 1], rtol=1e-6)
    mpt = transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor(heads, 2, 16)
    np.testing.assert_allclose(mpt_slopes(heads, 16), -mpt[:, 0, 0], rtol=1e-6)


# MPT.


def mpt_model(config: dict, tensors: dict[str, np.ndarray]):
    own = {key: x for key, x in config.items() if key not in ("auto_map", "torch_dtype")}
    model = transformers.MptForCausalLM(transformers.MptConfig(**own))
    # The model calls it without the config's number, and takes slopes of 8.
    model.transformer.build_mpt_alibi_tensor = functools.partial(
        transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor,
        alibi_bias_max=config["attn_config"]["alibi_bias_max"],
    )
    return loaded(model, tensors)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "attention",
    [{}, {"alibi_bias_max": 16, "clip_qkv": 1.5}, {"softmax_scale": 0.1}],
    ids=["plain", "clipped", "scaled"],
)
def test_mpt_is_that_of_transformers(heads, attention):
    family = FAMILIES["mpt"]
    config = family.config(heads=heads, attn_config=attention)
    tensors = family.tensors(config, 1)
    expected = logits(mpt_model(config, tensors))
    np.testing.assert_allclose(family.logits(config, tensors, TOKENS), expected, **CLOSE)


def test_queries_and_keys_are_normed_over_all_heads_and_logits_scaled():
    family = FAMILIES["mpt"]
    config = family.config(
        heads=12, attn_config={"qk_ln": True}, logit_scale="inv_sqrt_d_model", layers=1
    )
    tensors = family.tensors(config, 2)
    norms = {name: x for name, x in tensors.items() if "_ln." in name}
    assert len(norms) == 2
    model = mpt_model(config, {name: x for name, x in tensors.items() if name not in norms})

    def normed(module, inputs, output):
        q, k, v = output.chunk(3, -1)
        weights = [torch.from_numpy(x).double() for x in norms.values()]
        sized = [
            torch.nn.functional.layer_norm(x, x.shape[-1:], weight)
            for x, weight in zip((q, k), weights, strict=True)
        ]
        return torch.cat([*sized, v], -1)

    model.transformer.blocks[0].attn.Wqkv.register_forward_hook(normed)
    expected = logits(model) / np.sqrt(config["d_model"])
    np.testing.assert_allclose(family.logits(config, tensors, TOKENS), expected, **CLOSE)


def test_grouped_keys_are_those_of_all_heads_repeated():
    family = FAMILIES["replit15"]
    config = family.config(heads=12)
    tensors = family.tensors(config, 3)
    full, kept = FAMILIES["mpt"].config(heads=12), 3 * 8
    repeated = dict(tensors)
    for name in (name for name in tensors if "Wqkv" in name):
        assert tensors[name].shape == (96 + 2 * kept, 96)
        q, k, v = np.split(tensors[name], [96, 96 + kept])
        k, v = (np.repeat(x.reshape(3, 8, 96), 4, axis=0).reshape(96, 96) for x in (k, v))
        repeated[name] = np.concatenate([q, k, v])
    np.testing.assert_allclose(
        family.logits(config, tensors, TOKENS), logits(mpt_model(full, repeated)), **CLOSE
    )


def test_a_flat_config_is_the_nested_one_under_other_names():
    family, nested = FAMILIES["replit"], FAMILIES["mpt"]
    config, same = family.config(attn_clip_qkv=1.0), nested.config(attn_config={"clip_qkv": 1.0})
    tensors = family.tensors(config, 4)
    assert "transformer.blocks.1.mlp.mlp_down.weight" in tensors
    np.testing.assert_array_equal(
        family.logits(config, tensors, TOKENS),
        nested.logits(same, nested.tensors(same, 4), TOKENS),
    )


def test_biases_and_learned_positions_change_logits():
    family = FAMILIES["mpt"]
    config = family.config(no_bias=False, attn_config={"alibi": False})
    tensors = family.tensors(config, 5)
    assert "transformer.blocks.0.norm_1.bias" in tensors
    first = family.logits(config, tensors, TOKENS)
    for name in ("transformer.blocks.0.ffn.up_proj.bias", "transformer.wpe.weight"):
        changed = family.logits(config, tensors | {name: 0 * tensors[name]}, TOKENS)
        assert np.abs(changed - first).max() > 0.01


# Baichuan.


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", ["baichuan", "baichuan2"])
@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", "alibi"])
def test_baichuan_is_llama(family, heads, rotary):
    """With all positions zero LLaMA does not rotate, and its mask takes the bias."""
    family, second = FAMILIES[family], family == "baichuan2"
    changes = {"max_position_embeddings": LENGTH} if rotary else {}
    config = family.config(heads=heads, **changes)
    tensors = family.tensors(config, 6)
    assert len(family.buffers(config)) == (2 if rotary else 0)

    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    same += ("rms_norm_eps", "vocab_size")
    llama_config = transformers.LlamaConfig(**{key: config[key] for key in same})
    llama_config._attn_implementation = "eager"
    renamed = {}
    for name, x in tensors.items():
        if "W_pack" in name:
            for kind, part in zip("qkv", np.split(x, 3), strict=True):
                renamed[name.replace("W_pack", f"{kind}_proj")] = part
        else:
            renamed[name] = x
    if second:
        head = torch.from_numpy(tensors["lm_head.weight"]).double()
        renamed["lm_head.weight"] = torch.nn.functional.normalize(head).numpy()
    model = loaded(transformers.LlamaForCausalLM(llama_config), renamed)
    inputs = {}
    if not rotary:
        inputs = {"attention_mask": alibi_mask(paper_slopes(heads))}
        inputs["position_ids"] = torch.zeros(TOKENS.shape, dtype=torch.int64)
    np.testing.assert_allclose(
        family.logits(config, tensors, TOKENS), logits(model, **inputs), **CLOSE
    )


# BTLM, Jais and Refact.


class SwiGLU(torch.nn.Module):
    def __init__(self, mlp, width: int, inner: int):
        super().__init__()
        self.c_fc, self.c_proj = mlp.c_fc, mlp.c_proj
        self.c_fc2 = transformers.pytorch_utils.Conv1D(inner, width)

    def forward(self, x):
        return self.c_proj(self.c_fc(x) * torch.nn.functional.silu(self.c_fc2(x)))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", ["btlm", "jais"])
def test_btlm_and_jais_are_gpt2_with_swiglu_and_scales(family, heads):
    """GPT-2 without positions whose mask takes the bias; its queries are scaled to 1 / head_dim."""
    factor = 0.9 if family == "jais" else 2.2 * 0.4
    family = FAMILIES[family]
    config = family.config(heads=heads)
    tensors = family.tensors(config, 7)
    slopes = tensors.pop("transformer.relative_pe.slopes")
    assert slopes.shape == (heads, 1)
    np.testing.assert_allclose(slopes[:, 0], paper_slopes(heads), rtol=1e-6)

    same = ("n_embd", "n_head", "n_inner", "n_layer", "n_positions", "vocab_size")
    gpt2_config = transformers.GPT2Config(**{key: config[key] for key in same})
    gpt2_config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(gpt2_config)
    for block in model.transformer.h:
        block.mlp = SwiGLU(block.mlp, config["n_embd"], config["n_inner"])
    changed = dict(tensors)
    changed["transformer.wpe.weight"] = np.zeros((config["n_positions"], config["n_embd"]))
    for name in (name for name in tensors if "c_attn" in name):
        q, k, v = np.split(tensors[name], 3, -1)
        changed[name] = np.concatenate([q / np.sqrt(8), k, v], -1)
    model = loaded(model, changed)
    table = model.transformer.wte.weight
    with torch.no_grad():
        embedded = 14.6 * table[torch.from_numpy(TOKENS)]
        x = model.transformer(inputs_embeds=embedded, attention_mask=alibi_mask(slopes[:, 0]))
        expected = (x.last_hidden_state @ table.T * factor).numpy()
    np.testing.assert_allclose(family.logits(config, tensors, TOKENS), expected, **CLOSE)


def test_scaled_slopes_are_those_of_a_model_that_has_them():
    family = FAMILIES["btlm"]
    plain = family.config()
    tensors = family.tensors(plain, 8)

    def scaled(**scaling) -> np.ndarray:
        config = family.config(alibi_scaling={"type": "linear", **scaling})
        return family.logits(config, tensors, TOKENS)

    assert np.abs(scaled(factor=2.0) - family.logits(plain, tensors, TOKENS)).max() > 0.01
    np.testing.assert_array_equal(scaled(factor=2.0), scaled(train_seq_len=LENGTH // 2))
    np.testing.assert_array_equal(
        scaled(train_seq_len=2 * LENGTH), family.logits(plain, tensors, TOKENS)
    )


@pytest.mark.parametrize("heads", HEADS)
def test_refact_is_a_llama_whose_norms_subtract_the_mean(heads):
    """LLaMA with one key head; all positions are zero, and its mask takes the bias."""
    family = FAMILIES["refact"]
    config = family.config(heads=heads)
    tensors = family.tensors(config, 9)
    inner = tensors["transformer.h.0.mlp.c_proj.weight"].shape[1]
    assert inner % 256 == 0
    llama_config = transformers.LlamaConfig(
        hidden_size=config["n_embd"],
        intermediate_size=inner,
        num_attention_heads=heads,
        num_hidden_layers=config["n_layer"],
        num_key_value_heads=1,
        vocab_size=config["vocab_size"],
    )
    llama_config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(llama_config)
    width = config["n_embd"]
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.LayerNorm(width, bias=False)
        layer.post_attention_layernorm = torch.nn.LayerNorm(width, bias=False)
    model.model.norm = torch.nn.LayerNorm(width, bias=False)

    parts = {"transformer.wte": "model.embed_tokens", "transformer.h": "model.layers"}
    parts |= {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "ln_f": "model.norm"}
    parts |= {"attn.q": "self_attn.q_proj", "attn.c_proj": "self_attn.o_proj"}
    parts |= {"mlp.c_proj": "mlp.down_proj"}
    renamed = {}
    for name, x in tensors.items():
        for old, new in parts.items():
            name = name.replace(old, new)
        if name.endswith("attn.kv.weight"):
            for kind, half in zip("kv", np.split(x, 2), strict=True):
                renamed[name.replace("attn.kv", f"self_attn.{kind}_proj")] = half
        elif "gate_up_proj" in name:
            for kind, half in zip(("gate", "up"), np.split(x, 2), strict=True):
                renamed[name.replace("gate_up_proj", f"{kind}_proj")] = half
        else:
            renamed[name] = x
    positions = torch.zeros(TOKENS.shape, dtype=torch.int64)
    expected = logits(
        loaded(model, renamed),
        attention_mask=alibi_mask(paper_slopes(heads)),
        position_ids=positions,
    )
    np.testing.assert_allclose(family.logits(config, tensors, TOKENS), expected, **CLOSE)


# All.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", HEADS)
def test_logits_are_of_order_one(family, heads):
    family = FAMILIES[family]
    config = family.config(heads=heads)
    tensors = family.tensors(config, 10)
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float32)}
    found = family.logits(config, tensors, TOKENS)
    assert found.shape == (2, LENGTH, 96)
    assert found.dtype == np.float64
    assert 0.5 < found.std() < 5


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mpt", {"attn_config": {"rope": True}}),
        ("mpt", {"attn_config": {"prefix_lm": True}}),
        ("jais", {"activation_function": "gelu"}),
        ("baichuan", {"tie_word_embeddings": True}),
        ("refact", {"multi_query": False}),
    ],
)
def test_other_values_are_refused(family, changes):
    family = FAMILIES[family]
    tensors = family.tensors(family.config(), 11)
    with pytest.raises(ValueError, match="is not described here"):
        family.logits(family.config(**changes), tensors, TOKENS)
