"""Encoders of the hub: what their configs and files may hold, training on, and the way back."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf
from safetensors.numpy import load_file, save_file

from alibi.config import Config, flatten, load_config, make_config, replaced
from alibi.convert.exporting import export_model, write_tokenizer
from alibi.convert.families import FAMILIES, family_of
from alibi.convert.importing import import_model
from alibi.convert.tensors import from_safetensors, to_safetensors
from alibi.data.tokenizers import ByteTokenizer
from alibi.evaluation.scorer import run_objective
from alibi.generation.encoders import Vectors, encode, write_vectors
from alibi.model.decoder import build_model
from alibi.objectives import Sequences, make_objective
from alibi.runs.trained import TrainedRun
from alibi.training.loop import train
from alibi.training.parent import Parent
from tests.convert.described_encoders import ENCODERS
from tests.convert.imported import CASES, jina, recorded, save_tokenizer
from tests.refusals import assert_refused

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 320,
}
SPECIAL = ("[MASK]", "[CLS]", "[SEP]")
JINA = BERT | {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def bert(folder: pathlib.Path, about: str = "masked tokens") -> dict[str, np.ndarray]:
    """Makes the folder of a random BERT with 128 positions, and returns its tensors."""
    folder.mkdir()
    recorded(next(case for case in CASES if (case.family, case.about) == ("bert", about)), folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def imported_bert(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The work directory of a random BERT; not to be changed."""
    folder = tmp_path_factory.mktemp("bert")
    bert(folder / "hub")
    import_model(str(folder / "hub"), folder / "run", Config())
    return folder / "run"


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, r"position_embedding_type='relative"),
        ("bert", {"is_decoder": True}, r"is_decoder=True"),
        ("bert", {"hidden_act": "mish"}, r"hidden_act='mish'.*only 'gelu'"),
        ("bert", {"rotary": 1}, r"not known here: rotary=1"),
        ("mosaic_bert", {"hidden_act": "silu"}, r"hidden_act='silu'"),
        ("mosaic_bert", {"layer_norm_eps": 1e-5}, r"layer_norm_eps=1e-05"),
        ("jina_bert", JINA | {"feed_forward_type": "original"}, r"feed_forward_type='original'"),
        ("jina_bert", JINA | {"position_embedding_type": "absolute"}, r"type='absolute'"),
    ],
)
def test_what_an_encoder_asks_for_beyond_this_is_refused(
    family: str, keys: dict[str, Any], message: str
) -> None:
    assert_refused(message, FAMILIES[family].settings, BERT | keys)


def test_tensors_tell_families_of_one_architecture_apart() -> None:
    """MosaicBERT and DNABERT-2 call themselves BERT, and both layouts of jina-embeddings-v2 alike."""
    for names, family in (
        (["bert.encoder.layer.0.attention.self.query.weight"], "bert"),
        (["bert.encoder.layer.0.attention.self.Wqkv.weight"], "mosaic_bert"),
    ):
        assert family_of({"architectures": ["BertForMaskedLM"]}, names).name == family
    for names, family in (
        (["encoder.layer.0.mlp.gated_layers.weight"], "jina_bert"),
        (["encoder.layer.0.attention.self.layer_norm_q.weight"], "jina_bert_qk"),
    ):
        assert family_of({"architectures": ["JinaBertModel"]}, names).name == family


def test_the_first_berts_files_are_read(tmp_path: pathlib.Path) -> None:
    """Their norms have TensorFlow's names. The copy of a tied matrix and of a bias add nothing, and
    what the model doesn't use goes along to an export.
    """
    hub, random = tmp_path / "hub", np.random.default_rng(0)
    tensors = bert(hub)
    kept = {
        "bert.pooler.dense.weight": random.normal(size=(64, 64)).astype(np.float32),
        "bert.pooler.dense.bias": random.normal(size=64).astype(np.float32),
        "cls.seq_relationship.weight": random.normal(size=(2, 64)).astype(np.float32),
        "cls.seq_relationship.bias": random.normal(size=2).astype(np.float32),
    }
    copies = {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
        "bert.embeddings.position_ids": np.arange(128)[None],
    }
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file(old | kept | copies, hub / "model.safetensors")
    import_model(str(hub), tmp_path / "run", Config())
    export_model(tmp_path / "run", tmp_path / "out")
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), tensors | kept
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
    copies["cls.predictions.decoder.bias"] = copies["cls.predictions.decoder.bias"] + 1
    save_file(old | copies, hub / "model.safetensors")
    assert_refused(r"decoder\.bias", import_model, str(hub), tmp_path / "other", Config())


