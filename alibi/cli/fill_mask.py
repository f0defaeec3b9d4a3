"""The likeliest words for masked tokens, from a model that sees both sides.

    python scripts/fill_mask.py --workdir=workdirs/bert --text="The capital of [MASK] is Paris."
    python scripts/fill_mask.py --workdir=workdirs/bert --text="A [MASK] [MASK]." --text="No [MASK]."

The mask is spelt as the run's tokenizer has it, such as [MASK] or <mask>. A line for each mask shows
tokens with their probabilities. Each of several masks in a text is filled alone, while the
others stay masked.
"""

from absl import flags

from alibi.cli import command_line

flags.DEFINE_string("workdir", None, "work directory of train.py or import_hf.py")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", command_line.CHECKPOINTS)
flags.DEFINE_multi_string("text", None, "a text with masks; may be repeated")
_COUNT = flags.DEFINE_integer("count", 5, "tokens shown for each mask", lower_bound=1)
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.generation.encoders import fill_masks
    from alibi.runs.trained import TrainedRun

    run = TrainedRun(flags.FLAGS.workdir, _CHECKPOINT.value)
    texts = flags.FLAGS.text
    for text, masks in zip(texts, fill_masks(run, texts, _COUNT.value), strict=True):
        print(text)
        for mask, likeliest in enumerate(masks, 1):
            shown = ", ".join(f"{token!r} {share:.4f}" for token, share in likeliest)
            print(f"  {mask}: {shown}")


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(main, required=("workdir", "text"), addresses=("workdir", "text"))


if __name__ == "__main__":
    run()
