"""A config.json is read as the model's own code reads it, and what isn't implemented is refused."""

import json
import pathlib
import re
from typing import Any

import ml_dtypes
import pytest
from safetensors.numpy import load_file, save_file

from alibi.config import Config, ModelConfig, make_config, replaced
from alibi.convert.exporting import export_model
from alibi.convert.families import FAMILIES
from alibi.convert.importing import import_model
from tests.convert.described import FAMILIES as DESCRIBED
from tests.convert.imported import of_description, save_tokenizer
from tests.refusals import assert_refused

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


MIXED = ["sliding_attention", "full_attention"] * 15


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, 0),
        ({"use_sliding_window": True}, (*[0] * 28, 4096, 4096)),
        ({"use_sliding_window": True, "sliding_window": 8}, (*[0] * 28, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": None}, 0),
        ({"use_sliding_window": True, "max_window_layers": 3}, (*[0] * 3, *[4096] * 27)),
        ({"use_sliding_window": False, "sliding_window": 8}, 0),
        ({"use_sliding_window": True, "layer_types": MIXED}, (4096, 0) * 15),
    ],
    ids=str,
)
def test_windows_of_qwen_are_those_of_transformers(
    family: str, keys: dict[str, Any], windows: int | tuple[int, ...]
) -> None:
    """As transformers 5.24 lists its layers. A missing key has its default, which null has not."""
    assert settings(family, **keys, head_dim=16)["model.window"] == windows


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


