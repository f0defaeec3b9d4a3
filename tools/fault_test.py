"""Kills and damages small runs, and compares their results with an undisturbed run, bit for bit.

    python -m tools.fault_test                      # 5 kills of each command, 20 bits of each kind of file
    python -m tools.fault_test --kills=1 --flips=1  # a short form

Kills (SIGKILL) come at random moments while it prepares, trains, evaluates and sweeps. The same command
is then given again. A flipped bit must end in a line that names the damage, or change nothing. Damage
to a run's small files (one bit, half or the whole file) must change nothing. When two starts come at
once, the second may be refused in a line. Prints the survived faults. Exits with 1 if parameters or
rows differ, or a line is missing.
"""

import argparse
import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from alibi.errors import REQUEUE
from tools.fault_trial import HUNG_SECONDS, STEPS, Trial, kill, make_inputs

KINDS = ("prepare", "train", "evaluate", "sweep")
STARTS = ("train", "sweep", "train without locks", "sweep without locks")
# Python runs this first in each process, also in those that a sweep starts: a file system without
# locks.
NO_LOCKS = """
import errno
import fcntl


def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


fcntl.flock = flock
"""
# The files of a work directory and of the cache, by kind.
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
# Made again from a checkpoint; or, of metrics, of no effect on the training.
SMALL = ("configs", "status", "provenance", "metrics")
DAMAGES = ("one bit", "half", "removed")


