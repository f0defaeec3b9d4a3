"""Tables print the values of the rows, ratios, the best, errors, and captions with the facts of the
numbers.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from alibi.evaluation.context_use import CONTEXT_GAIN
from alibi.reporting.names import series_names
from alibi.reporting.panels import build_table, caption
from alibi.reporting.tables import (
    BITS_PER_BYTE,
    PERPLEXITY,
    PSEUDO_PERPLEXITY,
    write_perplexity,
)
from alibi.reporting.writers import to_csv, to_latex, to_markdown, to_text
from tests.reporting.rowmaker import make_gains, make_row, panels

ROWS = [
    make_row("sinusoidal", 128, 8.0),
    make_row("sinusoidal", 256, 1234.0),
    make_row("alibi", 128, 9.0),
    make_row("alibi", 256, 8.1),
    make_row("learned", 128, 10.0),
    make_row("learned", 256, None, error="learned has 128 positions"),
]

MARKDOWN = """\
**Perplexity by evaluation length: books, split valid, non-overlapping windows (stride = length); \
1,000 tokens scored in each cell; seed 0; step 600; commit 0123456789ab; on cpu x1. ±: the larger side of \
the 95% interval over the text alone; another book or corpus is not covered.**

| run | trained at L | 128 | 256 |
| --- | ---: | ---: | ---: |
| sinusoidal | 128 | **8.00 ± 0.31** (×1.00) | 1,234 ± 172.42 (×154) |
| alibi | 128 | 9.00 ± 0.37 (×1.00) | **8.10 ± 0.32** (×0.90) |
| learned | 128 | 10.00 ± 0.43 (×1.00) | no result [1] |

[1] learned has 128 positions\x20\x20
"""

TEXT = """\
Perplexity by evaluation length: books, split valid, non-overlapping windows (stride = length);
1,000 tokens scored in each cell; seed 0; step 600; commit 0123456789ab; on cpu x1. ±: the larger
side of the 95% interval over the text alone; another book or corpus is not covered.

