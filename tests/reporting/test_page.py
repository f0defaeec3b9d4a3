"""The report's page in a browser: it shows, switches and sorts, and sends no request."""

import dataclasses
import json
import math
import pathlib
import re
import runpy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from alibi.reporting import report
from alibi.reporting.report import MOST_POINTS, RunSource, training_curve, write_report
from alibi.reporting.rows import read_rows
from alibi.storage.files import append_row, resolve
from tests.reporting.rowmaker import append_rows, make_key, make_row

ROOT = pathlib.Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "quickstart" / "report.html"

# The lowest perplexity is alibi's at 512; sinusoidal has two seeds, and one length at which it
# failed.
PERPLEXITIES = {"sinusoidal": [8.0, 80.0, 900.0], "alibi": [8.1, 7.9, 7.8], "t5": [8.2, 9.0, 11.0]}
ROWS = [
    make_row(position, 128 * 2**i, value)
    for position, values in PERPLEXITIES.items()
    for i, value in enumerate(values)
] + [make_row("sinusoidal", 128, 10.0, seed=1), make_row("<b>", 128, 20.0, run="<b>&odd")]


def source(position: str, store: pathlib.Path | None = None, seed: int = 0) -> RunSource:
    config = {"position": position, "seed": seed, "train.steps": 20}
    name = f"{position}-L128-seed{seed}"
    return RunSource(
        name, config, f"python train.py --workdir=runs/{name}", resolve(store) if store else None
    )


def log(folder: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    for row in rows:
        append_row(resolve(folder) / "metrics.jsonl", row)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The report on ROWS, with one run's metrics."""
    folder = tmp_path_factory.mktemp("report")
    append_rows(folder / "results.jsonl", ROWS)
    metrics = [
        {"step": step, "train_nll": 5.0 - step / 10, "train_tokens": 100.0} for step in (10, 20)
    ]
    runs = [
        source("alibi", log(folder / "runs" / "alibi", [*metrics, {"step": 20, "valid_nll": 3.5}])),
        source("t5"),
    ]
    write_report(folder, "A title & more", {"none-L128-seed0": "no memory\nleft"}, runs)
    return folder / "report.html"


@dataclasses.dataclass
class Shown:
    """A page in the browser, with the addresses it asked for and the errors of its scripts."""

    page: Any
    asked: list[str]
    errors: list[str]

    def chart(self, number: int = 0) -> Any:
        return self.page.locator(f'.chart[data-chart="{number}"]')

    def lines(self, number: int = 0) -> int:
        return self.chart(number).locator(".mark-line path").count()

    def column(self, number: int) -> list[str]:
        cells = self.page.locator("table").first.locator(f"tbody tr > :nth-child({number + 1})")
        return [text.split("\u00d7")[0].rstrip("(") for text in cells.all_text_contents()]


@pytest.fixture(scope="module")
def show(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})

    def open_page(file: pathlib.Path) -> Shown:
        shown = Shown(context.new_page(), [], [])
        shown.page.on("request", lambda request: shown.asked.append(request.url))
        shown.page.on("pageerror", lambda error: shown.errors.append(str(error)))
        shown.page.on(
            "console",
            lambda message: shown.errors.extend([message.text] * (message.type == "error")),
        )
        shown.page.goto(file.as_uri())
        shown.page.wait_for_selector(".chart .mark-line path")
        return shown

    yield open_page
    context.close()


@pytest.fixture(scope="module")
def shown(show: Any, made: pathlib.Path) -> Shown:
    """The page of all tests: reading its scripts again would take most of their time."""
    return show(made)


