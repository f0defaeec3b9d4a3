"""A run whose work directory is gs:// and whose rows are s3://, and a sweep at gs://, killed, against local ones.

    pip install -c requirements-test.txt -r requirements-test.txt gcsfs gcp-storage-emulator
    python scripts/store_test.py [--kills=3]

Both object stores are emulators on this machine. Trains and evaluates a small model by train.py and
eval_extrapolation.py, and two by sweep.py, kills them (kill -9) at random moments and gives the
commands again, starts a second one beside the first, and a sweep in two tasks that each have all
runs, one of them killed; and compares parameters, metrics, rows and reports with those of local
runs, also those of an imported checkpoint. Takes about six minutes; exits with 1 where anything differs.
"""

import collections
import contextlib
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator

from absl import flags

# A clone works without being installed: python scripts/store_test.py has only scripts/ on its path.
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from faults.trial import kill

from alibi.cli import command_line

_KILLS = flags.DEFINE_integer("kills", 3, "times that training is killed, and the evaluation", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "of the moments of the kills")

STEPS, EVERY, LENGTHS = 60, 5, (32, 64, 128, 256)
KEYS = (f"train.steps={STEPS}", "train.batch_tokens=1024", "model.num_layers=2", "model.width=32", "model.num_heads=2",
        "model.feed_forward=64", "optimizer.warmup_steps=5", f"log.every_steps={EVERY}",
        f"checkpoint.every_steps={EVERY}", "eval.every_steps=30")  # fmt: skip
CONFIG = f"configs/quickstart.py:length=32,{','.join(KEYS)}"
TRAIN = ["train.py", f"--config={CONFIG},position=alibi"]
SWEPT = ("alibi-L32-seed0", "none-L32-seed0")
SWEEP = f"""
def get_sweep():
    return {{"config": "{CONFIG}", "product": {{"position": ["alibi", "none"]}}, "lengths": {list(LENGTHS)}}}
"""
EVALUATE = ["eval_extrapolation.py", f"--lengths={','.join(map(str, LENGTHS))}", "--noreport"]
TIMES = ("seconds", "tokens_per_second", "mfu", "data_wait_seconds")  # what two runs need not have in common


