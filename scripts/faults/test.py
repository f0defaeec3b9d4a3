"""Faults one after the other, each against what an undisturbed run gives."""

import contextlib
import glob
import os
import pathlib
import random
import shutil
import subprocess
import time

from faults.disks import mounted, remount
from faults.trial import HUNG_SECONDS, STEPS, Trial, kill, make_inputs

KINDS = ("prepare", "train", "evaluate", "sweep")
# The files of a work directory and of the cache, by what they are.
FILES = {
    "tokens": "cache/tokens/*/tokens-*.bin",
    "manifests": "cache/tokens/*/manifest.json",
    "tokenizers of the cache": "cache/token*/**/dict.txt",
    "configs": "runs/*/config.json",
    "status": "runs/*/status.json",
    "provenance": "runs/*/provenance.json",
    "metrics": "runs/*/metrics.jsonl",
    "tokenizers of runs": "runs/*/tokenizer/*",
    "parameters": "runs/*/checkpoints/*/params/**/d/*",
    "optimizer states": "runs/*/checkpoints/*/optimizer/**/d/*",
    "indexes of checkpoints": "runs/*/checkpoints/*/**/manifest.ocdbt",
    "shapes in checkpoints": "runs/*/checkpoints/*/**/_METADATA",
    "checkpoints' JSON": "runs/*/checkpoints/*/*/metadata",
    "rows": "rows/*/*.json",
    "dumps": "nll/*.npz",
}


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

    def flips(self, flips: int, kind: str) -> None:
        for _ in range(flips):
            self.flip(kind)

    def flip(self, kind: str) -> None:
        """One bit of one file of a kind: training and evaluating tell of it, or give the same numbers."""
        trial = self.copied("flipped")
        if kind in ("rows", "dumps"):
            shutil.rmtree(trial.folder)
            shutil.copytree(self.whole.folder, trial.folder)
        files = [path for path in glob.glob(str(trial.folder / FILES[kind]), recursive=True) if os.path.isfile(path)]
        sizes = list(map(os.path.getsize, sorted(files)))  # each bit is as likely as any other of its kind
        file = pathlib.Path(*self.random.choices(sorted(files), sizes))
        content, bit = bytearray(file.read_bytes()), self.random.randrange(8 * file.stat().st_size)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        self.count(f"flips in {kind}")
        if not trial.finish():
            with contextlib.suppress(ValueError):  # told by what reads a dump
                self.compare(trial, f"flips in {kind}: bit {bit} of {file.relative_to(trial.folder)}")

    def told(self, code: int, said: str, what: str) -> None:
        """An end with an error must be one of use, told in a line without any traceback."""
        self.count(what.partition(":")[0])
        if code != 1 or "\nerror: " not in f"\n{said}" or "Traceback" in said:
            self.complaints.append(f"{what}: ended with {code} and without a line that helps: {said[-800:]}")

    def moved_away(self) -> None:
        trial = self.copied("moved")
        process, away = trial.start("train"), trial.folder / "away"
        time.sleep(self.random.uniform(0.5, 0.9) * self.seconds["train"])
        trial.run.rename(away)
        said = process.communicate(timeout=HUNG_SECONDS)[1]
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
