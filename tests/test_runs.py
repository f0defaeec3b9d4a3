"""A work directory whose files were damaged is named with the file, what is wrong with it, and what to do."""

import pytest

from alibi.data.tokenizers import ByteTokenizer
from alibi.runs import RunDirectory


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[1]", "config.json is damaged (it holds a list, not an object)"),
        ("config.json", "{}", "config.json is damaged (it lacks data, model, optimizer, "),
        ("status.json", '{"state": ', "status.json is damaged (Expecting value"),
        ("status.json", '{"state": "running"}', "status.json is damaged (it lacks step, steps, reason)"),
        ("provenance.json", "{}", "provenance.json is damaged (it lacks corpus)"),
        ("tokenizer/tokenizer_config.json", "{}", "tokenizer holds no saved tokenizer, or a damaged one ('name')"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, tiny_config, name, content, message):
    run = RunDirectory(tmp_path / "run")
    run.check(tiny_config())
    run.claim(tiny_config(), ByteTokenizer())
    run.release()
    (run.path / name).write_text(content)
    readers = {
        "config.json": run.config,
        "status.json": run.status,
        "provenance.json": lambda: run.check_corpus({}),
        "tokenizer/tokenizer_config.json": run.tokenizer,
    }
    with pytest.raises(ValueError, match=r"; restore .*, or train the run again elsewhere") as raised:
        readers[name]()
    assert f"{run.path}/{message}" in str(raised.value)