def test_methods_are_switched_on_and_off_in_every_chart(shown):
    assert shown.page.locator("h1").inner_text() == "A title & more"
    assert shown.page.locator("input[name=method]").evaluate_all("all => all.map(one => one.value)") == [
        "sinusoidal", "<b>&odd", "alibi", "t5"
    ]  # fmt: skip
    assert shown.lines() == 4
    shown.page.get_by_role("checkbox", name="sinusoidal").uncheck()
    shown.page.wait_for_function(
        "document.querySelectorAll('.chart[data-chart=\"0\"] .mark-line path').length == 3"
    )
    # The training curves are drawn of alibi's run alone, the one with metrics.
    shown.chart(2).locator(".mark-line path").wait_for()
    assert shown.lines(2) == 1
    shown.page.get_by_role("checkbox", name="alibi").uncheck()
    shown.page.wait_for_function(
        "document.querySelectorAll('.chart[data-chart=\"2\"] .mark-line path').length == 0"
    )
    shown.page.get_by_role("button", name="all").click()
    shown.page.wait_for_function(
        "document.querySelectorAll('.chart[data-chart=\"0\"] .mark-line path').length == 4"
    )
    assert not [error for error in shown.errors if "Content Security" not in error]


def test_axes_are_logarithmic_and_markers_tell_their_numbers(shown):
    places = (
        shown.chart()
        .locator(".mark-symbol")
        .first.evaluate(
            "marks => [...marks.children].map(one => [one.getAttribute('aria-label'), one.getAttribute('transform')])"
        )
    )
    at, labels = {}, [label for label, _ in places]
    for label, transform in places:
        run, length = re.search(r"run: ([^;]+); evaluation length: ([\d,]+)", label).groups()
        at[run, int(length.replace(",", ""))] = tuple(map(float, re.findall(r"[-\d.]+", transform)))
    # Doubling the length is a step of the same width; perplexity times ten is one of the same
    # height.
    assert at["alibi", 256][0] - at["alibi", 128][0] == pytest.approx(
        at["alibi", 512][0] - at["alibi", 256][0], abs=0.1
    )
    tenfold = (at["sinusoidal", 256][1] - at["alibi", 512][1]) / (
        at["sinusoidal", 512][1] - at["sinusoidal", 256][1]
    )
    assert tenfold == pytest.approx(math.log(80 / 7.8) / math.log(900 / 80), rel=1e-2)
    shown.chart().locator(
        ".mark-symbol path[aria-label*='run: sinusoidal; evaluation length: 512']"
    ).hover()
    tip = shown.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert {"sinusoidal", "512", "900.00", "×100"} <= {*tip.locator("td").all_text_contents()}
    assert any(
        "Perplexity: 9.00 ± 27.92; of its own at L: ×1.00; seeds: 2" in label for label in labels
    )
    assert "bands: 95% interval over seeds alone" in shown.chart().inner_text()


def test_tables_are_sorted_by_a_click_on_a_heading(shown):
    heading = shown.page.locator("table").first.get_by_role("button", name="512")
    # As the rows have them, until a heading is clicked.
    assert shown.column(0) == ["sinusoidal", "<b>&odd", "alibi", "t5"]
    heading.click()
    assert shown.column(0) == ["alibi", "t5", "sinusoidal", "<b>&odd"], (
        "what has no number comes last"
    )
    assert heading.locator("xpath=..").get_attribute("aria-sort") == "ascending"
    heading.click()
    assert shown.column(0) == ["sinusoidal", "t5", "alibi", "<b>&odd"]
    shown.page.locator("table").first.get_by_role("button", name="run").click()
    assert shown.column(0) == ["<b>&odd", "alibi", "sinusoidal", "t5"]


def test_bits_per_byte_take_the_place_of_perplexity(shown):
    shown.page.get_by_label("Bits per byte").check()
    shown.chart(1).locator(".mark-line path").first.wait_for()
    assert shown.lines(1) == 4
    assert not shown.chart(0).is_visible()
    assert "Bits per byte by evaluation length" in shown.page.locator("table:visible").inner_text()
    shown.page.get_by_label("Perplexity", exact=True).check()
    assert shown.chart(0).is_visible()


def test_a_caption_wraps_where_its_table_is_wider_than_the_screen(shown):
    shown.page.set_viewport_size({"width": 400, "height": 800})
    caption = shown.page.locator("caption:visible").first.bounding_box()
    assert shown.page.locator("table:visible").first.bounding_box()["width"] > 400
    assert caption["x"] + caption["width"] <= 400
    shown.page.set_viewport_size({"width": 1280, "height": 800})


