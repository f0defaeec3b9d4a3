"""The quickstart's rows in this repository show what the README says of them."""

import pathlib

from alibi.reporting.rows import read_rows

ROOT = pathlib.Path(__file__).parents[2]
ROWS = ROOT / "results" / "quickstart" / "results.jsonl"


def test_alibi_extrapolates_and_sinusoidal_does_not():
    perplexity = {(row["position"], row["eval_length"]): row["perplexity"] for row in read_rows(ROWS)}
    assert len(perplexity) == 20  # four methods, at L to 16L
    assert perplexity["alibi", 2048] < perplexity["alibi", 128]
    assert perplexity["sinusoidal", 1024] > 2 * perplexity["sinusoidal", 128]
    assert perplexity["alibi", 128] <= perplexity["sinusoidal", 128]


def test_the_table_of_the_readme_is_theirs():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = read_rows(ROWS)
    for position in ("sinusoidal", "rotary", "t5", "alibi"):
        of_method = sorted((row for row in rows if row["position"] == position), key=lambda row: row["eval_length"])
        own = of_method[0]["perplexity"]
        cells = [f"{row['perplexity']:.2f} (×{row['perplexity'] / own:.2f})" for row in of_method]
        (line,) = (line.replace("*", "") for line in lines if line.startswith(f"| {position}-L128 |"))
        assert line == f"| {position}-L128 | 128 | {' | '.join(cells)} |"
