"""A config.json is read as the model's own code reads it, and what isn't implemented is refused."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from alibi.config import Config, ModelConfig, make_config, replaced
from alibi.convert.exporting import export_model
from alibi.convert.families import FAMILIES
from alibi.convert.importing import import_model
from alibi.positions import make_position
from tests.convert.described import FAMILIES as DESCRIBED
from tests.convert.imported import save_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "vocab_size": 320,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def settings(family: str, **keys: Any) -> dict[str, Any]:
    return FAMILIES[family].settings(SIZES | keys)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 15},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_windows_of_qwen_are_those_of_transformers(family: str, keys: dict[str, Any]) -> None:
    """A missing key has its default, which null has not."""
    transformers = pytest.importorskip("transformers")
    own = getattr(transformers, f"{family}Config")(**SIZES, **keys)
    kinds = {"full_attention": 0, "sliding_attention": own.sliding_window}
    expected = [kinds[kind] for kind in own.layer_types]
    head_dim = {"head_dim": 16} if family == "Qwen3" else {}
    found = settings(family.lower(), **keys, **head_dim)["model.window"]
    assert ([found] * 30 if isinstance(found, int) else list(found)) == expected


@pytest.mark.parametrize(
    ("family", "keys", "window"),
    [
        # transformers' own default, which null has not
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"sliding_window": 8}, 8),
        # their code reads no such key
        ("llama", {"sliding_window": 8, "use_sliding_window": True}, 0),
        ("gemma", {"sliding_window": 8}, 0),
        ("starcoder2", {}, 0),
        ("starcoder2", {"sliding_window": None}, 0),
        ("starcoder2", {"sliding_window": 8}, 8),
    ],
)
def test_windows_of_whole_models(family: str, keys: dict[str, Any], window: int) -> None:
    assert settings(family, **keys)["model.window"] == window


def test_mixed_windows_of_mistral_are_refused() -> None:
    mixed = ["sliding_attention", "full_attention"] * 15
    with pytest.raises(ValueError, match=r"layer_types=.*Mistral's own code doesn't read"):
        settings("mistral", layer_types=mixed)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_parameters": {"rope_theta": 300.0}, "rope_theta": 5000.0},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5000.0},
        {"rope_scaling": None, "rope_theta": 5000.0},
    ],
    ids=str,
)
def test_rotary_bases_are_those_of_transformers(keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    own = transformers.LlamaConfig(**SIZES, **keys)
    found = settings("llama", **keys)["position_options.base"]
    assert found == own.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("GPTNeoX", {}),
        ("GPTNeoX", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
        ("GPTNeoX", {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0}}),
        ("GPTNeoX", {"rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("StableLm", {}),
        ("StableLm", {"partial_rotary_factor": 0.5, "rope_theta": 500.0}),
    ],
    ids=str,
)
def test_shares_of_rotary_are_those_of_transformers(family: str, keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    own = getattr(transformers, f"{family}Config")(**SIZES, **keys).rope_parameters
    named, kv_heads = ("gpt_neox", None) if family == "GPTNeoX" else ("stablelm", 2)
    found = settings(named, **keys, num_key_value_heads=kv_heads)
    for ours, theirs in (("base", "rope_theta"), ("share", "partial_rotary_factor")):
        assert found[f"position_options.{ours}"] == own[theirs]
    assert found.get("position_options.factor") == own.get("factor")


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gpt_neox", {"rope_theta": 500.0}, r"rope_theta=500\.0"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("starcoder2", {"mlp_type": "gated"}, r"mlp_type='gated'"),
        ("starcoder2", {"norm_type": "rms_norm"}, r"norm_type='rms_norm'"),
        ("starcoder2", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("stablelm", {"qk_layernorm": True}, r"qk_layernorm=True"),
        ("stablelm", {"hidden_act": "gelu_10"}, r"'gelu_10', which is not implemented"),
        # Gemma's own code alone reads it
        ("stablelm", {"hidden_activation": "relu"}, r"not known here: hidden_activation='relu'"),
        ("olmo2", {"clip_qkv": 8.0}, r"not known here: clip_qkv=8\.0"),
    ],
    ids=str,
)
def test_what_the_newer_families_do_not_read_is_refused(
    family: str, keys: dict[str, Any], message: str
) -> None:
    """Their own code reads these names elsewhere, or computes something else."""
    kv_heads = None if family == "gpt_neox" else 2
    with pytest.raises(ValueError, match=message):
        settings(family, **keys, num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "linear", "factor": 2.0},
        YARN,
        YARN | {"beta_fast": 4, "beta_slow": 0.5, "rope_theta": 5000.0},
        YARN | {"beta_fast": 0},  # the default, too
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 256},
    ],
    ids=str,
)
def test_stretched_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """And those of the config that an export writes."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = SIZES | {"head_dim": 64, "rope_theta": 1000.0, "max_position_embeddings": 1024}
    own = transformers.LlamaConfig(**sizes, rope_scaling=dict(rope))
    kind = own.rope_parameters["rope_type"]
    expected, amplitude = ROPE_INIT_FUNCTIONS[kind](own, "cpu")
    config = replaced(make_config(), FAMILIES["llama"].settings(sizes | {"rope_scaling": rope}))
    sizes_here = {"num_heads": 4, "head_dim": 64, "width": 256, "train_length": 1024}
    options = config.position_options
    method = make_position(config.position, **sizes_here, options=options)
    np.testing.assert_allclose(method.frequencies(), expected.numpy(), rtol=1e-5)
    ours = 1 + getattr(method, "temperature", 0.0) * np.log(method.factor)
    assert ours == pytest.approx(amplitude)
    again = FAMILIES["llama"].settings(FAMILIES["llama"].describe(config))
    assert replaced(make_config(), again) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, r"rope_type='dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, r"has no factor"),
        ({"rope_scaling": YARN | {"truncate": False}}, r"truncate=False"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, r"rope_parameters\.mscale=0\.7"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"full_attention"),
        ({"a_switch": False}, r"not known here: a_switch=False"),
        ({"a_number": 0}, r"not known here: a_number=0"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(keys: dict[str, Any], message: str) -> None:
    """An unknown key that is off might be on by default, and so change the logits."""
    with pytest.raises(ValueError, match=message):
        settings("llama", **keys)


def test_refact_divides_the_products_by_the_root_of_the_heads_size() -> None:
    content = DESCRIBED["refact"].config()
    assert FAMILIES["refact"].settings(content)["model.num_kv_heads"] == 1
    with pytest.raises(ValueError, match=r"scale_attn_weights=False"):
        FAMILIES["refact"].settings(content | {"scale_attn_weights": False})


def test_equal_models_have_equal_configs() -> None:
    """Else a size that says what 0 says would be another model, for --init_from and exports."""
    named = ModelConfig(width=64, num_heads=4, head_size=16, num_kv_heads=4)
    assert named == ModelConfig(width=64, num_heads=4)
    assert ModelConfig(width=64, num_heads=4, head_size=8).head_dim == 8


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a random MPT of one layer."""
    mpt, folder = DESCRIBED["mpt"], tmp_path / "hub"
    folder.mkdir()
    content = mpt.config(vocab=320, length=16, layers=1) | {"torch_dtype": "bfloat16"}
    content["attn_config"] |= {"alibi_bias_max": 16, "qk_ln": True}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "modeling_mpt.py").write_text("raise SystemExit('nothing runs this')\n")
    save_file(mpt.tensors(content, 0), folder / "model.safetensors")
    save_tokenizer(folder)
    return folder


def test_an_export_says_what_transformers_does_not_read(
    hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Its authors' code goes along, as text, since it does read these keys."""
    import_model(str(hub), tmp_path / "run", Config())
    folder, family, notes = export_model(tmp_path / "run", tmp_path / "out")
    assert family.name == "mpt"
    (note,) = notes
    assert "transformers' own MptForCausalLM doesn't read alibi_bias_max, qk_ln of" in note
    content = json.loads((folder / "config.json").read_text())
    assert content["dtype"] == "float32"
    assert "torch_dtype" not in content
    assert content["auto_map"]["AutoModelForCausalLM"] == "modeling_mpt.MPTForCausalLM"
    assert (folder / "modeling_mpt.py").read_bytes() == (hub / "modeling_mpt.py").read_bytes()


def test_float16_does_not_overflow(hub: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """65,504 is its largest number."""
    file = hub / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.norm_f.weight"][3] = 70_000
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"final_norm/scale has numbers of up to 7e\+04"):
        import_model(str(hub), tmp_path / "run", Config(), dtype="float16")
    assert not (tmp_path / "run").exists()
    import_model(str(hub), tmp_path / "run", Config(), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"transformer\.norm_f\.weight has .*float16 ends"):
        export_model(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_buffers_do_not_decide_the_dtype(tmp_path: pathlib.Path) -> None:
    """Jais has slopes in float32 beside parameters in bfloat16."""
    jais, folder = DESCRIBED["jais"], tmp_path / "hub"
    folder.mkdir()
    content = jais.config(vocab=320)
    (folder / "config.json").write_text(json.dumps(content))
    half = {
        name: part.astype(ml_dtypes.bfloat16) for name, part in jais.tensors(content, 0).items()
    }
    buffers = jais.buffers(content)
    assert any(part.dtype == np.float32 for part in buffers.values())
    save_file(half | buffers, folder / "model.safetensors")
    save_tokenizer(folder)
    run = import_model(str(folder), tmp_path / "run", Config())
    assert run.config().model.param_dtype == "bfloat16"


def test_models_of_the_hub_predict_the_next_token(
    hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    masked = make_config("objective=masked")
    with pytest.raises(
        ValueError, match=r"objective=masked doesn't go with models that predict the next"
    ):
        import_model(str(hub), tmp_path / "run", masked)
    other = replaced(masked, {"objective.name": "next_token"})
    assert import_model(str(hub), tmp_path / "run", other).config().objective.name == "next_token"
