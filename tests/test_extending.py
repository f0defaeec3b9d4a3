"""The page's objective, optimizer, schedule and corpus: trained, evaluated, recorded and resumed as it says."""

import re

import numpy as np
import pytest

from alibi.config import make_config, replaced
from alibi.data.tokens import prepare
from alibi.evaluation.evaluate import evaluate_runs
from alibi.objectives import Sequences, make_objective
from alibi.reporting.rows import read_rows
from alibi.runs import RunDirectory, config_hash
from alibi.training import loop
from tests.evaluation.runs import options_of
from tests.hosts import ROOT
from tests.refusals import assert_refused
from tests.training.runs import rows

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = ("own_objective", "own_optimizer", "own_corpus")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for name, code in zip(FILES, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True):
        assert f"`{name}.py`" in PAGE
        (folder / f"{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def test_the_command_of_the_page(folder):
    words = PAGE.partition("```sh\n")[2].partition("```")[0].replace("\\\n", " ").split()
    keys = dict(re.findall(r"--config\.(\S+?)=(\S+)", " ".join(words)))
    small = "length=16,train.steps=8,train.batch_tokens=128,optimizer.warmup_steps=2,model.num_layers=1,model.width=16,"
    small += "model.num_heads=2,model.feed_forward=16,log.every_steps=1,log.tensorboard=false,eval.batch_tokens=256"
    config = make_config(small, data__cache_dir=str(folder / "cache"), data__max_valid_bytes=300)
    config = replaced(config, keys)
    status = loop.train(config, str(folder / "run"))
    assert (status["state"], status["step"]) == ("finished", 8)
    rates = [row["learning_rate"] for row in rows(folder / "run") if "learning_rate" in row]
    np.testing.assert_allclose(
        rates[2:], [3e-4 * (1 - step / 8) for step in range(2, 8)], rtol=1e-5
    )
    assert_refused(
        r"train.steps: 8 there, 9 now",
        loop.train,
        replaced(config, {"train.steps": 9}),
        str(folder / "run"),
        listed=True,
    )

    text = (
        np.asarray(prepare(config.data, "train", progress=False).tokens).astype(np.uint8).tobytes()
    )
    assert text.startswith(b"zero\none\ntwo\n")
    assert text.rstrip(b"\n").endswith(b"two nine nine nine")
    tokens = np.frombuffer(b"xaabcbbd", np.uint8).astype(np.int32)[None]
    batch = make_objective(config).batch(Sequences(tokens, np.zeros(1, int)))
    assert bytes(batch.targets[batch.targets >= 0].astype(np.uint8)) == b"abcd"

    assert evaluate_runs([folder / "run"], options_of(folder / "out", lengths=(16,))) == []
    [row] = read_rows(folder / "out" / "results.jsonl")
    assert row.objective == {"name": "own_objective:Changes", "within": 2}
    assert row.corpus == "numbers"
    files = RunDirectory(folder / "run").provenance()["method_files"]
    assert {*files} == {"own file own_objective", "own file own_optimizer"}
    assert "+" in row.config_hash
    assert config_hash(config) != config_hash(replaced(config, {"objective.options.within": 1}))

    file = folder / "own_optimizer.py"
    file.write_text(file.read_text() + "\n# changed\n")
    saved = RunDirectory(folder / "run").config()
    assert_refused("own file own_optimizer", loop.train, saved, str(folder / "run"))
