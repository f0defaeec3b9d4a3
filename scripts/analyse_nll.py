"""NLL against context and against position in the window, and the early token curse (paper, appendix B),
from dumps.

    python eval_extrapolation.py --workdirs=DIR --lengths=64,512 --dump_nll --output_dir=OUT
    python eval_extrapolation.py --workdirs=DIR --lengths=64,512 --stride=1 --dump_nll --output_dir=OUT
    python scripts/analyse_nll.py --dumps='OUT/nll/*.npz' --output_dir=OUT

Writes OUT/by_context.jsonl (the key `analysis` names the kind of a row) and OUT/by_context.png. Prints
how much of each gain from longer blocks comes from fewer tokens with a short context. The first digits
of the tokens' SHA-256 name a text.
"""

import json

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line

_DUMPS = flags.DEFINE_list("dumps", None, "files or globs, of addresses too, separated by commas")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", None, "where rows and figure go; may be gs://BUCKET/PATH or s3://BUCKET/PATH"
)
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.evaluation.by_position import analyse
    from alibi.evaluation.dumps import find_dumps
    from alibi.reporting.charts import png
    from alibi.reporting.figures import context_figure
    from alibi.storage.files import check_writable, resolve, write_whole

    output = resolve(_OUTPUT_DIR.value)
    check_writable(output)
    dumps = find_dumps(_DUMPS.value)
    if not dumps:
        raise ValueError(
            f"--dumps={','.join(_DUMPS.value)} names no file; give those of eval_extrapolation.py --dump_nll"
        )
    lines = analyse(dumps)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(output / "by_context.jsonl", text)
    write_whole(output / "by_context.png", png(context_figure(lines)))
    columns = "run | updates | text | blocks of | gain, nats | explained by context lengths | by a sliding window"
    print(f"| {columns} |\n|:--|--:|:--|--:|--:|--:|--:|")
    for line in lines:
        if line["analysis"] == "early_token_curse":
            bounds = line["gain_interval"]
            interval = " [{:.4f}, {:.4f}]".format(*bounds) if bounds else ""
            cells = [
                " ".join(filter(None, [line["run"], line.get("override")])),
                f"{line['step']:,}",
                line["tokens_sha256"][:8],
                f"{line['eval_length']:,} to {line['longer_length']:,}",
                f"{line['gain_nats']:.4f}{interval}",
                *(
                    "-" if line[share] is None else f"{line[share]:.0%}"
                    for share in ("composition_share", "sliding_share")
                ),
            ]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    command_line.run(main, required=("dumps", "output_dir"), addresses=("dumps", "output_dir"))