class FaultTest:
    """One method for each kind of fault. Each prints how many were survived.

    Attributes:
      differences: results unlike those of the undisturbed run.
      mistakes: commands that failed, or ended without the line they owe.
    """

    def __init__(self, folder: pathlib.Path, seed: int):
        self.folder, self.inputs, self.random = folder, folder / "inputs", random.Random(seed)
        self.differences = self.mistakes = 0
        make_inputs(self.inputs)
        self.whole, self.seconds = Trial(folder / "undisturbed", self.inputs), {}
        for kind in KINDS[:3]:
            start = time.monotonic()
            code, messages = self.whole.end(kind)
            self.seconds[kind] = time.monotonic() - start
            if code:
                raise SystemExit(f"error: undisturbed, {kind} ended with {code}:\n{messages}")
        self.seconds["train"] /= 2  # later starts find the compilations
        self.seconds["sweep"] = sum(self.seconds.values())
        self.expected = self.whole.results()

    def before(self, kind: str) -> Trial:
        """Returns a trial in the state in which a command begins: a copy of the undisturbed trial
        without its results.
        """
        trial = Trial(self.folder / f"before-{kind}", self.inputs)
        shutil.rmtree(trial.folder, ignore_errors=True)
        if kind in ("prepare", "sweep"):
            return trial
        shutil.copytree(self.whole.folder, trial.folder)
        for results in ("rows", "nll"):
            shutil.rmtree(trial.folder / results)
        (trial.folder / "results.jsonl").unlink()
        if kind == "train":
            shutil.rmtree(trial.run)
        return trial

    def kills(self, kills: int, kind: str) -> None:
        """Kills a command at random moments and gives it again, from the beginning if it ended
        before the kill.
        """
        fault, killed = f"kills of {kind}", 0
        trial, longest = self.before(kind), self.seconds[kind]
        while killed < kills:
            process, start = trial.start(kind), time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0, longest))
            if process.poll() is None:
                killed += 1
                kill(process)
            else:
                process.communicate()
                trial, longest = self.before(kind), 0.9 * (time.monotonic() - start)
        code, messages = trial.end(kind)
        if code:
            self._fail(f"{fault}: afterwards it ended with {code}: {messages[-500:]}")
        self._finish(trial, fault)
        print(f"{fault}: {killed}", flush=True)

    def flips(self, flips: int, kind: str) -> None:
        """Flips bits, each in a fresh copy. Training and evaluating name the damage, or give the same
        numbers. For a small file they always give the same numbers.
        """
        for _ in range(flips):
            trial = self.before("evaluate")
            if kind in ("rows", "dumps"):
                shutil.rmtree(trial.folder)
                shutil.copytree(self.whole.folder, trial.folder)
            else:
                # so that training reads all files
                shutil.rmtree(trial.run / "checkpoints" / str(STEPS))
            files = sorted(path for path in trial.folder.glob(FILES[kind]) if path.is_file())
            # Each bit is as likely as any other of its kind.
            (file,) = self.random.choices(files, [path.stat().st_size for path in files])
            fault = f"flips in {kind}: bit {self._flip(file)} of {file.relative_to(trial.folder)}"
            error = trial.finish()
            if error and kind in SMALL:
                self._fail(f"{fault}: {error}")
            elif not error:
                with contextlib.suppress(ValueError):  # a dump names its damage when it is read
                    self._compare(trial, fault)
        print(f"flips in {kind}: {flips}", flush=True)

    def small_files(self, damage: str) -> None:
        """Damages all small files of a run at once: evaluating it gives the same numbers, and so
        does training it on from an earlier checkpoint.
        """
        fault = f"small files, {damage}"
        trial = self.before("evaluate")
        files = [file for kind in SMALL for file in trial.folder.glob(FILES[kind])]
        for file in files:
            if damage == "one bit":
                self._flip(file)
            elif damage == "half":
                os.truncate(file, file.stat().st_size // 2)
            else:
                file.unlink()
        self._finish(trial, f"{fault}, evaluated")
        shutil.rmtree(trial.run / "checkpoints" / str(STEPS))
        self._finish(trial, f"{fault}, trained on")
        print(f"{fault}: {len(files)}", flush=True)

    def _flip(self, file: pathlib.Path) -> int:
        """Flips a bit of a file, and returns its number."""
        content = bytearray(file.read_bytes())
        bit = self.random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        return bit

    def second_start(self, start: str) -> None:
        """Starts a training or a sweep twice: either waits, finds all done, is stopped or refused in a
        line, or leaves the run to the other process, which it names, with 75.
        """
        kind, fault = start.partition(" ")[0], f"second starts of {start}"
        trial = self.before(kind)
        if start.endswith("without locks"):
            folder = self.folder / "no-locks"
            folder.mkdir(exist_ok=True)
            (folder / "sitecustomize.py").write_text(NO_LOCKS)
            trial.environment["PYTHONPATH"] = os.pathsep.join(
                [str(folder), trial.environment["PYTHONPATH"]]
            )
        for process in [trial.start(kind) for _ in range(2)]:
            messages = process.communicate(timeout=HUNG_SECONDS)[1]
            code = process.returncode
            left = code == REQUEUE and "another process is " in messages
            if code and not left and (code != 1 or "Traceback" in messages):
                line = f"ended with {code} and without a line that helps"
                self._fail(f"{fault}: {line}: {messages[-800:]}")
        self._finish(trial, fault)
        print(f"{fault}: 1", flush=True)

    def _fail(self, mistake: str) -> None:
        self.mistakes += 1
        print(f"wrong: {mistake}", flush=True)

    def _finish(self, trial: Trial, fault: str) -> None:
        if error := trial.finish():
            self._fail(f"{fault}: {error}")
        else:
            self._compare(trial, fault)

    def _compare(self, trial: Trial, fault: str) -> None:
        results = trial.results()
        for name in sorted(self.expected.keys() | results.keys()):
            now, whole = results.get(name), self.expected.get(name)
            if now != whole:
                self.differences += 1
                print(f"wrong: {fault}: {name} differs: {now}, not {whole}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="kills of each command")
    parser.add_argument("--commands", default=",".join(KINDS), help="commands that are killed")
    parser.add_argument("--flips", type=int, default=20, help="flipped bits in each kind of file")
    parser.add_argument(
        "--kinds", default=",".join(FILES), help="kinds of files in which bits are flipped"
    )
    parser.add_argument(
        "--small", default=",".join(DAMAGES), help="damages of all small files of a run at once"
    )
    parser.add_argument(
        "--starts", default=",".join(STARTS), help="commands that are started twice at once"
    )
    parser.add_argument("--seed", type=int, default=0, help="seeds the moments and the bits")
    arguments = parser.parse_args()
    chosen = {}
    for flag, names in (
        ("commands", KINDS),
        ("kinds", FILES),
        ("small", DAMAGES),
        ("starts", STARTS),
    ):
        chosen[flag] = list(filter(None, getattr(arguments, flag).split(",")))
        if unknown := set(chosen[flag]) - set(names):
            parser.error(f"--{flag}={','.join(unknown)}: there are {', '.join(names)}")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="alibi-faults-") as name:
        test = FaultTest(pathlib.Path(name), arguments.seed)
        for kind in chosen["commands"] if arguments.kills else ():
            test.kills(arguments.kills, kind)
        for kind in chosen["kinds"] if arguments.flips else ():
            test.flips(arguments.flips, kind)
        for damage in chosen["small"]:
            test.small_files(damage)
        for start in chosen["starts"]:
            test.second_start(start)
    print(f"differences: {test.differences}, other mistakes: {test.mistakes}")
    print(f"took {time.monotonic() - begun:.0f} s")
    return 1 if test.differences or test.mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