def test_a_file_without_a_head_goes_out_and_in_again(tmp_path: pathlib.Path) -> None:
    """With the prefix and a pooler, of which the export takes the prefix too."""
    tensors = bert(tmp_path / "hub", "without a head")
    prefixed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, tmp_path / "hub" / "model.safetensors")
    import_model(str(tmp_path / "hub"), tmp_path / "run", Config())
    export_model(tmp_path / "run", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    save_tokenizer(tmp_path / "out", masked=True)
    again = import_model(str(tmp_path / "out"), tmp_path / "again", Config())
    aside = ["pooler.dense.bias", "pooler.dense.weight"]
    assert again.provenance()["imported_from"]["set_aside"] == aside


def test_a_tied_head_is_found_without_the_prefix(tmp_path: pathlib.Path) -> None:
    tensors = bert(tmp_path / "hub")
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    head = {"cls.predictions.decoder.weight": tensors["embeddings.word_embeddings.weight"]}
    save_file(tensors | head, tmp_path / "hub" / "model.safetensors")
    import_model(str(tmp_path / "hub"), tmp_path / "run", Config())
    assert TrainedRun(tmp_path / "run").config.model.masked_head


def test_kept_tensors_may_have_bfloat16() -> None:
    """Which the package safetensors writes from NumPy, and doesn't read."""
    tensors = {"a": np.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "b": np.ones(2, np.float32)}
    again = from_safetensors(to_safetensors(tensors))
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        np.testing.assert_array_equal(again[name], tensor)


def test_keys_of_multilingual_berts_are_known() -> None:
    keys = {"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12}
    keys |= {"pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "output_past": True}
    plain = FAMILIES["bert"].settings(BERT)
    assert FAMILIES["bert"].settings(BERT | keys | {"pooler_type": "first_token"}) == plain


def test_the_length_of_training_can_be_given(tmp_path: pathlib.Path) -> None:
    """jina-embeddings-v2 was trained at 512 tokens, and its config.json has 8,192. An export keeps that."""
    run = TrainedRun(jina(tmp_path, train_length=8))
    assert run.config.train_length == 8
    export_model(run.directory.path, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["max_position_embeddings"] == 16
    config = load_config(f"{tmp_path}/run/config.py:length=32")
    about = Parent(config, build_model(config, 300)).about()
    assert about["lengths"] == {"max_position_embeddings": 16}  # an export has 32 then
    # vectors are allowed up to the longest text
    vectors = write_vectors(run, ["a line of text"], tmp_path / "vectors.npy", Vectors())
    assert 8 < len(encode(run, "a line of text")) <= 16
    assert vectors.shape == (1, 32)


def test_an_exported_tokenizer_names_its_special_tokens(
    masked: TrainedRun, tmp_path: pathlib.Path
) -> None:
    """And holds the mask token of a run that had none in its vocabulary."""
    run = masked
    for name, tokenizer, mask_id in (
        ("hub", run.tokenizer, run.config.objective.mask_id),
        ("bytes", ByteTokenizer(), -1),
    ):
        folder = tmp_path / name
        folder.mkdir()
        assert write_tokenizer(tokenizer, folder, mask_id) == []
        about = json.loads((folder / "tokenizer_config.json").read_text())
        made = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert about["mask_token"] == "[MASK]"
        assert made.token_to_id("[MASK]") == (256 if mask_id == -1 else mask_id)
        roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
        assert {role: about.get(role) for role in roles} == (
            roles if mask_id >= 0 else dict.fromkeys(roles)
        )


def test_the_mask_token_is_the_tokenizers(masked: TrainedRun) -> None:
    """It has a row of the embedding, so the model gets no further one."""
    run = masked
    mask = run.tokenizer.special_ids["[MASK]"]
    assert (run.config.objective.name, run.config.objective.mask_id) == ("masked", mask)
    assert run.params["embedding"].shape == (320, 32)
    tokens = np.random.default_rng(0).integers(5, 300, (4, 65)).astype(np.int32)
    tokens[:, ::2] = run.tokenizer.boundary_id  # [SEP], which BERT's training never hides
    batch = run_objective(run).batch(Sequences(tokens, np.arange(4) * 64))
    hidden = batch.inputs == mask
    assert hidden.any()
    assert (batch.targets[hidden] == tokens[:, 1:][hidden]).all()
    assert batch.inputs.max() < 300
    assert not (batch.targets == run.tokenizer.boundary_id).any()
    text = {"vocab_size": 300, "boundary_id": 0}
    assert_refused(
        r"objective\.mask_id=300",
        make_objective,
        make_config("objective=masked,objective.mask_id=300"),
        **text,
    )


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: pathlib.Path) -> None:
    bert(tmp_path / "hub")
    save_tokenizer(tmp_path / "hub")
    assert_refused(r"\[MASK\]", import_model, str(tmp_path / "hub"), tmp_path / "other", Config())


def test_a_shorter_training_keeps_the_table_of_positions(imported_bert: pathlib.Path) -> None:
    """And its export says the table's rows, which are the longest text."""
    config = load_config(f"{imported_bert}/config.py:length=32")
    about = Parent(config, build_model(config, 300)).about()
    assert (about["new"], about["dropped"]) == ([], [])
    content = FAMILIES["bert"].describe(config)
    assert (content["max_position_embeddings"], content["type_vocab_size"]) == (128, 2)
    ours = "objective=masked,position=learned,length=32,model.vocab_rows=300,model.masked_head=true"
    keys = {key: value for key, value in flatten(config).items() if key.startswith("model.")}
    assert FAMILIES["bert"].describe(replaced(make_config(ours), keys)) == content | {
        "max_position_embeddings": 32
    }  # a table of our own runs has the training length
    assert_refused("objective=next_token", FAMILIES["bert"].describe, make_config())


def test_a_model_without_a_head_gets_one_in_training(tmp_path: pathlib.Path) -> None:
    bert(tmp_path / "hub", "without a head")
    import_model(str(tmp_path / "hub"), tmp_path / "run", Config())
    config = load_config(f"{tmp_path}/run/config.py:model.masked_head=true")
    about = Parent(config, build_model(config, 300)).about()
    parts = ["bias", "dense/bias", "dense/kernel", "norm/bias", "norm/scale"]
    assert (about["new"], about["dropped"]) == ([f"head_{part}" for part in parts], [])
    assert about["family"] == "bert"


@pytest.mark.slow
def test_an_encoder_is_trained_on_and_exported(tmp_path: pathlib.Path) -> None:
    """The description computes with the exported tensors as the run does; the parameters have moved.
    Its layers are stacked.
    """
    jina(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    text = f"data.corpus=text,data.train={tmp_path}/text.txt,data.valid={tmp_path}/text.txt"
    small = "model.scan_layers=true,train.steps=2,train.batch_tokens=64,eval.max_tokens=64,log.tensorboard=false"
    train(load_config(f"{tmp_path}/run/config.py:{text},{small}"), str(tmp_path / "on"))
    *_, (note, _) = export_model(tmp_path / "on", tmp_path / "out")
    assert "JinaBertForMaskedLM by its authors' code alone" in note
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == ["JinaBertForMaskedLM"]  # its parent's, not MosaicBERT's
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (about["mask_token"], about["cls_token"], about["sep_token"]) == SPECIAL
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(tmp_path / "hub" / "model.safetensors")
    assert tensors.keys() == before.keys()
    moved = [name for name in before if not np.array_equal(before[name], tensors[name])]
    assert len(moved) > len(before) / 2
    tokens = np.random.default_rng(0).integers(5, 300, (2, 32))
    run = TrainedRun(tmp_path / "on")
    assert "layers" in run.params
    ours = np.asarray(jax.jit(run.model.apply)({"params": run.params}, jnp.asarray(tokens)))
    expected = ENCODERS["jina_bert"].logits(content, tensors, tokens)
    np.testing.assert_allclose(ours, expected, atol=5e-5)


def test_a_tokens_type_adds_its_row(imported_bert: pathlib.Path) -> None:
    """As in BERT's pairs of texts: type 1 gives what type 0 gives with tokens whose rows hold the difference."""
    run = TrainedRun(imported_bert)
    tokens, types = np.random.default_rng(0).integers(5, 150, (2, 16)), np.arange(16)[None] // 8
    tokens += 150 * types
    rows, added = run.params["embedding"], run.params["token_types"]
    moved = run.params | {"embedding": rows.at[150:].add(added[1] - added[0])}
    apply = jax.jit(functools.partial(run.model.apply, method="features"))
    found = apply({"params": run.params}, jnp.asarray(tokens), token_types=types.repeat(2, axis=0))
    np.testing.assert_allclose(found, apply({"params": moved}, jnp.asarray(tokens)), atol=1e-5)
    assert np.abs(found - apply({"params": run.params}, jnp.asarray(tokens))).max() > 0.1
