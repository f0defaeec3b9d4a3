"""Every figure on the pages of results is that of its rows, and one without rows is found; sentences
are short.
"""

import re

import numpy as np
import pytest
from scipy import stats

from tests.hosts import ROOT
from tests.reporting.rowmaker import append_rows, make_key, make_row
from tools import check_pages, page_figures, page_sentences

PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES = [
    *(page for page in PROSE if "<!-- rows: " in page.read_text()),
    *sorted((ROOT / "results").glob("**/README.md")),
]
SEEDS = (4.0, 4.5, 4.3)


@pytest.fixture
def page(tmp_path):
    """Returns a function that checks a page of one line, in a folder with rows of ALiBi at 128 and
    256 of three seeds, and passkeys.
    """
    for seed, perplexity in enumerate(SEEDS):
        at = {"run": f"alibi-seed{seed}", "seed": seed}
        append_rows(tmp_path / "results.jsonl", [make_row("alibi", 128, perplexity, **at)])
        append_rows(tmp_path / "results.jsonl", [make_row("alibi", 256, 2 * perplexity, **at)])
    found = {"results": {"accuracy": 0.08, "prompts": 200}, "options": {}}
    asked = make_key("alibi", 256, 64, 0.08, run="alibi-seed0", **found)
    append_rows(tmp_path / "results.jsonl", [asked])

    def check(line):
        (tmp_path / "README.md").write_text(line + "\n")
        text, count, wrong = check_pages.checked(tmp_path / "README.md")
        return text.removesuffix("\n"), count, [one.removeprefix(str(tmp_path)) for one in wrong]

    return check


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_figure_is_that_of_its_rows(path):
    """None but facts of the rows passes without its expression: as many are found as are checked."""
    text, count, wrong = check_pages.checked(path)
    assert not wrong, "after new rows: python -m tools.check_pages --write"
    assert text == path.read_text()
    assert count >= 5
    assert len(check_pages.checked(path, re.sub(r"<!-- (?!rows:).*? -->", "", text))[2]) == count


def test_the_pages_are_those_of_the_script():
    assert check_pages.pages() == PAGES
    assert set(PROSE) <= set(check_pages.prose())


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_sentences_are_short():
    assert [one for page in check_pages.prose() for one in check_pages.too_long(page)] == []


def test_a_long_sentence_is_found_with_its_line():
    words = " ".join(["word"] * 35)
    find = page_sentences.long_sentences
    assert find(f"# Title\n\n{words}.\n") == []
    (found,) = find(f"# Title\n\nShort.\n\n{words} more. Next.\n")
    assert found == (5, 36, f"{words} more.")
    # lines of a paragraph belong together; items of a list, and sentences, don't
    half = " ".join(["word"] * 20)
    assert len(find(f"{half}\n{half}")) == 1
    assert find(f"- {half}\n- {half}") == find(f"{half}. {half}.".title()) == []
    assert len(find(f"{half}, by Press et al. {half}")) == 1
    # neither do code, tables, comments and targets of links
    for other in (f"```\n{words} more\n```", f"    {words} more", f"| {words} more |"):
        assert find(other) == []
    assert find(f"{half} <!-- {words} --> [{half[:-9]}]({words.replace(' ', '/')}).") != []
    assert find(f"{half} <!-- {words} --> [text]({words.replace(' ', '/')}).") == []


