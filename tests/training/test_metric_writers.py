"""Metrics go to each writer in the config; a resumed run continues its old record."""

import dataclasses
import importlib
import json
import pathlib
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from alibi.config import make_config
from alibi.runs import RunDirectory, config_hash
from alibi.training import loop, metric_writers, setup
from alibi.training.metric_writers import check_writers, open_writers, tracked
from tests.refusals import assert_refused
from tests.training.runs import rows

# Of a service's package that can't be had in every environment: what this project calls of it, and
# no more.
STAND_IN = """
import json, pathlib

class Run:
    def log(self, values, step):
        if step == 4:
            raise OSError("the database is locked\\nfor good")
        with open({file!r}, "a") as file:
            file.write(json.dumps([step, values]) + "\\n")

def init(**given):
    print("noise")
    pathlib.Path({file!r}).write_text(json.dumps([given["project"], given["name"], given["resume"]]) + "\\n")
    return Run()
"""


@pytest.mark.parametrize("package", metric_writers.SERVICES)
def test_a_missing_package_is_one_line_before_any_work(
    tiny_config, tmp_path, monkeypatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as Python sees a package that isn't there
    monkeypatch.setattr(setup, "prepare_files", lambda *_: pytest.fail("text was prepared"))
    assert_refused(
        f"^log.{package}=True .* pip install {package}, ",
        loop.train,
        tiny_config(**{f"log__{package}": True}),
        str(tmp_path / "run"),
    )
    assert not (tmp_path / "run").exists()


def test_tensorboard_needs_no_pytorch_where_it_is_installed(tmp_path, monkeypatch) -> None:
    """Its import takes longer than a tiny run's updates."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('PyTorch is imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [*sys.modules]:
        if name == "torch" or name.partition(".")[0] == "tensorboardX":
            monkeypatch.delitem(sys.modules, name)
    check_writers(make_config("log.tensorboard=true"))
    assert "tensorboardX" in sys.modules
    with pytest.raises(RuntimeError, match="PyTorch is imported"):  # whoever needs it later gets it
        importlib.import_module("torch")


def test_a_service_that_fails_is_one_line_and_training_goes_on(
    tiny_config, tmp_path, monkeypatch, capsys
) -> None:
    file = tmp_path / "logged.jsonl"
    (tmp_path / "trackio.py").write_text(STAND_IN.format(file=str(file)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    workdir = tmp_path / "some sweep" / "runs" / "own"
    assert loop.train(tiny_config(log__trackio=True), str(workdir))["state"] == "finished"
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if "failed" in line]
    told = "Trackio failed, no more metrics are written there, and training goes on (the database is locked)"
    assert line == f"own: {told}"
    known = json.loads((workdir / "tracked.json").read_text())
    assert known["project"] == "some-sweep"
    begun, *logged = map(json.loads, file.read_text().splitlines())
    assert begun == ["some-sweep", known["id"], "allow"]
    written = [(row.pop("step"), row) for row in rows(workdir)]
    assert [step for step, _ in written if step > 3], "metrics.jsonl has all of them"
    assert [tuple(one) for one in logged] == [one for one in written if one[0] < 4]
    del sys.modules["trackio"]


def test_a_run_keeps_the_name_that_services_know_it_by(tmp_path) -> None:
    run, other = (
        RunDirectory(tmp_path / "sweep" / "runs" / "alibi L=1"),
        RunDirectory(tmp_path / "alone" / "alibi"),
    )
    first = tracked(run)
    assert first["id"].startswith("alibi-L-1-")
    assert first["project"] == "sweep"
    assert tracked(run) == first
    assert tracked(run, "papers") == first | {"project": "papers"}
    assert tracked(run) == first | {"project": "papers"}, "and that of its last start stays"
    assert tracked(other)["project"] == "alone"
    (run.path / "tracked.json").write_text("{half")
    assert tracked(run)["id"] != first["id"]


def test_writers_may_change(tiny_config, tmp_path) -> None:
    config, run = tiny_config(), RunDirectory(tmp_path)
    run.write("config.json", dataclasses.asdict(config))
    changed = tiny_config(log__wandb=True, log__trackio=True, log__project="mine")
    assert run.differing(changed) == {}
    assert config_hash(changed) == config_hash(config)


@pytest.fixture
def services(tiny_config, tmp_path, monkeypatch) -> Any:
    """A function of a package's name to the work directory of a run, stopped and resumed with this
    writer.
    """

    def train(package: str) -> pathlib.Path:
        pytest.importorskip(package, reason=f"needs the package {package}: pip install {package}")
        monkeypatch.setenv("WANDB_MODE", "offline")
        config, workdir = (
            tiny_config(**{f"log__{package}": True}),
            tmp_path / "sweep" / "runs" / "own",
        )
        loop.train(config, str(workdir))
        shutil.rmtree(workdir / "checkpoints" / "6")
        assert loop.train(config, str(workdir))["state"] == "finished"
        return workdir

    return train


def records(log: bytes) -> Iterator[bytes]:
    """Yields the records of a file of W&B, in LevelDB's log format (github.com/google/leveldb,
    doc/log_format.md).

    After a header of 7 bytes, in blocks of 32 KiB, each part of a record has a checksum of 4 bytes,
    its length in 2 and its type in 1: whole, first, middle or last. Recent versions of the package
    have no reader in Python.
    """
    place, record = 7, b""
    while len(log) - place >= 7:
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        record += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_wandb_offline_is_read_back_as_one_run(services) -> None:
    workdir = services("wandb")
    from wandb.proto import wandb_internal_pb2

    ids, seen, codes = set(), {}, []
    for file in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            elif record.WhichOneof("record_type") == "exit":
                codes.append(record.exit.exit_code)
            elif record.WhichOneof("record_type") == "history":
                values = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                seen.setdefault(values.pop("_step"), {}).update(values)
    assert ids == {(json.loads((workdir / "tracked.json").read_text())["id"], "sweep", "own")}
    assert codes == [0, 0]
    assert_same_metrics(seen, workdir)


@pytest.mark.filterwarnings("ignore")
def test_trackios_database_is_read_back_as_one_run(services, tmp_path, monkeypatch) -> None:
    # which is read when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    workdir = services("trackio")
    seen: dict[int, dict[str, float]] = {}
    with sqlite3.connect(tmp_path / "database" / "sweep.db") as database:
        names = database.execute("select distinct run_name, run_id from metrics").fetchall()
        for step, metrics in database.execute("select step, metrics from metrics order by id"):
            seen.setdefault(step, {}).update(json.loads(metrics))
    assert [name for name, _ in names] == [json.loads((workdir / "tracked.json").read_text())["id"]]
    assert_same_metrics(seen, workdir)


def assert_same_metrics(seen: dict[int, dict[str, float]], workdir: pathlib.Path) -> None:
    """Each row of metrics.jsonl was written, with all of its values."""
    for row in rows(workdir):
        written = seen[row.pop("step")]
        assert {key: written[key] for key in row} == pytest.approx(row)
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore")
def test_wandb_that_is_not_reached_is_one_line_and_files(tmp_path, monkeypatch, capsys) -> None:
    wandb = pytest.importorskip("wandb", reason="needs the package wandb: pip install wandb")
    wandb.teardown()  # so that it reads its environment now
    for name, value in {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(metric_writers, "INIT_SECONDS", 1.0)
    config, run = (
        make_config("log.wandb=true,log.tensorboard=false"),
        RunDirectory(tmp_path / "run"),
    )
    for writer in open_writers(config, run, 0):
        writer.write(1, {"train_nll": 2.0})
        writer.close(False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run: W&B is offline (")
    assert list(run.path.glob(f"wandb/offline-run-*/run-{tracked(run)['id']}.wandb"))
