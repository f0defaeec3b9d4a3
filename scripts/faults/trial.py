"""One small run in a folder of its own, as commands of users make it, and the results by which two are compared."""

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

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
ITS_OWN = ("seconds", "tokens_per_second", "commit")  # of a row: what the same run has otherwise next time


class Trial:
    """One folder with a cache, a run, and its results, in the layout of a sweep."""

    def __init__(self, folder: pathlib.Path, inputs: pathlib.Path):
        self.folder, self.inputs, self.run = folder, inputs, folder / "runs" / NAME
        # What this process compiles, and what it starts, is compiled once.
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(inputs / "compilations"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for name, value in compiled.items():
            os.environ[name] = value  # before JAX is imported
        self.environment = os.environ | {"ALIBI_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}

    def command(self, kind: str) -> list[str]:
        config, script = f"--config={self.inputs}/config.py", f"{ROOT}/scripts/{kind}.py"
        return {
            "prepare": [f"{ROOT}/scripts/prepare_data.py", f"{config}:position=alibi,seed=0"],
            "train": [f"{ROOT}/train.py", f"{config}:position=alibi,seed=0", f"--workdir={self.run}"],
            "evaluate": [
                f"{ROOT}/eval_extrapolation.py", f"--workdirs={self.run}", "--multiples=1,2", "--dump_nll",
                f"--output_dir={self.folder}",
            ],
            "sweep": [script, f"--sweep={self.inputs}/sweep.py", f"--workdir={self.folder}"],
        }[kind]  # fmt: skip

    def start(self, kind: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *self.command(kind)],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )

    def end(self, kind: str) -> tuple[int, str]:
        """Runs a command to its end: the exit code and what it said on stderr."""
        process = self.start(kind)
        try:
            said = process.communicate(timeout=HUNG_SECONDS)[1]
        except subprocess.TimeoutExpired:
            kill(process)
            return -signal.SIGKILL, f"it hung for {HUNG_SECONDS} s"
        return process.returncode, said

    def finish(self) -> str:
        """Trains and evaluates in this process, from where the trial stands; gives the error that it met."""
        from alibi.config.files import load_config
        from alibi.errors import explain
        from alibi.evaluation.extrapolation import Options, evaluate_runs
        from alibi.training.loop import train

        os.environ["ALIBI_CACHE"] = self.environment["ALIBI_CACHE"]
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                train(load_config(f"{self.inputs}/config.py:position=alibi,seed=0"), str(self.run))
                options = Options(self.folder, multiples=(1, 2), dump_nll=True, report=False)
                return "; ".join(evaluate_runs([self.run], options))
            except Exception as error:
                if not (told := explain(error)):
                    raise
                return told

    def results(self) -> dict[str, str]:
        """A hash of the last parameters, of each row and of each dump's arrays."""
        import jax
        import numpy as np

        from alibi.evaluation.dumps import read_dump
        from alibi.runs.trained import TrainedRun

        with contextlib.redirect_stderr(io.StringIO()):
            trained = TrainedRun(self.run)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained.params)]
        found = {f"parameters of step {trained.step}": digest(*leaves)}
        for line in (self.folder / "results.jsonl").read_text().splitlines():
            row = {key: value for key, value in json.loads(line).items() if key not in ITS_OWN}
            name = f"row at {row['eval_length']}"
            found[name + "again" * (name in found)] = json.dumps(row, sort_keys=True)
        for file in self.folder.glob("nll/*.npz"):
            dump = read_dump(file)
            found[f"dump {file.name}"] = f"{dump.of} {digest(dump.nll_nats, dump.targets)}"
        return found


def digest(*arrays) -> str:
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return hasher.hexdigest()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a process and, at the same moment, for the runs that it started."""
    with contextlib.suppress(OSError):
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def make_inputs(folder: pathlib.Path) -> None:
    """A text of words that repeat, a config and a sweep of it."""
    folder.mkdir(parents=True)
    words, texts = [f"word{number}" for number in range(80)], {}
    for split, size in (("train", 60_000), ("valid", 400)):
        lines = (" ".join(random.Random(f"{split} {line}").choices(words, k=8)) for line in range(size // 8))
        texts[split] = folder / f"{split}.txt"
        texts[split].write_text("\n".join(lines) + "\n")
    config = CONFIG.format(steps=STEPS, train=str(texts["train"]), valid=str(texts["valid"]))
    (folder / "config.py").write_text(config)
    (folder / "sweep.py").write_text(SWEEP.format(config=str(folder / "config.py")))
