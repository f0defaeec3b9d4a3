"""Text from a trained run, at any length.

    python scripts/generate.py --workdir=workdirs/alibi-512 --prompt="It was a bright cold day"
    python scripts/generate.py --workdir=workdirs/alibi-512 --prompts=FILE.jsonl > answers.jsonl
    python scripts/generate.py --workdir=workdirs/alibi-512      # asks for one prompt after another

One prompt is continued on the terminal as its tokens come. A line of --prompts is {"prompt": TEXT}
or {"tokens": [IDS]}, perhaps with a "seed". All are continued in batches, and each answer is a JSON
line with tokens, text, the NLL of each token under the model in nats, and the reason of its end:
length, stop or document. What else is said goes to stderr.
"""

import json
import sys
from typing import Any

from absl import flags

from alibi.cli import command_line
from alibi.progress import print_line

flags.DEFINE_string("workdir", None, "work directory of train.py")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    "latest",
    command_line.CHECKPOINTS,
)
_PROMPT = flags.DEFINE_string("prompt", None, "the text that is continued")
_PROMPTS = flags.DEFINE_string("prompts", None, "a file of JSON lines with prompts")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 200, "the most tokens of an answer")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "divides the logits; 0 means the likeliest token"
)
_TOP_K = flags.DEFINE_integer("top_k", 0, "draw from so many of the likeliest tokens; 0 means all")
_TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "draw from the likeliest tokens that have this probability together; 1 means all"
)
_MIN_P = flags.DEFINE_float(
    "min_p", 0.0, "draw from tokens of at least this share of the likeliest one's probability"
)
_SEED = flags.DEFINE_integer("seed", 0, "seeds the draws; line n of --prompts has this plus n")
_STOP = flags.DEFINE_multi_string("stop", [], "a text at which an answer ends; may be repeated")
_LOGPROBS = flags.DEFINE_bool(
    "logprobs", False, "also print each token with the logarithm of its probability"
)
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.generation import Sampling
    from alibi.generation.texts import Writer, make_prompt, read_prompts
    from alibi.runs.trained import TrainedRun

    if _PROMPT.value is not None and _PROMPTS.value is not None:
        raise ValueError("--prompt and --prompts are two ways to say the same; give one of them")
    if _LOGPROBS.value and _PROMPTS.value is not None:
        raise ValueError(
            "--logprobs is for --prompt; answers to --prompts have their tokens and nll"
        )
    if _PROMPT.value is None and _PROMPTS.value is None and not sys.stdin.isatty():
        raise ValueError("give a text by --prompt or a file by --prompts: this is no terminal")
    sample = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _MIN_P.value)
    run = TrainedRun(flags.FLAGS.workdir, _CHECKPOINT.value)
    writer = Writer(run, sample, _MAX_TOKENS.value, _STOP.value)
    checkpoint = f"the checkpoint after {run.step:,} of {run.config.train.steps:,} updates"
    print_line(f"{run}: {'an imported model' if run.directory.is_imported() else checkpoint}")
    if _PROMPTS.value is not None:
        prompts = read_prompts(_PROMPTS.value, run.tokenizer, _SEED.value, print_line)
        for answer in writer.write(prompts):
            line = json.dumps(answer.to_json(), ensure_ascii=False)
            try:
                line.encode(sys.stdout.encoding)
            except UnicodeEncodeError:  # another encoding, or half a character in a prompt's key
                line = json.dumps(answer.to_json())
            print(line, flush=True)
        return
    if _PROMPT.value is not None:
        prompt = make_prompt(run.tokenizer, {"prompt": _PROMPT.value}, _SEED.value, print_line)
        _show(writer, prompt, writer.check([prompt]))
        return
    total = 1
    while (text := _asked()) is not None:
        try:
            prompt = make_prompt(run.tokenizer, {"prompt": text}, _SEED.value, print_line)
            needed = writer.check([prompt])
            while total < needed:  # a power of two, so that most prompts share compiled programs
                total *= 2
            _show(writer, prompt, needed if run.undefined(total) else total)
        except ValueError as error:
            print_line(f"error: {error}")


def _asked() -> str | None:
    """Returns a line of the user, or None at the end."""
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _show(writer: Any, prompt: Any, total: int) -> None:
    """Prints an answer as its tokens come, then, if asked for, its tokens."""
    print(prompt.row["prompt"], end="", flush=True)
    shown = 0

    def show(answer: Any) -> None:
        nonlocal shown
        text = writer.settled(answer)
        print(text[shown:], end="", flush=True)
        shown = max(shown, len(text))

    (answer,) = writer.write([prompt], total=total, each=1, seen=show)
    print(flush=True)
    if _LOGPROBS.value:
        for token, nll in zip(answer.tokens, answer.nll, strict=True):
            print(f"{-nll:9.4f}  {token:6}  {writer.run.tokenizer.decode([token])!r}")
    mean = sum(answer.nll) / len(answer.nll)
    print_line(
        f"{len(answer.tokens)} tokens, {mean:.4f} nats each; end: {answer.end}; seed {prompt.seed}"
    )


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(
        main, required=("workdir",), addresses=("workdir", "prompts", "prompt", "stop")
    )


if __name__ == "__main__":
    run()