THETA, STRETCHED = {"rope_theta": 5000.0}, {"base": 1e4, "factor": 4.0, "original_length": 256}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("family", "keys", "options"),
    [
        ("llama", {}, {"base": 1e4}),
        ("llama", THETA, {"base": 5000.0}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, {"base": 300.0}),
        ("llama", {"rope_parameters": {"rope_theta": 300.0}} | THETA, {"base": 300.0}),
        ("llama", {"rope_scaling": {"type": "default"}} | THETA, {"base": 5000.0}),
        ("llama", {"rope_scaling": None} | THETA, {"base": 5000.0}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"base": 1e4, "factor": 2.0}),
        ("llama", {"rope_scaling": YARN}, STRETCHED | {"ramp": "pairs", "fast": 32.0, "slow": 1.0}),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 4, "beta_slow": 0.5} | THETA},
         STRETCHED | {"ramp": "pairs", "base": 5000.0, "fast": 4.0, "slow": 0.5}),
        # the default, too
        ("llama", {"rope_scaling": YARN | {"beta_fast": 0}}, STRETCHED | {"ramp": "pairs", "fast": 32.0, "slow": 1.0}),
        ("llama", {"rope_scaling": LLAMA_3 | {"low_freq_factor": 2.0, "high_freq_factor": 5.0}},
         STRETCHED | {"ramp": "turns", "factor": 8.0, "fast": 5.0, "slow": 2.0, "temperature": 0.0}),
        ("gpt_neox", {}, {"base": 1e4, "share": 0.25}),
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}, {"base": 500.0, "share": 0.5}),
        ("gpt_neox", {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0}},
         {"base": 300.0, "share": 1.0}),
        ("gpt_neox", {"rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         {"base": 1e4, "factor": 2.0, "share": 0.5}),
        ("stablelm", {}, {"base": 1e4, "share": 0.25}),
        ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 500.0}, {"base": 500.0, "share": 0.5}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_rotary_are_those_of_transformers(
    family: str, keys: dict[str, Any], options: dict[str, Any]
) -> None:
    """As transformers 5.24 reads its config.json, and so does an import of what an export writes. The
    frequencies are compared in tests/positions, and with recorded logits.
    """
    found = settings(family, **keys | {"num_key_value_heads": None if family == "gpt_neox" else 2})
    config = replaced(make_config(), found)
    kind = {"ramp": "yarn", "factor": "rotary_interpolated"}
    assert config.position == next((kind[key] for key in kind if key in options), "rotary")
    assert config.position_options == options
    again = FAMILIES[family].settings(FAMILIES[family].describe(config))
    assert replaced(make_config(), again) == config


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        # other families read these names, or compute something else
        ("mistral", {"layer_types": MIXED}, r"layer_types=.*Mistral's own code doesn't read"),
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
        ("refact", {"scale_attn_weights": False}, r"scale_attn_weights=False"),
        ("btlm", {"alibi_scaling": {"type": "linear", "factor": 2}}, "alibi_scaling"),
        ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture=True"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 8.0}}, r"rope_type='dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"has no factor"),
        ("llama", {"rope_scaling": YARN | {"truncate": False}}, r"truncate=False"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.7}}, r"rope_parameters\.mscale=0\.7"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"full_attention"),
        # an unknown key that is off might be on by default, and so change the logits
        ("llama", {"a_switch": False}, r"not known here: a_switch=False"),
        ("llama", {"a_number": 0}, r"not known here: a_number=0"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(
    family: str, keys: dict[str, Any], message: str
) -> None:
    sizes = DESCRIBED[family].config() if family in DESCRIBED else SIZES
    kv_heads = {"num_key_value_heads": None} if family == "gpt_neox" else {}
    assert_refused(message, FAMILIES[family].settings, sizes | kv_heads | keys)


def test_equal_models_have_equal_configs() -> None:
    """Else a size that says what 0 says would be another model, for --init_from and exports."""
    named = ModelConfig(width=64, num_heads=4, head_size=16, num_kv_heads=4)
    assert named == ModelConfig(width=64, num_heads=4)
    assert ModelConfig(width=64, num_heads=4, head_size=8).head_dim == 8


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a random MPT of one layer."""
    folder = tmp_path / "hub"
    folder.mkdir()
    attention = {"alibi_bias_max": 16, "qk_ln": True}
    of_description("mpt", layers=1, torch_dtype="bfloat16", attn_config=attention)(folder)
    (folder / "modeling_mpt.py").write_text("raise SystemExit('nothing runs this')\n")
    save_tokenizer(folder)
    return folder


def test_an_export_says_what_transformers_does_not_read(
    hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Its authors' code goes along, as text, since it does read these keys."""
    import_model(str(hub), tmp_path / "run", Config())
    folder, family, notes = export_model(tmp_path / "run", tmp_path / "out")
    assert family.name == "mpt"
    note, _ = notes
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
    assert_refused(
        "final_norm/scale", import_model, str(hub), tmp_path / "run", Config(), dtype="float16"
    )
    assert not (tmp_path / "run").exists()
    import_model(str(hub), tmp_path / "run", Config(), dtype="bfloat16")
    assert_refused(
        r"transformer\.norm_f\.weight.*float16",
        export_model,
        tmp_path / "run",
        tmp_path / "out",
        dtype="float16",
    )
    assert not (tmp_path / "out").exists()


def test_buffers_do_not_decide_the_dtype(tmp_path: pathlib.Path) -> None:
    """Jais has slopes in float32 beside parameters in bfloat16."""
    of_description("jais", layers=1)(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    buffers = {name for name in tensors if re.fullmatch(FAMILIES["jais"].buffers, name)}
    assert {tensors[name].dtype.name for name in buffers} >= {"float32"}
    half = {name: tensors[name].astype(ml_dtypes.bfloat16) for name in tensors.keys() - buffers}
    save_file(tensors | half, tmp_path / "model.safetensors")
    save_tokenizer(tmp_path)
    run = import_model(str(tmp_path), tmp_path / "run", Config())
    assert run.config().model.param_dtype == "bfloat16"


def test_models_of_the_hub_predict_the_next_token(
    hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    masked = make_config("objective=masked")
    assert_refused("objective=masked", import_model, str(hub), tmp_path / "run", masked)
    other = replaced(masked, {"objective.name": "next_token"})
    assert import_model(str(hub), tmp_path / "run", other).config().objective.name == "next_token"