@contextlib.contextmanager
def s3(bucket: str) -> Iterator[str]:
    """The address of an empty bucket of an S3 emulator, which the environment names to the processes started here."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    os.environ.update({"AWS_ENDPOINT_URL": url} | keys)
    urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
    yield f"s3://{bucket}"
    server.stop()


def start(words: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(words: list[str]) -> None:
    """Runs a command to its end; raises RuntimeError with what it said where it fails."""
    process = start(words)
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{said}")


def kill_when(words: list[str], far: Callable[[], bool]) -> bool:
    """Starts a command and kills it when it is `far` enough, and a moment more; False where it ended before."""
    process = start(words)
    while process.poll() is None and not far():
        time.sleep(0.05)
    time.sleep(random.random() / 2)
    ended = process.poll() is not None
    kill(process)
    return not ended


def disturb(workdir: str, output: str) -> dict[str, int]:
    """Trains in `workdir` and evaluates into `output` by processes that are killed; how many were."""
    from alibi.reporting.recorded import find_rows
    from alibi.runs import RunDirectory

    run, kills, train = RunDirectory(workdir), {"training": 0, "evaluation": 0}, [*TRAIN, f"--workdir={workdir}"]
    for _ in range(_KILLS.value):
        goal = run.status()["step"] + random.randint(1, STEPS // (_KILLS.value + 1))
        kills["training"] += kill_when(train, lambda goal=goal: run.status()["step"] >= goal)
        print(f"training killed after update {run.status()['step']}, saved {run.saved_steps()}", flush=True)
    before = run.status().get("updated")
    first = start(train)
    while run.status().get("updated") == before:
        time.sleep(0.05)
    second, _ = start(train).communicate()
    print("a second start: " + next((line for line in second.splitlines() if line.startswith("error")), "NOT REFUSED"))
    first.communicate()
    finish(train)
    evaluate = [*EVALUATE, f"--workdirs={workdir}", f"--output_dir={output}"]
    for _ in range(_KILLS.value):
        before = len(find_rows(output))
        kills["evaluation"] += kill_when(evaluate, lambda before=before: len(find_rows(output)) > before)
        print(f"evaluation killed with {len(find_rows(output))} of {len(LENGTHS)} rows", flush=True)
    finish(evaluate)
    finish(evaluate)  # once more: adds none
    return kills


def disturb_sweep(command: list[str], place: str) -> int:
    """Runs a sweep whose processes are killed, and at last two at once; returns how often it was killed."""
    from alibi.reporting.recorded import find_rows
    from alibi.runs import RunDirectory

    runs, kills = [RunDirectory(f"{place}/runs/{name}") for name in SWEPT], 0

    def done() -> float:
        return sum(run.status()["step"] / STEPS for run in runs) + len(find_rows(place)) / len(LENGTHS)

    for _ in range(_KILLS.value):
        goal = done() + random.uniform(0.1, 4 / (_KILLS.value + 1))
        kills += kill_when(command, lambda goal=goal: done() >= goal)
        print(f"sweep killed after updates {[run.status()['step'] for run in runs]}, {len(find_rows(place))} rows")
    both = [start(command) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    waited = sum("another process is at work" in text for text in said)
    print(f"two sweeps at once: {waited} waited, exit codes {[process.returncode for process in both]}", flush=True)
    finish(command)
    return kills


def disturb_tasks(command: list[str], place: str) -> int:
    """Runs a sweep in two tasks that both have all of its runs, the first of which is killed and started again."""
    from alibi.runs import RunDirectory

    runs, task = [RunDirectory(f"{place}/runs/{name}") for name in SWEPT], [*command, "--task=0/1"]
    beside = start(task)
    kills = kill_when(task, lambda: min(run.status()["step"] for run in runs) > STEPS // 4)
    finish(task)
    said, _ = beside.communicate()
    begun = sum(f"] {name}: training; " in said for name in SWEPT)
    print(f"two tasks at once, one killed: the other began {begun} of {len(SWEPT)} runs", flush=True)
    if beside.returncode:
        raise RuntimeError(said)
    return int(kills)


def differ_imported(places: tuple[str, str]) -> collections.Counter[str]:
    """Imports a checkpoint into two work directories and evaluates it there, with dumps, which are analysed."""
    from alibi.storage.store import open_store

    tiny, read = ROOT / "tests" / "data" / "fairseq-tiny", []
    for place in places:
        made = [f"--checkpoint={tiny}.pt", f"--dictionary={tiny}-dict.txt", f"--workdir={place}"]
        finish(["scripts/import_fairseq.py", *made])
        text = [f"--text_file={tiny}.txt", "--lengths=16,64", "--dump_nll", "--noreport"]
        finish(["eval_extrapolation.py", f"--workdirs={place}", *text])
        finish(["scripts/analyse_nll.py", f"--dumps={place}/nll/*.npz", f"--output_dir={place}/analysis"])
        store = open_store(place)
        read.append([store.read(f"analysis/by_context.{end}") for end in ("jsonl", "png")])
    counted = differences(*((place, place) for place in places))
    counted["analyses"] = sum(one != other for one, other in zip(*read, strict=True))
    return counted


def differ_swept(places: tuple[str, str]) -> collections.Counter[str]:
    """How much of two sweeps differs, in their runs and their reports."""
    from alibi.storage.store import open_store

    counted: collections.Counter[str] = collections.Counter()
    for name in SWEPT:
        counted.update(differences(*((f"{place}/runs/{name}", place) for place in places)))
    for name in ("report.md", "extrapolation.png"):
        one, other = (open_store(place).read(name) for place in places)
        counted[name] += one != other
    return counted


def differences(local: tuple[str, str], remote: tuple[str, str]) -> collections.Counter[str]:
    """How many parameters, metrics and rows differ between two runs, each a work directory and an output directory."""
    import jax
    import numpy as np

    from alibi.runs.trained import TrainedRun
    from alibi.storage.store import open_store

    params = [jax.tree.leaves(TrainedRun(workdir).params) for workdir, _ in (local, remote)]
    metrics, rows = [], []
    for workdir, output in (local, remote):
        store = open_store(workdir)
        names = [name for name in store.names() if name.startswith("metrics") and name.endswith(".jsonl")]
        metrics.append([_timeless(line) for name in names for line in store.read(name).splitlines()])
        rows.append([_timeless(line) for line in open_store(output).read("results.jsonl").splitlines()])
    print(f"compared: {sum(leaf.size for leaf in params[0]):,} parameters, {len(metrics[0])} rows of metrics, ", end="")
    print(f"{len(rows[0])} results")
    unequal = [int(np.sum(np.asarray(one) != np.asarray(other))) for one, other in zip(*params, strict=True)]
    counted = collections.Counter(parameters=sum(unequal))
    for what, (here, there) in (("metrics", metrics), ("results", rows)):
        counted[what] = sum(one != other for one, other in zip(here, there, strict=False)) + abs(len(here) - len(there))
    return counted


def _timeless(line: bytes) -> dict[str, object]:
    return {key: value for key, value in json.loads(line).items() if key not in TIMES}


def main() -> int:
    from gcs_emulator import gcs

    random.seed(_SEED.value)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, gcs("bucket") as runs, s3("results") as results:
        here, there = (f"{folder}/run", f"{folder}/out"), (f"{runs}/deep/run", f"{results}/deep/out")
        finish([*TRAIN, f"--workdir={here[0]}"])
        finish([*EVALUATE, f"--workdirs={here[0]}", f"--output_dir={here[1]}"])
        kills = disturb(*there)
        differ = differences(here, there)
        file, places = pathlib.Path(folder, "sweep.py"), (f"{folder}/sweep", f"{runs}/deep/sweep")
        file.write_text(SWEEP)
        command = ["scripts/sweep.py", f"--sweep={file}", "--workdir"]
        finish([*command, places[0]])
        kills["sweep"] = disturb_sweep([*command, places[1]], places[1])
        differ.update(differ_swept(places))
        kills["tasks"] = disturb_tasks([*command, f"{runs}/deep/tasks"], f"{runs}/deep/tasks")
        differ.update(differ_swept((places[0], f"{runs}/deep/tasks")))
        differ.update(differ_imported((f"{folder}/imported", f"{runs}/deep/imported")))
    print(f"kills survived: {kills}; differences: {dict(differ)}; {time.monotonic() - begun:.0f} s")
    return int(differ.total() > 0)


if __name__ == "__main__":
    command_line.run(main)