def test_shares_of_a_task_and_its_effective_length(page, tmp_path):
    """The mean of the seeds counts, and a longer length after a bad one does not."""
    shares = {64: (1.0, 0.9, 0.98), 128: (0.99, 0.8, 0.94), 256: (0.89, 0.9, 0.9), 512: (1.0,) * 3}
    for length, of_seeds in shares.items():
        for seed, exact in enumerate(of_seeds):
            at = {"seed": seed, "cell": {"length": length}, "results": {"exact": exact}}
            row = make_row("alibi", run=f"copy-alibi-seed{seed}", evaluator="task", **at)
            append_rows(tmp_path / "results.jsonl", [row])
    claims = 'right("copy-alibi", 64), effective("copy-alibi") == 128'
    assert page(f"96%<!-- {claims} -->")[1:] == (1, [])
    assert page('96%<!-- right("copy-alibi", 64), effective("copy-alibi", 0.99) == 0 -->')[2] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ALiBi is at 4.27.", "4.27: no expression says where it comes from"),
        ('4.27<!-- ppl("alibi", 128) --> and 8.53', "8.53: no expression says where it comes from"),
        ('4.27 and 8.53<!-- ppl("alibi", 128) -->', "8.53: no expression says where it comes from"),
        # the mean of 4.0, 4.5 and 4.3
        ('4.37<!-- ppl("alibi", 128) -->', 'ppl("alibi", 128): 4.37 is printed, not 4.27'),
        ('4.27<!-- ppl("alibi", 4096) -->', 'ppl("alibi", 4096): no row of alibi at 4096 in results.jsonl'),
        ('4.27<!-- ppl("fire", 128, file="gone.jsonl") -->', "no row of fire at 128 in gone.jsonl"),
        ('4.27<!-- ppl("alibi", 128), ppl("alibi", 256) -->', "no number is printed for it"),
        ('4.27<!-- ppl("alibi", 256) < ppl("alibi", 128) -->', "the rows don't show it"),
        ('4.27<!-- nats("alibi", 128, corpus="books") -->', "4.27 is printed, not 1.45"),
        ("4.27<!-- ppl( -->", "no Python expression"),
        ("4.27<!-- perplexity(3) -->", "name 'perplexity' is not defined"),
        ('4.27<!-- open("/etc/hostname") -->', "name 'open' is not defined"),
        ('4.27<!-- paper(2, 15512, "T5 Bias PPL") -->', "the paper prints OOM"),
        ('4.27<!-- ppl("alibi", 128) + ppl("alibi", 256, seed=0) -->', "are no pairs"),
        ('4.0 ± 0.1<!-- ppl("alibi", 128, seed=0) -->', "one seed has no interval"),
        ("<!-- rows: gone.jsonl -->\nat 128", "128: no expression says where it comes from"),
        ("    at 4.37\n```\n4.38\n```\n4.39", "4.39: no expression says where it comes from"),
    ],
)  # fmt: skip
def test_a_figure_that_no_row_shows_is_named_with_its_line(page, line, message):
    _, _, (wrong,) = page(line)
    assert wrong.startswith(f"/README.md:{line.count(chr(10)) + 1}: ")
    assert message in wrong


def test_rows_that_differ_in_more_than_the_seed_are_not_averaged(page, tmp_path):
    other = make_row("alibi", 128, run="alibi-seed0", corpus="news")
    append_rows(tmp_path / "results.jsonl", [other])
    _, _, (wrong,) = page('4.27<!-- ppl("alibi", 128) -->')
    assert "4 rows of 3 seeds; name more" in wrong
    assert page('4.27<!-- ppl("alibi", 128, corpus="books") -->')[2] == []


def test_figures_are_written_in_the_format_they_have(page):
    one = 'ppl("alibi", 128)'
    for printed, expression, written in (
        ("0.0", one, "4.3"),
        ("+0.00", one, "+4.27"),
        ("0.00", f"{one} * -1", "-4.27"),
        ("x0.00", 'ratio("alibi", 256)', "x2.00"),
        ("×0.0", 'ratio("alibi", 256)', "×2.0"),
        ("0.0%", 'found("alibi", 256, 64)', "8.0%"),
        ("0", f"{one} * 1000", "4,267"),
        ("0.0M", "1234567", "1.2M"),
    ):
        assert page(f"at {printed}<!-- {expression} -->.")[0].startswith(f"at {written}<"), printed
    # a line whose figures and expressions differ in number stays as it is
    assert page(f"1.5 and 2.5<!-- {one} -->")[0] == f"1.5 and 2.5<!-- {one} -->"


