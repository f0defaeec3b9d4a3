"""Kills, damages and starves small runs, and checks that what comes out is bit for bit what an undisturbed run gives.

    python scripts/fault_test.py                      # 20 kills, 20 flipped bits of each kind of file: half an hour
    python scripts/fault_test.py --kills=4 --flips=1  # the short form, a minute or two

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
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A clone works without being installed: python scripts/fault_test.py has only scripts/ on its path.
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

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
    "dumps": "nll/*.npz",
}
UNTIMED = ("seconds", "tokens_per_second")  # of a row: what no two runs have alike


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
            said = process.communicate(timeout=300)[1]
        except subprocess.TimeoutExpired:
            kill(process)
            return -signal.SIGKILL, "it hung for five minutes"
        return process.returncode, said

    def results(self) -> dict[str, str]:
        """A hash of the last parameters, of each row and of each dump's arrays."""
        import jax
        import numpy as np

        from alibi.runs.trained import TrainedRun

        with contextlib.redirect_stderr(None):
            trained = TrainedRun(self.run)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained.params)]
        found = {f"parameters of step {trained.step}": digest(*leaves)}
        for line in (self.folder / "results.jsonl").read_text().splitlines():
            row = {key: value for key, value in json.loads(line).items() if key not in UNTIMED}
            name = f"row at {row['eval_length']}"
            found[name + "again" * (name in found)] = json.dumps(row, sort_keys=True)
        for file in self.folder.glob("nll/*.npz"):
            with np.load(file) as arrays:
                found[f"dump {file.name}"] = digest(*(arrays[name] for name in sorted(arrays)))
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

    def copied(self, name: str) -> Trial:
        """A copy of the undisturbed trial without its last checkpoint and its rows: half of the work is to do again."""
        trial = self.trial(name)
        shutil.rmtree(trial.folder, ignore_errors=True)
        shutil.copytree(self.whole.folder, trial.folder)
        shutil.rmtree(trial.run / "checkpoints" / str(STEPS))
        (trial.folder / "results.jsonl").unlink()
        return trial

    def finish(self, trial: Trial, kinds: tuple[str, ...], what: str) -> None:
        """The commands must end well, and with the numbers of the undisturbed run."""
        for kind in kinds:
            code, said = trial.end(kind)
            if code:
                self.complaints.append(f"{what}: {kind} ended with {code}: {said[-500:]}")
                return
        self.compare(trial, what)
        self.count(what.partition(":")[0])

    def compare(self, trial: Trial, what: str) -> None:
        found = trial.results()
        for name in self.expected.keys() | found.keys():
            dumped = name.startswith("dump") and name not in found  # a sweep makes none
            if found.get(name) != self.expected.get(name) and not dumped:
                self.differences += 1
                self.complaints.append(f"{what}: {name} differs")

    def count(self, what: str, times: int = 1) -> None:
        self.survived[what] = self.survived.get(what, 0) + times

    def kills(self, kills: int) -> None:
        """`kills` in all, of each command in turn; then all commands are given once more, to their end."""
        single, sweep = self.trial("killed"), self.trial("killed-sweep")
        for number in range(kills):
            kind = KINDS[number % len(KINDS)]
            trial = sweep if kind == "sweep" else single
            process = trial.start(kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0.2, 0.95) * self.seconds[kind])
            self.count(f"kills of {kind}", process.poll() is None)
            kill(process)
            if kind == "prepare" or number >= kills - len(KINDS):  # evaluating needs what was trained
                self.complete(trial, kind)
        self.finish(single, KINDS[:3], "ends after kills")
        self.finish(sweep, KINDS[3:], "ends after kills")

    def complete(self, trial: Trial, kind: str) -> None:
        code, said = trial.end(kind)
        if code:
            self.complaints.append(f"after a kill {kind} ended with {code}: {said[-500:]}")

    def flips(self, flips: int, kinds: list[str]) -> None:
        for kind in kinds:
            for _ in range(flips):
                self.flip(kind, self.copied("flipped"))

    def flip(self, kind: str, trial: Trial) -> None:
        """One bit of one file of a kind: training and evaluating tell of it, or give the same numbers."""
        files = [path for path in glob.glob(str(trial.folder / FILES[kind]), recursive=True) if os.path.getsize(path)]
        file = pathlib.Path(self.random.choice(sorted(files)))
        content, bit = bytearray(file.read_bytes()), self.random.randrange(8 * file.stat().st_size)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        what = f"flips in {kind}: bit {bit} of {file.relative_to(trial.folder)}"
        for command in ("train", "evaluate"):
            code, said = trial.end(command)
            if code:
                self.told(code, said, what)
                break
        else:
            with contextlib.suppress(ValueError):  # told by what reads the parameters or the dump
                self.compare(trial, what)
        self.count(f"flips in {kind}")

    def told(self, code: int, said: str, what: str) -> None:
        """An end with an error must be one of use, with its line, and no traceback."""
        if code != 1 or "error: " not in said or "Traceback" in said:
            self.complaints.append(f"{what}: ended with {code} and without a line that helps: {said[-800:]}")

    def full_disk(self) -> None:
        trial = self.copied("full")
        for spare in (0, 16, 48, 96):  # KiB: what the status, the config, the metrics and a checkpoint take
            with mounted(trial.run):
                remount(trial.run, f"size={shutil.disk_usage(trial.run).used // 1024 + spare}k")
                self.told(*trial.end("train"), f"full disks: {spare} KiB left")
                self.count("full disks")
        self.finish(trial, ("train", "evaluate"), "ends after full disks")

    def read_only(self) -> None:
        trial = self.copied("read-only")
        for part in (trial.run, trial.run / "checkpoints"):
            with mounted(part):
                remount(part, "ro")
                self.told(*trial.end("train"), f"read-only directories: {part.name}")
                self.count("read-only directories")
        self.finish(trial, ("train", "evaluate"), "ends after read-only directories")

    def second_start(self) -> None:
        trial = self.copied("twice")
        both = [trial.start("train") for _ in range(2)]
        ended = sorted((process.communicate()[1], process.returncode) for process in both)
        failed = [(code, said) for said, code in ended if code]
        for code, said in failed:
            self.told(code, said, "second starts")
        self.finish(trial, ("train", "evaluate"), "second starts")

    def moved_away(self) -> None:
        trial = self.copied("moved")
        process, away = trial.start("train"), trial.folder / "away"
        time.sleep(self.random.uniform(0.2, 0.9) * self.seconds["train"])
        trial.run.rename(away)
        said = process.communicate(timeout=300)[1]
        if process.returncode:
            self.told(process.returncode, said, "directories moved away")
        shutil.rmtree(trial.run, ignore_errors=True)  # what it may have begun anew
        away.rename(trial.run)
        self.finish(trial, ("train", "evaluate"), "directories moved away")


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
    parser.add_argument(
        "--kills", type=int, default=20, help="in all; preparing, training, evaluating, sweeping in turn"
    )
    parser.add_argument("--flips", type=int, default=20, help="of each kind of file")
    parser.add_argument("--kinds", default=",".join(FILES), help="of the files whose bits are flipped")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the bits")
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="alibi-faults-") as name:
        test = FaultTest(pathlib.Path(name), arguments.seed)
        test.kills(arguments.kills)
        test.flips(arguments.flips, arguments.kinds.split(","))
        test.second_start()
        test.moved_away()
        disks: list[Callable[[], None]] = [test.full_disk, test.read_only]
        if can_mount(test.folder / "probe"):
            for disk in disks:
                disk()
        else:
            print("left out, since only root can mount them: a full disk, a read-only directory")
    for what, times in test.survived.items():
        print(f"{what}: {times}")
    for complaint in test.complaints:
        print(f"wrong: {complaint}")
    print(f"differences: {test.differences}; took {time.monotonic() - start:.0f} s")
    return 1 if test.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
