"""docs/methods.md is what the methods and the committed results say."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from alibi.config.override import Override
from alibi.positions import METHODS
from alibi.reporting.rows import ContextUse
from tests.reporting.rowmaker import make_row

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("methods_page")


def test_the_page_is_fresh(script):
    assert script.PAGE.read_text() == script.page(), "run: python scripts/methods_page.py"


def test_the_page_is_not_written_where_help_is_asked_for(script):
    before = script.PAGE.stat().st_mtime_ns
    result = subprocess.run([sys.executable, script.__file__, "--help"], cwd="/", capture_output=True, text=True)
    assert result.stdout.startswith("Writes docs/methods.md: what each position method is")
    assert script.PAGE.stat().st_mtime_ns == before


def test_every_method_has_its_section_and_says_where_it_enters(script):
    page = script.page()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [*METHODS]
    enters = dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \|.*\| ([a-z, ]+) \| [\d,]+ \|$", page, re.MULTILINE))
    assert enters["alibi"] == enters["kerple_log"] == "logits"
    assert enters["rotary"] == enters["yarn"] == "queries, keys"
    assert enters["fox"] == "logits by content"
    assert (enters["learned"], enters["none"]) == ("embeddings", "nowhere")


def test_what_was_measured_is_told_by_method(script):
    use = ContextUse(9, 128, -0.25, (-0.3, -0.2))
    rows = [make_row("rotary", 128, 2.0, run="rotary-seed0"), make_row("rotary", 2048, 8.0, run="rotary-seed0")]
    rows += [make_row("rotary", 2048, 2.0, run="rotary-seed0", override=Override("yarn").to_json())]
    assert script._extrapolation(script._of_method("rotary", rows)) == ["1.000", "3.000", "-"]
    assert script._extrapolation(script._of_method("yarn", rows)) == ["-", "1.000", "-"]
    assert script._extrapolation(script._of_method("alibi", rows)) == ["-", "-", "-"]
    of_context = make_row("rotary", 2048, 4.0, run="rotary-seed0", context_use=vars(use))
    assert script._extrapolation(script._of_method("rotary", [*rows, of_context])) == ["1.000", "3.000", "-0.2500"]
    drawn = make_row("rotary", 2048, 16.0, run="randomised-rotary-seed0")
    assert script._extrapolation(script._of_method("rotary", [*rows, drawn])) == ["1.000", "3.000", "-"]
    names = ("t5", "rotary")
    speeds = [{"contender": one, "length": length, "run": {"of_none": 0.9}} for one in names for length in (128, 2048)]
    assert script._speed("t5", speeds) == script._speed("rotary_ntk", speeds) == ["0.90", "-", "0.90", "-"]
    assert script._speed("none", speeds) == ["1.00"] * 4, "its own speed is the measure"


def test_passkeys_are_told_with_the_updates_that_they_took(script):
    def row(position, length, distance, accuracy, seed=0, step=2_000):
        key, run = {"distance": distance, "prompts": 200, "accuracy": accuracy}, f"{position}-seed{seed}"
        return make_row(position, length, mode="passkey", passkey=key, step=step, seed=seed, run=run)

    cells = ((128, 64), (1024, 64), (1024, 512))
    rows = [row("t5", *cell, share) for cell, share in zip(cells, (1.0, 0.5, 0.25), strict=True)]
    rows += [row("t5", *cell, share, seed=1) for cell, share in zip(cells, (1.0, 0.75, 0.25), strict=True)]
    rows += [row("fire", *cell, 0.0, step=4_000) for cell in cells]
    assert script._passkeys(script._of_method("t5", rows)) == ["100%", "62%", "25%"]
    assert script._passkeys(script._of_method("fire", rows)) == ["0%*", "0%*", "0%*"]
    assert script._passkeys(script._of_method("shaw", rows)) == ["-", "-", "-"]