def test_after_plus_minus_stands_the_t_interval_of_the_seeds(page):
    low, high = stats.ttest_1samp(SEEDS, 0).confidence_interval(0.95)
    text, count, _ = page('0.000 ± 0.000<!-- ppl("alibi", 128) -->')
    assert text.startswith(f"{(low + high) / 2:.3f} ± {(high - low) / 2:.3f}<")
    assert count == 2
    # of a difference the seeds are pairs: here 4.0, 4.5 and 4.3 again
    paired, _, _ = page('0.000 ± 0.000<!-- ppl("alibi", 256) - ppl("alibi", 128) -->')
    assert paired.partition("<")[0] == text.partition("<")[0]


def test_shares_of_passkeys_have_wilson_intervals(page):
    # 16 of 200 by Wilson's formula, with z = 1.95996
    z, share, prompts = stats.norm.ppf(0.975), 0.08, 200
    middle = (share + z**2 / (2 * prompts)) / (1 + z**2 / prompts)
    spread = (share * (1 - share) / prompts + z**2 / (4 * prompts**2)) ** 0.5
    spread *= z / (1 + z**2 / prompts)
    text, _, _ = page('[0.00%, 0.00%]<!-- wilson("alibi", 256, 64) -->')
    assert text.startswith(f"[{middle - spread:.2%}, {middle + spread:.2%}]")


def test_facts_need_no_expression_and_near_ones_do(page):
    facts = "128 and 256, at 2 L, 3 seeds, seed 2, 0.83M parameters, 826,112, 600 updates, 200 keys"
    assert page(facts)[1:] == (0, [])
    names = "GPT-2, T5, `4.5`, [2](table02.md), tables 13 and 14, 2026-11-21, arXiv 2108.12409, 95% interval"
    assert page(names)[1:] == (0, [])
    for figure in ("2", "129", "128%", "x128", "+128", "3 L", "4 seeds", "seed 3", "0.84M", "95%"):
        assert page(f"at {figure} there")[2], figure


def test_a_page_of_no_rows_is_not_checked(page):
    assert page("<!-- rows: none -->\nALiBi is at 4.37")[2] == []


def test_claims_of_several_methods_are_adjusted_and_paired_by_seed(page):
    """By hand: the smallest p counts thrice, the next twice, and none is below the one before it."""
    by_seed = {"one": (-1.0, -1.1, -0.9), "two": (0.1, -0.2, 0.2), "three": (-0.5, -0.1, -0.6)}
    per_seed = {
        name: page_figures.PerSeed(dict(enumerate(values))) for name, values in by_seed.items()
    }
    p = {name: stats.ttest_1samp(values, 0).pvalue for name, values in by_seed.items()}
    assert p["one"] < p["three"] < p["two"]
    expected = {"one": 3 * p["one"], "three": 2 * p["three"], "two": max(p["two"], 2 * p["three"])}
    assert page_figures.holm(**per_seed) == pytest.approx(expected)
    share, low, high = page_figures.fieller(per_seed["one"], per_seed["one"])
    assert (share, low, high) == pytest.approx((1, 1, 1))
    assert page_figures.tau([*per_seed.values()], [per_seed["two"] * -1] * 3) == (0, 1)
    reversed_means = [one * -1 for one in per_seed.values()]
    assert page_figures.tau([*per_seed.values()], reversed_means) == (-1, pytest.approx(2 / 6))


def test_two_models_are_compared_in_nats_by_seed(page, tmp_path):
    for seed, other in enumerate((4.01, 4.49, 4.32)):
        row = make_row("rotary", 128, other, run=f"rotary-seed{seed}", seed=seed)
        append_rows(tmp_path / "results.jsonl", [row])
    offsets = np.log(SEEDS) - np.log((4.01, 4.49, 4.32))
    for outside, margin in ((0.05, 0.02), (0.025, 0)):
        half = -stats.t.ppf(outside, 2) * offsets.std(ddof=1) / 3**0.5
        low, high = offsets.mean() - half, offsets.mean() + half
        verdict = "equivalent" if margin else "undecided"
        call = f'beside("alibi", "rotary", 128, {margin})'
        line = f'{low:.4f} {high:.4f}<!-- {call}[0], {call}[1], {call}[2] == "{verdict}" -->'
        assert page(line) == (line, 2, [])
