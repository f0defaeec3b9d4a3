"""docs/methods.md shows the methods and the committed results."""

import json
import re

from alibi.positions import METHODS
from alibi.reporting.rows import read_rows
from tools import methods_page


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
    shares = dict(
        re.findall(
            r"^\| \[`yarn`\]\(#yarn\)([^|]*) \|(?:[^|]*\|){4} ([^|]*) \|", page, re.MULTILINE
        )
    )
    assert shares == {", `fast=32.0`": "36%, 78%, 38%", "": "34%, 68%, 10%"}, "by option and seed"
