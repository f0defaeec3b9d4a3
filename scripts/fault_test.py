"""Kills, damages and starves small runs, and checks that what comes out is bit for bit what an undisturbed run gives.

    python scripts/fault_test.py                      # 5 kills of each command, 20 bits of each kind of file
    python scripts/fault_test.py --kills=1 --flips=1  # the short form

Kills (SIGKILL) come at random moments of preparing, training, evaluating and sweeping, and
the same command is given again. A flipped bit must be told of in one line, or change
nothing. A full disk, a read-only directory, one that is moved away and a second start must
end in one line, and the same command must come to the same end when they are over. Prints
what was survived; exits with 1 where parameters or rows differ, or a line is missing.
The full and the read-only disk are file systems of their own, which only root can mount.
"""

import argparse
import contextlib
import glob
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A clone works without being installed: python scripts/fault_test.py has only scripts/ on its path.
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

from faults.starts import STARTS, second_start

NAME, STEPS = "alibi-L16-seed0", 60
CONFIG = """
from configs import base


def get_config(arg=""):
    config = base.get_config("length=16,train.steps={steps},train.batch_tokens=64,optimizer.warmup_steps=2")
    config.model.update(num_layers=1, width=16, num_heads=2, feed_forward=32, dropout=0.1)
    config.data.update(corpus="text", train={train!r}, valid={valid!r}, tokenizer="words")
    config.eval.update(every_steps=20, batch_tokens=256)
    config.checkpoint.update(every_steps=10, keep=2)
    config.log.update(every_steps=5, tensorboard=False)
    return base.apply(config, arg)
"""
SWEEP = """
def get_sweep():
    return {{"config": {config!r}, "product": {{"position": ["alibi"], "seed": [0]}}, "multiples": [1, 2]}}
"""
KINDS = ("prepare", "train", "evaluate", "sweep")
# The files of a work directory and of the cache, by what they are.
FILES = {
    "tokens": "cache/tokens/*/tokens.bin",
    "manifests": "cache/tokens/*/manifest.json",
    "tokenizers of the cache": "cache/token*/**/dict.txt",
    "configs": "runs/*/config.json",
    "status": "runs/*/status.json",
    "provenance": "runs/*/provenance.json",
    "metrics": "runs/*/metrics.jsonl",
    "tokenizers of runs": "runs/*/tokenizer/*",
    "parameters": "runs/*/checkpoints/*/params/**/d/*",
    "optimizer states": "runs/*/checkpoints/*/optimizer/**/d/*",
    "checkpoints' JSON": "runs/*/checkpoints/*/*/metadata",
    "rows": "rows/*/*.json",
    "dumps": "nll/*.npz",
}
ITS_OWN = ("seconds", "tokens_per_second", "commit")  # of a row: what the same run has otherwise next time


