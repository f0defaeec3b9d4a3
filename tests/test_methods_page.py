"""docs/methods.md shows the methods and the committed results."""

import json
import re

from alibi.config.override import Override
from alibi.positions import METHODS
from alibi.reporting.rows import read_rows
from tests.reporting.rowmaker import make_gains, make_key, make_row
from tools import methods_page


def measured(page):
    """Returns the cells of measurements, by the method's name with its option."""
    lines = [
        line.split(" | ")
        for line in page.partition("## What was measured")[2].splitlines()
        if line[:3] == "| ["
    ]
    return {
        first.removeprefix("| "): [*cells[:-1], cells[-1].removesuffix(" |")]
        for first, *cells in lines
    }


def test_the_page_is_fresh_and_has_each_method():
    speeds = json.loads(methods_page.SPEED.read_text())
    page = methods_page.page(read_rows(methods_page.ROWS), read_rows(methods_page.KEYS), speeds)
    assert methods_page.PAGE.read_text() == page, "run: python -m tools.methods_page"
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [*METHODS]
    enters = dict(
        re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \|.*\| ([a-z, ]+) \| [\d,]+ \|$", page, re.MULTILINE)
    )
    assert enters["alibi"] == enters["kerple_log"] == "logits"
    assert enters["rotary"] == enters["yarn"] == "queries, keys"
    assert enters["fox"] == "logits by content"
    assert (enters["learned"], enters["none"]) == ("embeddings", "nowhere")


def test_measurements_stand_beside_their_method():
    rows = [
        make_row("rotary", 128, 2.0, run="rotary-seed0"),
        make_row("rotary", 2048, 8.0, run="rotary-seed0"),
    ]
    rows += [
        make_row(
            "rotary",
            2048,
            2.0,
            run="rotary-seed0",
            override=Override("yarn", (("fast", 32.0),)).to_json(),
        )
    ]
    rows += [make_gains("rotary", {128: 0.0, 2048: -0.25}, run="rotary-seed0")]
    speeds = [
        {"contender": name, "length": length, "run": {"of_none": 0.9}}
        for name in ("t5", "rotary")
        for length in (128, 2048)
    ]
    cells = measured(methods_page.page(rows, [], speeds))
    assert cells["[`rotary`](#rotary)"][:3] == ["1.000", "3.000", "-0.2500"]
    assert cells["[`yarn`](#yarn), `fast=32.0`"][:3] == ["-", "1.000", "-"]
    assert "[`yarn`](#yarn)" not in cells, "the default was not measured"
    assert cells["[`alibi`](#alibi)"][:3] == ["-", "-", "-"]
    assert (
        cells["[`t5`](#t5), `max_distance=128`"][6:]
        == cells["[`rotary_ntk`](#rotary_ntk)"][6:]
        == ["0.90", "-", "0.90", "-"]
    )
    assert cells["[`none`](#none)"][6:] == ["1.00"] * 4, "its own speed is the measure"


def test_passkeys_are_told_by_seed():
    def row(position, length, distance, accuracy, seed=0):
        known = {"seed": seed, "run": f"{position}-seed{seed}"}
        return make_key(position, length, distance, accuracy, **known)

    asked = ((128, 64), (1024, 64), (1024, 512))
    rows = [row("t5", *cell, share) for cell, share in zip(asked, (1.0, 0.5, 0.25), strict=True)]
    rows += [
        row("t5", *cell, share, seed=1)
        for cell, share in zip(asked, (1.0, 0.75, 0.25), strict=True)
    ]
    rows += [row("fire", *cell, 0.0) for cell in asked]
    cells = measured(methods_page.page([], rows, []))
    assert cells["[`t5`](#t5), `max_distance=128`"][3:6] == ["100%, 100%", "50%, 75%", "25%, 25%"]
    assert cells["[`fire`](#fire), `threshold=512`"][3:6] == ["late", "late", "late"]
    assert cells["[`xpos`](#xpos), `scale_base=512.0`"][3:6] == ["-", "-", "-"]
