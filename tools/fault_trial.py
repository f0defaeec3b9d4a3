"""A small run in its own folder, made with the users' commands, and the results that two runs are compared in."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

from tools import ROOT

NAME, STEPS = "alibi-L16-seed0", 60
HUNG_SECONDS = 600  # beside many other programs starting and compiling take minutes
CONFIG = """
from configs import base


def get_config(arg=""):
    config = base.get_config("length=16,train.steps={steps},train.batch_tokens=64,optimizer.warmup_steps=2")
    config.model.update(num_layers=1, width=64, num_heads=2, feed_forward=128, dropout=0.1)
    config.data.update(corpus="text", train={train!r}, valid={valid!r}, tokenizer="words")
    config.eval.update(every_steps=20, batch_tokens=256)
    config.checkpoint.update(every_steps=10, keep=3)
    config.log.update(every_steps=5, tensorboard=False)
    return base.apply(config, arg)
"""
SWEEP = """
def get_sweep():
    return {{"config": {config!r}, "product": {{"position": ["alibi"], "seed": [0]}}, "multiples": [1, 2]}}
"""
# fields of a row that differ between two equal runs
OWN_KEYS = ("seconds", "date", "commit")


def make_inputs(folder: pathlib.Path) -> None:
    """Writes a text with repeated words, a config and its sweep."""
    folder.mkdir(parents=True)
    words, texts = [f"word{index}" for index in range(80)], {}
    for split, size in (("train", 60_000), ("valid", 400)):
        lines = (
            " ".join(random.Random(f"{split} {line}").choices(words, k=8))
            for line in range(size // 8)
        )
        texts[split] = folder / f"{split}.txt"
        texts[split].write_text("\n".join(lines) + "\n")
    config = CONFIG.format(steps=STEPS, train=str(texts["train"]), valid=str(texts["valid"]))
    (folder / "config.py").write_text(config)
    (folder / "sweep.py").write_text(SWEEP.format(config=str(folder / "config.py")))


class Trial:
    """A folder with a cache, a run and its results, laid out as a sweep's work directory."""

    def __init__(self, folder: pathlib.Path, inputs: pathlib.Path):
        self.folder, self.inputs, self.run = folder, inputs, folder / "runs" / NAME
        # All processes share their compilations, those of tests with later runs. Set before JAX is imported.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(inputs / "compilations"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.environment = os.environ | {
            "ALIBI_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        config = f"--config={inputs}/config.py:position=alibi,seed=0"
        self.commands = {
            "prepare": ["scripts/prepare_data.py", config],
            "train": ["train.py", config, f"--workdir={self.run}"],
            "evaluate": [
                "eval_extrapolation.py",
                f"--workdirs={self.run}",
                "--multiples=1,2",
                "--dump_nll",
                f"--output_dir={folder}",
            ],
            "sweep": ["scripts/sweep.py", f"--sweep={inputs}/sweep.py", f"--workdir={folder}"],
        }

    def start(self, kind: str) -> subprocess.Popen:
        """Starts a command."""
        script, *flags = self.commands[kind]
        command = [sys.executable, str(ROOT / script), *flags]
        return subprocess.Popen(
            command,
            env=self.environment,
            process_group=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def end(self, kind: str) -> tuple[int, str]:
        """Runs a command to its end. Returns the exit code and stderr."""
        process = self.start(kind)
        try:
            messages = process.communicate(timeout=HUNG_SECONDS)[1]
        except subprocess.TimeoutExpired:
            kill(process)
            return -signal.SIGKILL, f"it hung for {HUNG_SECONDS} s"
        return process.returncode, messages

    def finish(self) -> str:
        """Trains and evaluates in this process from what the folder holds. Returns the error, if any, in a line."""
        from alibi.config.files import load_config
        from alibi.errors import explain
        from alibi.evaluation.evaluate import EvaluationOptions, evaluate_runs
        from alibi.evaluation.perplexity import Perplexity
        from alibi.training.loop import train

        os.environ["ALIBI_CACHE"] = self.environment["ALIBI_CACHE"]
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                train(load_config(f"{self.inputs}/config.py:position=alibi,seed=0"), str(self.run))
                scored = (Perplexity(dump_nll=True),)
                options = EvaluationOptions(
                    self.folder, multiples=(1, 2), report=False, evaluators=scored
                )
                return "; ".join(evaluate_runs([self.run], options))
            except Exception as error:
                if not (line := explain(error)):
                    raise
                return line

    def results(self) -> dict[str, str]:
        """Returns the rows, and hashes for the last parameters and for each dump's arrays."""
        import jax
        import numpy as np

        from alibi.evaluation.dumps import read_dump
        from alibi.runs.trained import TrainedRun

        with contextlib.redirect_stderr(io.StringIO()):
            trained = TrainedRun(self.run)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained.params)]
        results = {f"parameters of step {trained.step}": _digest(*leaves)}
        for line in (self.folder / "results.jsonl").read_text().splitlines():
            row = {key: value for key, value in json.loads(line).items() if key not in OWN_KEYS}
            row["results"].pop("tokens_per_second")
            name = f"{row['evaluator']} at {row['cell']}"
            results[name + "again" * (name in results)] = json.dumps(row, sort_keys=True)
        for file in self.folder.glob("nll/*.npz"):
            dump = read_dump(file)
            results[f"dump {file.name}"] = (
                f"{dump.row.measurement} {_digest(dump.nll_nats, dump.targets)}"
            )
        return results


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and, at the same moment, the runs that it started."""
    with contextlib.suppress(OSError):
        children = (
            pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def _digest(*arrays) -> str:
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()
