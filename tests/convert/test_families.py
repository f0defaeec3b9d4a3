"""Models of every family that can be imported compute as their own code does, and go back."""

import json
import pathlib

import numpy as np
import pytest

from alibi.config import Config, make_config
from alibi.convert.exporting import export_model
from alibi.convert.families import FAMILIES, family_of
from alibi.convert.importing import import_model
from alibi.runs.trained import TrainedRun
from tests.convert.imported import (
    CASES,
    SHOWN,
    Case,
    are_equal,
    compare,
    our_logits,
    recorded,
    save_tokenizer,
)


def test_every_family_has_a_case() -> None:
    named = {"baichuan" if case.family == "baichuan2" else case.family for case in CASES}
    assert named == FAMILIES.keys()


# A family with ALiBi, one with learned positions, one with rotary, and one that transformers lacks.
NAMED = {str(case): case for case in CASES}
QUICK = ("bloom-12-heads", "gpt2-learned-positions", "llama-8-heads-2-of-keys", "refact-8-heads")
# They differ from another case in the number of heads alone; the page has them.
ALIKE = (
    "bloom-8-heads",
    "bloom-40-heads",
    "mpt-8-heads",
    "mpt-12-heads",
    "mpt-56-heads",
    "falcon-RW-8-heads",
)
MARKED = [
    NAMED[name] if name in QUICK else pytest.param(NAMED[name], marks=pytest.mark.slow)
    for name in NAMED
    if name not in ALIKE
]


@pytest.mark.parametrize("case", MARKED, ids=str)
def test_an_imported_model_computes_as_recorded(case: Case, tmp_path: pathlib.Path) -> None:
    """At up to 8 times the training length, but for float32's sums in another order. The recorded
    logits are transformers' own.
    """
    hub = tmp_path / "hub"
    hub.mkdir()
    if case.peer == "transformers":
        expected = recorded(case, hub)
    else:
        expected = case.folder(hub)(case.tokens)[:, SHOWN]
        save_tokenizer(hub, case.masked)
    import_model(str(hub), tmp_path / "run", Config())
    run = TrainedRun(tmp_path / "run")
    assert expected.std() > 0.1  # else any two models would agree
    seen = case.visible[:, SHOWN]
    ours, atol = our_logits(run)[:, SHOWN][seen], 1e-4 * expected.std()
    np.testing.assert_allclose(ours, expected[seen], atol=min(atol, 5e-5) if case.masked else atol)
    export_model(tmp_path / "run", tmp_path / "out")
    assert are_equal(hub, tmp_path / "out")


# Warnings of transformers about its own random models.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [NAMED[QUICK[0]], NAMED[QUICK[2]]], ids=str)
def test_an_imported_model_computes_as_its_own_code(
    case: Case, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At up to 8 times the training length; 1e-4 is float32's sums in another order."""
    if case.peer == "transformers":
        pytest.importorskip("transformers")
        pytest.importorskip("torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = compare(case, tmp_path)
    assert found.spread > 0.1  # else any two models would agree
    assert found.logits < 1e-4
    assert found.nll < 1e-4
    assert found.tokens_equal == (None if case.masked else 8)
    assert found.ids_equal
    assert found.exported_equal
    assert found.exported_logits in (None, 0.0)


def test_our_runs_find_the_family_with_words_for_them() -> None:
    """configs/llama_like.py is Llama's; a model of the paper is nobody's, and the reason is told."""
    config = make_config(
        "position=rotary,model.norm=rms,model.gated=true,model.activation=silu,model.qkv_bias=false,"
        "model.out_bias=false,model.feed_forward_bias=false,model.embedding=untied,"
        "model.embedding_scale=1,model.num_kv_heads=2,model.vocab_rows=300"
    )
    content = FAMILIES["llama"].describe(config)
    assert family_of(content).name == "llama"
    assert (content["num_key_value_heads"], content["rope_theta"]) == (2, 10_000.0)
    assert json.loads(json.dumps(content)) == content
    with pytest.raises(ValueError, match=r"model.activation is 'relu' and would become 'gelu'"):
        FAMILIES["bloom"].describe(make_config("model.vocab_rows=300"))
