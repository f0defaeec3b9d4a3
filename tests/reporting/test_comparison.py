"""Our numbers beside the paper's: exact Markdown, text, CSV and LaTeX; best, missing and
incomparable numbers.
"""

import csv
import io

import pytest

from alibi.paper.definitions import parse_printed, published
from alibi.paper.results import NOT_RUN_HERE, NOT_RUN_YET
from alibi.reporting.tables import (
    PARAMETERS,
    PERPLEXITY,
    TRAINING_SPEED,
    Missing,
    Number,
    Table,
    compare,
    write_thousands,
)
from alibi.reporting.writers import to_csv, to_latex, to_markdown, to_text


def number(value, kind):
    return value if isinstance(value, Missing) else Number((value,), kind)


def cells(columns, rows, references, ratios):
    """The cells of (printed, ours) or None by row and column."""
    grid = [
        [
            (published(one[0], kind), number(one[1], kind)) if one else (None, None)
            for one, kind in zip(row, columns, strict=True)
        ]
        for row in rows
    ]
    return compare(grid, references, ratios=ratios)


ROWS = (
    (("18.67", 18.6), ("15.3k", 13770.0)),
    (("17.60", 17.75), ("15.5k", NOT_RUN_YET)),
    (("OOM", Missing("no memory at 3,072 tokens", is_reason=True)), None),
    (("15.81", NOT_RUN_HERE), None),
)
REFERENCES = {(row, column): (0, column) for row in range(3) for column in range(2)}


def compared(ratios=False, scale="paper"):
    """Two models, a third without memory, and a system of others."""
    return Table(
        caption="Table 6",
        label_header=("Model",),
        labels=(("Sinusoidal, L = 3072",), ("ALiBi",), ("T5 Bias",), ("kNN & co.",)),
        header=("Valid", "Speed"),
        cells=cells((PERPLEXITY, TRAINING_SPEED), ROWS, REFERENCES, ratios),
        parts=("paper", "ours", "difference of ratios" if ratios else "difference"),
        ratios=ratios,
        scale=scale,
        name=f"{scale}-06",
    )


MARKDOWN = """\
**Table 6**

| Model | Valid | Speed |
| --- | ---: | ---: |
| Sinusoidal, L = 3072 | 18.67 / 18.60 / -0.07 | 15.3k / 13.8k / -10% |
| ALiBi | 17.60 / 17.75 / +0.15 | 15.5k / not run yet |
| T5 Bias | OOM / no result [1] |  |
| kNN & co. | **15.81** / not run here |  |

[1] no memory at 3,072 tokens\x20\x20
"""


def test_markdown_and_text_mark_the_best_of_the_paper_and_none_of_single_runs_of_ours():
    assert to_markdown(compared()) == MARKDOWN
    text = to_text(compared())
    lines = text.splitlines()
    assert "15.81* / not run here" in text
    assert lines[5].split("  ")[-2:] == [" 17.60 / 17.75 / +0.15", " 15.5k / not run yet"]


def test_csv_has_three_columns_for_each_of_the_papers_and_says_its_scale():
    header, *rows = csv.reader(io.StringIO(to_csv(compared())))
    assert header[:5] == ["Scale", "Model", "Valid: paper", "Valid: ours", "Valid: difference"]
    assert rows[0] == [
        "paper",
        "Sinusoidal, L = 3072",
        "18.67",
        "18.6",
        "-0.07",
        "15.3k",
        "13770",
        "-0.1",
    ]
    assert rows[1] == ["paper", "ALiBi", "17.60", "17.75", "+0.15", "15.5k", "not run yet", ""]
    assert rows[3] == ["paper", "kNN & co.", "15.81", "not run here", "", "", "", ""]


LATEX = r"""\begin{table}
\caption{Table 6 [1] no memory at 3,072 tokens.}
\label{tab:paper-06}
\resizebox{\textwidth}{!}{%
\begin{tabular}{lrrrrrr}
\toprule
 & \multicolumn{3}{c}{Valid} & \multicolumn{3}{c}{Speed} \\
Model & paper & ours & diff. & paper & ours & diff. \\
\midrule
Sinusoidal, L = 3072 & 18.67 & 18.60 & -0.07 & 15.3k & 13.8k & -10\% \\
ALiBi & 17.60 & 17.75 & +0.15 & 15.5k & not run yet &  \\
T5 Bias & OOM & no result [1] &  &  &  &  \\
kNN \& co. & \textbf{15.81} & not run here &  &  &  &  \\
\bottomrule
\end{tabular}}
\end{table}
"""


def test_latex():
    assert to_latex(compared()) == LATEX


def test_at_another_scale_ratios_are_compared_and_values_are_not():
    first, second = to_markdown(compared(ratios=True, scale="small")).splitlines()[4:6]
    assert (
        first
        == "| Sinusoidal, L = 3072 | 18.67 (×1.00) / 18.60 (×1.00) | 15.3k (×1.00) / 13.8k (×1.00) |"
    )
    # 17.75 / 18.60 - 17.60 / 18.67 = 0.9543 - 0.9427.
    assert second.split(" | ")[1] == "17.60 (×0.94) / 17.75 (×0.95) / +0.01"
    assert r"17.60 ($\times$0.94) & 17.75 ($\times$0.95) & +0.01" in to_latex(compared(ratios=True))
    assert "Valid: difference of ratios" in to_csv(compared(ratios=True))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("19.73", 19.73),
        ("28.5k", 28500.0),
        ("247M", 247e6),
        ("15.3 GB", 15.3e9),
        ("OOM", None),
        ("", None),
    ],
)
def test_printed_numbers_are_read(text, value):
    assert parse_printed(text) == (None if value is None else pytest.approx(value, rel=1e-12))


def test_numbers_are_printed_as_the_paper_does():
    assert [write_thousands(value) for value in (28_512, 467, 0.0213)] == ["28.5k", "467", "0.0213"]
    assert [PARAMETERS.write(value) for value in (246_933_504, 3_141_592)] == ["247M", "3.1M"]