run         trained at L                   128                    256
----------  ------------  --------------------  ---------------------
sinusoidal           128  8.00 ± 0.31 (×1.00)*  1,234 ± 172.42 (×154)
alibi                128   9.00 ± 0.37 (×1.00)   8.10 ± 0.32 (×0.90)*
learned              128  10.00 ± 0.43 (×1.00)          no result [1]
[1] learned has 128 positions
"""


def body(table):
    """The rows of a table in Markdown."""
    return to_markdown(table).splitlines()[4:]


def with_parts(row, spread=0.01):
    """The row with a text in four parts; the second costs `spread` more than the first."""
    parts = tuple(row.results["nll_nats"] * (0.25 * (1 + spread * np.array([-1, 1, -1, 1]))))
    return dataclasses.replace(row, results=row.results | {"parts": parts})


def test_a_wide_table_is_printed_in_parts_that_fit_a_terminal():
    """Each part has the names of the rows, and together they have each column once."""
    lengths = [128 * 2**n for n in range(12)]
    runs = ("alibi", "sinusoidal")
    (panel,) = panels([make_row(run, length, 8.0) for run in runs for length in lengths])
    text = to_text(build_table(panel))
    assert max(map(len, text.splitlines())) <= 120
    heads = [line.split() for line in text.splitlines() if line.startswith("run ")]
    assert len(heads) > 1
    assert [name for head in heads for name in head if name[0].isdigit()] == [
        f"{length:,}" for length in lengths
    ]
    for run in runs:
        assert sum(line.startswith(run) for line in text.splitlines()) == len(heads)


def test_each_format_of_a_table_of_ours():
    """Columns are 0.1 nats apart, and the same parts of the text are hard for all: the best is sure."""
    (panel,) = panels([row if row.error else with_parts(row) for row in ROWS])
    table = build_table(panel)
    assert to_markdown(table) == MARKDOWN
    assert to_text(table) == TEXT
    assert to_csv(table).splitlines() == [
        "run,trained at L,128,256",
        "sinusoidal,128,8,1234",
        "alibi,128,9,8.1",
        "learned,128,10,learned has 128 positions",
    ]
    assert (
        r"alibi & 128 & 9.00 ± 0.37 ($\times$1.00) & \textbf{8.10 ± 0.32 ($\times$0.90)} \\"
        in to_latex(table)
    )
    assert r"\begin{tabular}{llrr}" in to_latex(table)


def test_bits_per_byte_and_a_cell_that_was_not_evaluated():
    (panel,) = panels(
        [make_row(length=128, perplexity=8.0), make_row("t5", 256, 4.0)], BITS_PER_BYTE
    )
    table = build_table(panel)
    # log2(8) = 3; without a value at its own L there is no ratio; a best needs two to compare.
    assert (table.labels, table.header) == ((("alibi", 128), ("t5", 128)), (128, 256))
    assert body(table) == ["| alibi | 128 | 3.000 (×1.00) |  |", "| t5 | 128 |  | 2.000 |"]
    assert not any(number.best for row in table.cells for cell in row for number in cell if number)
    assert table.caption.startswith("Bits per byte by evaluation length: books")


def test_runs_that_differ_only_in_their_seed_become_a_mean_with_its_interval():
    (panel,) = panels(
        [
            make_row(perplexity=8.0),
            make_row(perplexity=9.0, seed=1),
            make_row(perplexity=10.0, seed=2),
        ]
    )
    table = build_table(panel)
    ((number,),) = table.cells[0]
    assert (number.mean, len(number.values)) == (9.0, 3)
    # In nats, by Student's t with two degrees of freedom; its ends are no mirror images.
    low, high = ttest_1samp(np.log([8, 9, 10]), 0).confidence_interval()
    assert number.interval.bounds == pytest.approx((math.exp(low), math.exp(high)))
    assert body(table) == [f"| alibi | 128 | 9.00 ± {math.exp(high) - 9:.2f} (×1.00) |"]
    assert "seed 0, 1, 2;" in table.caption
    assert table.caption.endswith(
        "±: the larger side of the 95% interval over seeds alone; another book or corpus is not covered."
    )


def test_each_cell_says_what_its_interval_covers_if_cells_differ():
    """One series has the parts of the text, the other does not."""
    seeds = range(3)
    known = [with_parts(make_row("alibi", 128, 9.0 + seed, seed=seed)) for seed in seeds]
    (panel,) = panels([*known, *[make_row("rotary", 128, 9.0 + seed, seed=seed) for seed in seeds]])
    table = build_table(panel)
    with_text, seeds_alone = body(table)
    assert "†" not in with_text
    assert "† (×1.00)" in seeds_alone
    covered = "95% interval over seeds and the text, † over seeds alone; another book"
    assert covered in table.caption


def test_a_caption_says_where_and_when_the_rows_were_made():
    """Days become a range; rows of earlier versions know neither processor, version nor date."""
    made = {"processor": "AMD EPYC 7B13", "jax": "0.10.2"}
    days = ("2026-11-29T08:00:00Z", "2026-11-27T09:30:00Z", "2026-11-27T10:00:00Z")
    rows = [make_row(seed=seed, **made, date=day) for seed, day in enumerate(days)]
    known = "commit 0123456789ab; on cpu x1 (AMD EPYC 7B13); jax 0.10.2"
    (panel,) = panels(rows)
    assert f"{known}; 2026-11-27 to 2026-11-29." in caption(panel)
    (panel,) = panels(rows[1:])
    assert f"{known}; 2026-11-27." in caption(panel)
    (panel,) = panels([*rows[1:], make_row("t5")])
    assert "on cpu x1 (AMD EPYC 7B13), cpu x1; jax 0.10.2; 2026-11-27." in caption(panel)


def test_a_caption_says_how_many_rows_are_of_uncommitted_code():
    (panel,) = panels([make_row(), make_row(seed=1, commit="0123456789abcdef-dirty")])
    assert "; 1 of its rows from uncommitted code." in caption(panel)
    (panel,) = panels([make_row()])
    assert "uncommitted" not in caption(panel)


def best(*rows):
    """The series that is marked at 128."""
    (panel,) = panels(rows)
    return [series.label for series in panel.series if series.cells[128].best]


def test_the_best_is_marked_only_beyond_chance():
    """8 and 8.1 are 0.0124 nats apart; parts vary by 0.02 nats for all, or for one of the two."""
    alibi, t5 = make_row(), make_row("t5", perplexity=8.1)
    assert best(alibi, t5) == [], "single runs of which nothing else is known"
    assert best(with_parts(alibi), t5) == []
    assert best(with_parts(alibi), with_parts(t5)) == ["alibi"], "hard parts are hard for both"
    assert best(with_parts(alibi), with_parts(t5, -0.01)) == []
    assert best(with_parts(alibi), with_parts(make_row("t5", perplexity=8.1, seed=1))) == []
    seeds = [make_row(seed=1, perplexity=8.2), make_row("t5", seed=1, perplexity=8.31)]
    assert best(alibi, t5, *seeds) == ["alibi"], "each seed by 0.1"
    assert best(alibi, t5, seeds[0], make_row("t5", seed=1, perplexity=8.25)) == []
    # Beyond chance better than the worst is not enough, and equal results are the best together.
    last = make_row("none", perplexity=99.0)
    rows = [with_parts(row) for row in (alibi, t5, last)]
    assert best(*rows) == ["alibi"]
    assert best(rows[0], with_parts(t5, -0.01), rows[2]) == []
    assert best(*rows, with_parts(make_row("rotary"))) == ["alibi", "rotary"]


def test_the_interval_covers_what_is_known():
    """The text of a single run, seeds without parts, or both; the explanation names each."""
    found = {
        "over the text alone": [with_parts(make_row())],
        "over seeds alone": [make_row(), with_parts(make_row(perplexity=8.1, seed=1))],
        "over seeds and the text": [with_parts(make_row(perplexity=8 + s, seed=s)) for s in (0, 1)],
    }
    halves = {}
    for covered, rows in found.items():
        for kind in (PERPLEXITY, BITS_PER_BYTE):
            (panel,) = panels(rows, kind)
            assert f"the 95% interval {covered};" in caption(panel)
            (number,) = panel.numbers
            halves[covered, kind] = number.interval.high - number.mean
    # Bits per byte of a token a byte are nats by log 2: perplexity's interval follows from theirs.
    half = halves["over the text alone", BITS_PER_BYTE] * math.log(2)
    assert halves["over the text alone", PERPLEXITY] == pytest.approx(8 * math.expm1(half))
    (panel,) = panels([make_row(), make_row("t5")])
    assert "±" not in caption(panel)


def defined(run, seedless_hash="first config", **changed):
    """A row that knows its config without its seed."""
    return make_row(run=run, seedless_hash=seedless_hash, **changed)


@pytest.mark.parametrize(
    ("rows", "means"),
    [
        # Six updates, and sixty at another learning rate: their mean 79.35 is of nothing.
        (
            [
                defined("base-seed0", perplexity=153.76, step=6),
                defined("base-seed1", "second config", perplexity=4.94, step=60, seed=1),
            ],
            {"base-seed0 (step 6)": [(153.76,)], "base-seed1 (step 60)": [(4.94,)]},
        ),
        # A third seed was stopped at update 10: its name differs from the mean's in the step alone.
        (
            [
                defined("alibi-L128-seed0", perplexity=6.0, step=20),
                defined("alibi-L128-seed1", perplexity=6.2, step=20, seed=1),
                defined("alibi-L128-seed2", perplexity=15.2, step=10, seed=2),
            ],
            {"alibi (step 20)": [(6.0, 6.2)], "alibi (step 10)": [(15.2,)]},
        ),
        # Two runs of the same config and seed, which repeat each other.
        (
            [defined("alibi", perplexity=8.0), defined("alibi-seed0", perplexity=8.0)],
            {"alibi": [(8.0,)], "alibi-seed0": [(8.0,)]},
        ),
        # Two ways to compute the same results, with two seeds each: two means, not one over four.
        (
            [
                defined(f"alibi-attention={way}-seed{seed}", perplexity=8.0 + seed, seed=seed)
                for way in ("blocked", "reference")
                for seed in (0, 1)
            ],
            {
                "alibi-attention=blocked": [(8.0, 9.0)],
                "alibi-attention=reference": [(8.0, 9.0)],
            },
        ),
        # Its user named runs by hand; the config says that they differ in their seed only.
        (
            [defined("monday", perplexity=8.0), defined("tuesday", perplexity=9.0, seed=1)],
            {"monday, tuesday": [(8.0, 9.0)]},
        ),
        # A name that two lines would share stands whole in both, since a part of it tells nothing.
        (
            [
                defined("base-seed0", perplexity=8.0),
                defined("other", perplexity=9.0, seed=1),
                defined("base-seed2", "second config", perplexity=7.0, seed=2),
            ],
            {"base-seed0, other": [(8.0, 9.0)], "base-seed2": [(7.0,)]},
        ),
        # Rows that do not know their config go by name, size and step.
        ([make_row(perplexity=8.0), make_row(perplexity=9.0, seed=1)], {"alibi": [(8.0, 9.0)]}),
        (
            [make_row(perplexity=8.0), make_row(perplexity=9.0, seed=1, parameters=10)],
            {"alibi-L128-seed0": [(8.0,)], "alibi-L128-seed1": [(9.0,)]},
        ),
        # One failed seed does not hide the others.
        (
            [make_row(perplexity=8.0), make_row(perplexity=None, seed=1, error="no memory left")],
            {"alibi": [(8.0,)]},
        ),
    ],
)
def test_only_runs_that_differ_in_their_seed_are_averaged(rows, means):
    (panel,) = panels(rows)
    found = {
        series.label: [cell.values for cell in series.cells.values() if cell]
        for series in panel.series
    }
    assert found == means


def test_nothing_is_best_among_tokens_of_several_tokenizers():
    # The same text as 5,680 bytes and as 961 words: a word is harder than a byte.
    rows = [
        make_row("alibi", perplexity=8.0, tokens_sha256="bytes", bits_per_byte=3.0),
        make_row("t5", perplexity=99.0, tokens_sha256="words", bits_per_byte=2.0),
    ]
    (panel,), (by_byte,) = panels(rows), panels(rows, BITS_PER_BYTE)
    assert not any(number.best for number in panel.numbers)
    assert "Compare bits per byte." in panel.measure.explanation(panel)
    assert not any(number.best for number in by_byte.numbers), "their tokens are no common parts"
    # A second seed pairs them: 1 and 1.1 bits are a sure difference, 1 and 1.5 are none.
    for bits, best in ((3.1, True), (3.5, False)):
        again = [
            make_row("alibi", seed=1, tokens_sha256="bytes", bits_per_byte=bits),
            make_row("t5", seed=1, tokens_sha256="words", bits_per_byte=2.0),
        ]
        (by_byte,) = panels([*rows, *again], BITS_PER_BYTE)
        assert [number.best for number in by_byte.numbers] == [False, best]
    assert "The best of a column is marked only if" in by_byte.measure.explanation(by_byte)


def test_other_masks_are_never_compared_in_one_table():
    masks = {"name": "masked", "mask_random": 0.1, "mask_kept": 0.1}
    rows = [make_row(f"mask-{rate}", objective={"mask_rate": rate} | masks) for rate in (0.15, 0.4)]
    found = panels(rows, PSEUDO_PERPLEXITY)
    assert [panel.reading for panel in found] == [
        "mask_rate 0.15, mask_random 0.1, mask_kept 0.1",
        "mask_rate 0.4, mask_random 0.1, mask_kept 0.1",
    ]
    assert "; mask_rate 0.4, mask_random 0.1, mask_kept 0.1;" in build_table(found[1]).caption


def test_other_strides_splits_and_corpora_are_never_compared_in_one_table():
    sliding = {"options": {"stride": 1}}
    rows = [
        make_row(),
        make_row(split="test"),
        make_row(corpus="other"),
        make_row(**sliding),
        make_row("t5", 256, **sliding),
    ]
    found = panels(rows)
    assert [(panel.corpus, panel.split, panel.measure.stride) for panel in found] == [
        ("books", "valid", None),
        ("books", "test", None),
        ("other", "valid", None),
        ("books", "valid", 1),
    ]
    assert found[3].columns == [128, 256]
    assert "sliding windows, stride 1;" in build_table(found[3]).caption


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.0, "8.00"),
        (999.99, "999.99"),
        (999.999, "1,000"),
        (15512.4, "15,512"),
        (999999.9, "1.0e+06"),
        (3e9, "3.0e+09"),
    ],
)
def test_perplexities_are_printed_with_as_many_digits_as_mean_something(value, text):
    assert write_perplexity(value) == text


@pytest.mark.parametrize(
    ("run", "seed", "label"),
    [
        ("alibi-L128-seed0", 0, "alibi-L128"),
        ("seed12-alibi", 12, "alibi"),
        ("alibi-L128-steps=9-seed1", 1, "alibi-L128-steps=9"),
        ("seed3", 3, "seed3"),
        ("-dash", 0, "-dash"),  # other marks are the user's
        ("alibi-seed12", 1, "alibi-seed12"),  # its seed is the row's, not what its name looks like
    ],
)
def test_a_series_is_the_name_of_its_runs_without_the_seed(run, seed, label):
    assert make_row(run=run, seed=seed).series == label


def test_a_pipe_or_newline_in_an_error_does_not_break_the_markdown():
    (panel,) = panels([make_row(run="a|b", perplexity=None, error="x")])
    assert "| a\\|b | 128 | no result [1] |" in to_markdown(build_table(panel))


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        # One train length, and a key that all share: neither tells the runs apart.
        (("alibi-L128-clip_norm=0.5", "t5-L128-clip_norm=0.5"), ("alibi", "t5")),
        (
            ("alibi-L128-steps=1e-3", "alibi-L128-steps=1e-4"),
            ("alibi-steps=1e-3", "alibi-steps=1e-4"),
        ),
        (("alibi-L128-window=8-steps=9", "t5-L128-steps=9"), ("alibi-window=8", "t5")),
        # Names that a user gave say what he wants, and names that would be the same stay whole.
        (("sinusoidal", "sinusoidal-window"), ("sinusoidal", "sinusoidal-window")),
        (("alibi", "alibi-L128"), ("alibi", "alibi-L128")),
        (("alibi-L128-steps=9",), ("alibi-steps=9",)),
        # Train lengths stand in names where there are several.
        (({"run": "alibi-L64", "train_length": 64}, "alibi-L128"), ("alibi-L64", "alibi-L128")),
        # A run that is tested as another method keeps what it is tested as.
        (
            (
                "rotary-L128",
                {
                    "run": "rotary-L128",
                    "override": {"position": "yarn", "options": {"factor": 4}, "window": None},
                },
            ),
            ("rotary", "rotary as yarn(factor=4)"),
        ),
    ],
)
def test_tables_and_figures_name_runs_by_the_keys_that_differ(runs, names):
    rows = [make_row(**(run if isinstance(run, dict) else {"run": run})) for run in runs]
    assert tuple(series_names(rows).values()) == names


def test_two_sets_of_lengths_are_one_run():
    """Between the same ends a run has one gain at a length, the last, and not one for each set. The
    longest window decides where the tokens lie: a table of one length's old gain beside new ones would
    mix.
    """
    gains = {128: 0.0, 256: 0.1, 512: 0.2}
    rows = [make_gains("alibi", gains), make_gains("alibi", {128: 0.0, 512: 0.25})]
    (panel,) = panels(rows, CONTEXT_GAIN)
    assert [number.values for number in panel.numbers] == [(0.0,), (0.1,), (0.25,)]
    more = make_gains("alibi", gains | {1024: 0.3})
    assert [panel.columns for panel in panels([*rows, more], CONTEXT_GAIN)] == [
        [128, 256, 512],
        [128, 256, 512, 1024],
    ]
