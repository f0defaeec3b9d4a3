"""Models of every family that can be imported compute as their own code does, and go back."""

import json
import pathlib
import re

import numpy as np
import pytest

from alibi.config import Config, make_config, read_config
from alibi.convert.families import FAMILIES, family_of
from alibi.convert.folder import HubFolder
from alibi.convert.importing import describe, model_entries, read_params
from alibi.model.decoder import build_model
from alibi.parallel.axes import by_path
from configs import gemma3
from tests.convert.imported import CASES, SHOWN, Case, are_equal, compare, our_logits, recorded
from tests.refusals import assert_refused


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
    logits are transformers' own. And the tensors that an export has, by its own config, are the import's.
    """
    is_recorded = case.peer == "transformers"
    expected = (
        recorded(case, tmp_path) if is_recorded else case.folder(tmp_path)(case.tokens)[:, SHOWN]
    )
    folder = HubFolder(tmp_path)
    family, config = describe(folder, Config())
    params = read_params(folder, family, config, 300)
    assert expected.std() > 0.1  # else any two models would agree
    ours, seen = our_logits(config, build_model(config, 300), params), case.visible[:, SHOWN]
    atol = 1e-4 * expected.std()
    np.testing.assert_allclose(
        ours[:, SHOWN][seen], expected[seen], atol=min(atol, 5e-5) if case.masked else atol
    )
    leaves = by_path(params)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    bare = family.prefix if case.masked and not config.model.masked_head else ""
    written = {
        one.theirs.removeprefix(bare): one.to_theirs(leaves)
        for one in model_entries(family, family.describe(config), config, shapes)
    }
    kept = {name: x.read() for name, x in folder.tensors.items() if re.fullmatch(family.kept, name)}
    assert are_equal(tmp_path, written | kept)


# Warnings of transformers about its own random models.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_imported_model_computes_as_its_own_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At up to 8 times the training length; 1e-4 is float32's sums in another order."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = compare(NAMED["bloom-12-heads"], tmp_path)
    assert found.spread > 0.1  # else any two models would agree
    assert max(found.logits, found.nll) < 1e-4
    assert (found.tokens_equal, found.exported_logits) == (8, 0.0)
    assert (found.ids_equal, found.exported_equal) == (True, True)


def test_layers_with_options_of_their_own_are_refused_by_each_family() -> None:
    config = read_config(gemma3.get_config())
    for family in FAMILIES.values():
        assert_refused(
            "can't say (this model|position_options)|objective=", family.describe, config
        )


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
    assert_refused(
        r"model\.activation", FAMILIES["bloom"].describe, make_config("model.vocab_rows=300")
    )