def test_no_request_leaves_the_page_and_none_could(shown, made):
    assert shown.asked == [made.as_uri()]
    refused = "fetch('http://127.0.0.1:9/').then(() => 'sent', error => String(error))"
    assert "TypeError" in shown.page.evaluate(refused)
    assert "Content Security Policy" in " ".join(shown.errors)
    assert shown.asked == [made.as_uri()]


def test_what_failed_and_each_run_stand_in_the_page(shown):
    shown.page.get_by_text("alibi-L128-seed0", exact=True).click()
    run = shown.page.locator("details[open]")
    assert run.locator("code").inner_text() == "python train.py --workdir=runs/alibi-L128-seed0"
    assert (
        run.locator("pre").nth(1).inner_text() == 'position = "alibi"\nseed = 0\ntrain.steps = 20'
    )
    assert "none-L128-seed0: no memory left" in shown.page.locator("main").inner_text()
    assert (
        "Without metrics here: t5-L128-seed0."
        in shown.page.locator("figcaption:visible").last.inner_text()
    )


def test_a_run_has_one_name_on_the_page_whatever_was_measured_of_it(tmp_path, monkeypatch):
    """Keys alone, another length's perplexity, a curve alone as of a run that failed: each is a
    checkbox.
    """
    monkeypatch.setattr(report, "png", lambda spec: b"")
    rows = [
        make_key("alibi", 128, 64, 0.5, run="alibi-L128-seed0"),
        make_row("t5", 256, 9.0, run="t5-L256-seed0", train_length=256),
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    runs = [
        source(
            position,
            log(
                tmp_path / position,
                [
                    {"step": 1, "train_nll": 4.0},
                    {"step": 1, "valid_nll": 4.0, "valid_tokens": scored},
                ],
            ),
        )
        for position, scored in (("alibi", 4096.0), ("none", 512.0))
    ]
    write_report(tmp_path, "Keys", {"none-L128-seed0": "diverged"}, runs)
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r'name="method" value="(.*?)"', page) == [
        "t5-L256",
        "alibi-L128",
        "none-L128-seed0",
    ]
    assert "Markers: validation of 4,096 or 512 tokens." in page
    assert "Without metrics here" not in page.partition('<script type="application/json"')[0]


def test_the_committed_page_is_made_of_the_committed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "png", lambda spec: b"")
    shutil.copy(COMMITTED.with_name("results.jsonl"), tmp_path)
    sweep = runpy.run_path(str(ROOT / "configs" / "sweeps" / "quickstart.py"))["get_sweep"]()
    write_report(tmp_path, sweep["title"])
    made, kept = (file.read_text() for file in (tmp_path / "report.html", COMMITTED))
    # Then come the configs of the runs, with every key that there was.
    assert made.partition("</main>")[0].rstrip() == kept.partition("<section><h2>Runs")[0].rstrip()
    charts, kept_charts = (
        re.findall(r'id="charts">(.*)</script>', page)[0] for page in (made, kept)
    )
    assert charts == kept_charts
    drawn = {
        (one["run"], one["length"]): one["value"] for one in json.loads(charts)[0]["data"]["values"]
    }
    assert drawn == {
        (row.position, row.length): row.results["perplexity"]
        for row in read_rows(tmp_path / "results.jsonl")
    }


def test_a_long_training_curve_is_thinned_by_means_over_tokens(tmp_path):
    folder = log(
        tmp_path,
        [{"step": 1, "train_nll": 4.0, "train_tokens": 30.0}, {"step": 2, "valid_nll": 3.0}],
    )
    train, valid = training_curve(resolve(folder))
    assert train == {"step": 1, "nats": 4.0, "split": "train"}
    assert valid == {"step": 2, "nats": 3.0, "split": "valid"}
    count = 2 * MOST_POINTS
    rows = (
        {"step": step, "train_nll": float(step % 2), "train_tokens": 1.0 + 2 * (step % 2)}
        for step in range(count)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = training_curve(resolve(tmp_path))
    # Of each two rows one token costs 0 nats and three cost 1.
    assert (len(points), {point["nats"] for point in points}) == (MOST_POINTS, {0.75})
    assert points[-1]["step"] == count - 1