class Trial:
    """One folder with a cache, a run, and its results, in the layout of a sweep."""

    def __init__(self, folder: pathlib.Path, inputs: pathlib.Path):
        self.folder, self.inputs, self.run = folder, inputs, folder / "runs" / NAME
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(inputs / "compilations")}
        self.environment = os.environ | compiled | {"ALIBI_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}

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
            said = process.communicate(timeout=120)[1]
        except subprocess.TimeoutExpired:
            kill(process)
            return -signal.SIGKILL, "it hung for two minutes"
        return process.returncode, said

    def finish(self) -> str:
        """Trains and evaluates in this process, from where the trial stands; gives the error that it met."""
        from alibi.config_files import load_config
        from alibi.errors import explained
        from alibi.evaluation.extrapolation import Options, evaluate_runs
        from alibi.training.loop import train

        os.environ["ALIBI_CACHE"] = self.environment["ALIBI_CACHE"]
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                train(load_config(f"{self.inputs}/config.py:position=alibi,seed=0"), str(self.run))
                options = Options(self.folder, multiples=(1, 2), dump_nll=True, report=False)
                return "; ".join(evaluate_runs([self.run], options))
            except Exception as error:
                if not (told := explained(error)):
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


def kill(process: subprocess.Popen) -> None:
    """SIGKILL for a process and, at the same moment, for the runs that it started."""
    with contextlib.suppress(OSError):
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


class FaultTest:
    """The faults one after the other; what went wrong gathers in `complaints`.

    Attributes:
      survived: how many of each fault, by its name.
      differences: results that were not those of the undisturbed run.
    """

    def __init__(self, folder: pathlib.Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.survived: dict[str, int] = {}
        self.complaints: list[str] = []
        self.differences = 0
        self.inputs = folder / "inputs"
        make_inputs(self.inputs)
        self.whole, self.seconds = self.trial("undisturbed"), dict.fromkeys(KINDS, 0.0)
        for kind in KINDS[:3]:
            start = time.monotonic()
            code, said = self.whole.end(kind)
            self.seconds[kind] = time.monotonic() - start
            if code:
                raise SystemExit(f"error: undisturbed, {kind} ended with {code}:\n{said}")
        self.seconds["sweep"] = sum(self.seconds.values())
        self.expected = self.whole.results()

    def trial(self, name: str) -> Trial:
        return Trial(self.folder / name, self.inputs)

    def copied(self, name: str, *, trained: bool = False) -> Trial:
        """A copy of the undisturbed trial without its rows and, unless `trained`, its last checkpoint."""
        trial = self.trial(name)
        shutil.rmtree(trial.folder, ignore_errors=True)
        shutil.copytree(self.whole.folder, trial.folder)
        for results in ("rows", "nll"):
            shutil.rmtree(trial.folder / results, ignore_errors=True)
        (trial.folder / "results.jsonl").unlink()
        if not trained:
            shutil.rmtree(trial.run / "checkpoints" / str(STEPS))
        return trial

    def finish(self, trial: Trial, what: str) -> None:
        """Training and evaluating must come to their end, and to the numbers of the undisturbed run."""
        if error := trial.finish():
            self.complaints.append(f"{what}: {error}")
        else:
            self.compare(trial, what)

    def compare(self, trial: Trial, what: str) -> None:
        found = trial.results()
        for name in sorted(self.expected.keys() | found.keys()):
            if found.get(name) != self.expected.get(name):
                self.differences += 1
                self.complaints.append(f"{what}: {name} differs: {found.get(name)}, not {self.expected.get(name)}")

    def count(self, what: str) -> None:
        self.survived[what] = self.survived.get(what, 0) + 1

    def kills(self, kills: int, kind: str) -> None:
        """`kills` of a command, which is given again each time; from the beginning where it ended before it was hit."""
        what = f"kills of {kind}"
        trial, longest = self.before(kind), self.seconds[kind]
        while self.survived.get(what, 0) < kills:
            process = trial.start(kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0, longest))
            if process.poll() is None:
                self.count(what)
                kill(process)
            else:
                process.communicate()
                trial, longest = self.before(kind), 0.9 * longest
        code, said = trial.end(kind)
        if code:
            self.complaints.append(f"{what}: afterwards it ended with {code}: {said[-500:]}")
        self.finish(trial, what)

    def before(self, kind: str) -> Trial:
        """What the command begins with: nothing, or what those before it have made."""
        trial = self.copied(f"killed-{kind}", trained=kind == "evaluate")
        if kind in ("prepare", "sweep"):
            shutil.rmtree(trial.folder)
        if kind == "train":
            shutil.rmtree(trial.run)
        return trial

    def flip(self, kind: str) -> None:
        """One bit of one file of a kind: training and evaluating tell of it, or give the same numbers."""
        trial = self.copied("flipped")
        if kind in ("rows", "dumps"):
            shutil.rmtree(trial.folder)
            shutil.copytree(self.whole.folder, trial.folder)
        files = [path for path in glob.glob(str(trial.folder / FILES[kind]), recursive=True) if os.path.isfile(path)]
        file = pathlib.Path(self.random.choice(sorted(files)))
        content, bit = bytearray(file.read_bytes()), self.random.randrange(8 * file.stat().st_size)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        self.count(f"flips in {kind}")
        if not trial.finish():
            with contextlib.suppress(ValueError):  # told by what reads a dump
                self.compare(trial, f"flips in {kind}: bit {bit} of {file.relative_to(trial.folder)}")

    def told(self, code: int, said: str, what: str) -> None:
        """An end with an error must be one of use, and what it says must end in its line.

        Before that tensorstore's threads may have written, past Python, that a save's event loop is closed.
        """
        self.count(what.partition(":")[0])
        own = said.rpartition("Event loop is closed\n")[2]
        if code != 1 or "\nerror: " not in f"\n{own}" or "Traceback" in own:
            self.complaints.append(f"{what}: ended with {code} and without a line that helps: {said[-800:]}")

    def moved_away(self) -> None:
        trial = self.copied("moved")
        process, away = trial.start("train"), trial.folder / "away"
        time.sleep(self.random.uniform(0.5, 0.9) * self.seconds["train"])
        trial.run.rename(away)
        said = process.communicate(timeout=120)[1]
        if process.returncode:
            self.told(process.returncode, said, "directories moved away")
        else:
            self.count("directories moved away")
        shutil.rmtree(trial.run, ignore_errors=True)  # what it may have begun anew
        away.rename(trial.run)
        self.finish(trial, "after a directory was moved away")

    def full_disk(self) -> None:
        trial = self.copied("full")
        for spare in (0, 48):  # KiB: of a start, of a checkpoint
            with mounted(trial.run):
                remount(trial.run, f"size={shutil.disk_usage(trial.run).used // 1024 + spare}k")
                self.told(*trial.end("train"), f"full disks: {spare} KiB left")
        self.finish(trial, "after a full disk")

    def read_only(self) -> None:
        trial = self.copied("read-only")
        for part in (trial.run, trial.run / "checkpoints"):
            with mounted(part):
                remount(part, "ro")
                self.told(*trial.end("train"), f"read-only directories: {part.name}")
        self.finish(trial, "after a read-only directory")


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


@contextlib.contextmanager
def mounted(folder: pathlib.Path) -> Iterator[None]:
    """A file system of its own with what is in `folder`, in its place; then all of it goes back to the disk."""
    content = folder.with_name(f"{folder.name}.content")
    folder.rename(content)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        shutil.copytree(content, folder, dirs_exist_ok=True)
        yield
        shutil.rmtree(content)
        shutil.copytree(folder, content)
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()
        content.rename(folder)


def remount(folder: pathlib.Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


def can_mount(folder: pathlib.Path) -> bool:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of preparing, of training, evaluating and sweeping")
    parser.add_argument("--flips", type=int, default=20, help="of each kind of file")
    parser.add_argument("--kinds", default=",".join(FILES), help="of the files whose bits are flipped")
    parser.add_argument("--starts", default=",".join(STARTS), help="of which a second one is made beside the first")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the bits")
    arguments = parser.parse_args()
    if unknown := set(filter(None, arguments.kinds.split(","))) - FILES.keys():
        parser.error(f"--kinds={','.join(unknown)}: there are {', '.join(FILES)}")
    if unknown := set(filter(None, arguments.starts.split(","))) - set(STARTS):
        parser.error(f"--starts={','.join(unknown)}: there are {', '.join(STARTS)}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="alibi-faults-") as name:
        test = FaultTest(pathlib.Path(name), arguments.seed)
        for kind in KINDS if arguments.kills else ():
            test.kills(arguments.kills, kind)
        for kind in filter(None, arguments.kinds.split(",") * arguments.flips):
            test.flip(kind)
        for started in filter(None, arguments.starts.split(",")):
            second_start(test, started)
        test.moved_away()
        if can_mount(test.folder / "probe"):
            test.full_disk()
            test.read_only()
        else:
            print("left out, since only root can mount them: a full disk, a read-only directory")
    for what, times in test.survived.items():
        print(f"{what}: {times}")
    for complaint in test.complaints:
        print(f"wrong: {complaint}")
    print(f"differences: {test.differences}, other mistakes: {len(test.complaints) - test.differences}")
    print(f"took {time.monotonic() - start:.0f} s")
    return 1 if test.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
