"""A table's files: tableNN.md, .csv, .tex and, where the paper draws its numbers too, .png."""

from alibi.reporting import comparison
from alibi.reporting.comparison_figure import draw_comparison
from alibi.reporting.files import write_atomically
from alibi.reporting.tables import failed_runs, to_markdown, to_text
from alibi.reproduction.reproduction import Reproduction
from alibi.reproduction.results import Results


def write_table(reproduction: Reproduction, failures: dict[str, str]) -> str:
    """Writes what is known until now, and `failures` by run below it; returns it as text for a terminal."""
    compared = Results(reproduction).compare()
    place = reproduction.outputs / f"table{reproduction.number:02d}"
    place.parent.mkdir(parents=True, exist_ok=True)
    markdown = [to_markdown(comparison.to_table(compared, "**{}**".format))]
    written = [place.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]
    drawn = reproduction.definition.lines
    if drawn and draw_comparison(compared, drawn, place.with_suffix(".png")):
        markdown.append(f"![table {reproduction.number}: paper and ours]({place.name}.png)\n")
        written.append(place.with_suffix(".png"))
    if failures:
        markdown.append(failed_runs(failures))
    contents = ("\n".join(markdown), comparison.to_csv(compared), comparison.to_latex(compared))
    for path, content in zip(written, contents, strict=False):
        write_atomically(path, content)
    files = "\n".join(map(str, written))
    return f"{to_text(comparison.to_table(compared, '{}*'.format))}\n{files}"
