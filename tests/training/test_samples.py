"""A sample of a prompt at each validation."""

import json

import pytest

from alibi.runs.trained import TrainedRun
from alibi.training.loop import train


def test_a_prompt_is_continued_at_each_validation(tiny_config, tmp_path, capfd):
    sampled = {"eval__sample_prompt": "the sea", "eval__sample_tokens": 5, "log__tensorboard": True}
    train(tiny_config(position="alibi", **sampled), str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    samples = {row["step"]: row["sample"] for row in rows if "sample" in row}
    assert list(samples) == [3, 6], "with the validations"
    run = TrainedRun(tmp_path / "run")
    for text in samples.values():
        assert text.startswith("the sea")
        assert len(run.tokenizer.encode(text)) >= len("the sea") + 1
    assert f"update 6: the sea|{samples[6].removeprefix('the sea')}" in capfd.readouterr().err
    events = b"".join(file.read_bytes() for file in (tmp_path / "run" / "tensorboard").iterdir())
    assert b"sample/text_summary" in events


def test_a_prompt_beyond_the_position_method_is_refused_before_training(tiny_config, tmp_path):
    config = tiny_config(position="learned", eval__sample_prompt="the sea", eval__sample_tokens=10)
    with pytest.raises(
        ValueError, match=r"eval.sample_prompt has 7 tokens and eval.sample_tokens=10: "
    ):
        train(config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
