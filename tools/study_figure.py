"""Draws results/study/survival_and_use.png: perplexity by length beside the nats that an echo saves.

    python -m tools.study_figure

Both are of the seen text, and of models as they were trained. The lines share colours and markers.
"""

import dataclasses

from alibi.cli import command_line
from alibi.evaluation.echo import SAVED
from alibi.reporting.charts import Spec, length_chart, png, style_numbers
from alibi.reporting.panels import Panel, panel_groups
from alibi.reporting.rows import read_rows
from alibi.reporting.tables import PERPLEXITY
from tools import ROOT

FOLDER = ROOT / "results" / "study"
WINDOW = 512  # of the echoes


def chart(panel: Panel, styles: dict[str, int], title: str, x_title: str) -> Spec:
    """Returns the lines of `panel` under a title, with a legend that both charts share."""
    spec = length_chart(panel, styles, legend={"orient": "right"})
    for layer in (spec["layer"][0], spec["layer"][-1]):  # where it was trained, and the lines
        layer["encoding"]["x"] |= {"title": [x_title, *layer["encoding"]["x"]["title"][1:]]}
    return spec | {"title": title, "width": 430, "height": 400}


def main() -> None:
    rows = [row for row in read_rows(FOLDER / "results.jsonl") if row.override is None]
    panels = [panel for group in panel_groups(rows) for panel in group if panel.split == "valid"]
    (survival, *_) = [one for one in panels if one.kind is PERPLEXITY and 256 in one.columns]
    (use,) = [one for one in panels if one.kind is SAVED]
    lines = tuple(one for one in use.series if one.labels == (WINDOW,))
    use = dataclasses.replace(use, series=lines)
    numbers = style_numbers([one.label for one in survival.series])
    styles = dict(zip((one.label for one in survival.series), numbers, strict=True))
    spec = {
        "hconcat": [
            chart(survival, styles, "Survival", "evaluation length in tokens"),
            chart(use, styles, "Use", f"tokens back to the first copy, in windows of {WINDOW}"),
        ],
        "spacing": 40,
    }
    (FOLDER / "survival_and_use.png").write_bytes(png(spec))


if __name__ == "__main__":
    command_line.run(main)
