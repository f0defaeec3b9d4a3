"""Processes of a sweep: signals, crashes, cores and a killed sweep."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from alibi.errors import OF_SWEEP, Interrupted
from alibi.sweeps.execute import Sweeper
from alibi.sweeps.processes import Ended, LocalProcesses, Slot, make_slots
from tests.refusals import assert_refused
from tests.sweeps.sweepmaker import PROJECT, sweep_of


def script(folder, code):
    """A file with `code`, where a command has its script."""
    file = folder / "script.py"
    file.write_text(code)
    return str(file)


def test_a_signal_is_passed_on_once_and_the_sweep_ends_when_the_run_has(tmp_path):
    code = (
        "import signal, sys, time, os\n"
        "def stop(*_): time.sleep(0.3); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop); os.kill(os.getppid(), signal.SIGINT); time.sleep(30)"
    )
    start = time.monotonic()
    with pytest.raises(Interrupted), LocalProcesses() as processes:
        processes.run([script(tmp_path, code)])
    assert 0.3 < time.monotonic() - start < 20


def test_the_first_error_of_a_script_is_kept_and_everything_still_printed(tmp_path, capfd):
    code = (
        "import sys\nfrom alibi.errors import print_error\nprint('bar', file=sys.stderr)\n"
        "for why in sys.argv[1:]: print_error(why)\nsys.exit(3)"
    )
    ended = LocalProcesses().run([script(tmp_path, code), "no such file", "1 of 1 failed"])
    assert (ended.code, ended.reason("training")) == (3, "no such file")
    assert capfd.readouterr().err == "bar\nerror: no such file\nerror: 1 of 1 failed\n"


def test_lines_of_processes_at_a_time_are_whole_and_named(tmp_path, capfd):
    """Each writes its lines in two halves, between which the other process writes."""
    code = (
        "import sys, time\n"
        "for half in ('up', 'date 1\\n', 'bar 1%\\rbar ', '2%\\r\\n\\n', 'own-0 ends', ''):\n"
        "    sys.stderr.write(half); sys.stderr.flush(); time.sleep(0.05)\n"
    )
    processes, command, names = LocalProcesses(), [script(tmp_path, code)], ("own-0", "own-1")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: processes.run(command, Slot(name=name)), names))
    said = capfd.readouterr().err
    assert "\r" not in said
    assert sorted(said.splitlines()) == sorted(
        line
        for name, last in zip(names, ("own-0 ends", "own-1: own-0 ends"), strict=True)
        for line in (f"{name}: update 1", f"{name}: bar 1%", f"{name}: bar 2%", last)
    )


def test_a_process_knows_that_a_sweep_waits_for_it(tmp_path, capfd):
    code = "import os, sys; print(sys.argv[1] in os.environ)"
    LocalProcesses().run([script(tmp_path, code), OF_SWEEP])
    assert capfd.readouterr().out == "True\n"


def test_a_crash_ends_only_its_own_process(tmp_path):
    processes = LocalProcesses()
    crashed = processes.run([script(tmp_path, "import os; os.kill(os.getpid(), 9)")])
    assert crashed.code == -signal.SIGKILL
    assert crashed.reason("training").startswith("training was killed by SIGKILL")
    assert processes.run([script(tmp_path, "")]).reason("training") == ""
    assert (
        Ended(1).reason("training") == "training ended with exit code 1; its message stands above"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_runs_at_a_time_have_cores_and_gpus_of_their_own(tmp_path, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    assert make_slots(1) == [Slot()]  # one run takes what it finds
    dealt = [sorted(slot.cores) for slot in make_slots(len(cores))]
    assert [core for share in dealt for core in share] == cores
    assert all(dealt)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7")
    if len(cores) > 1:
        assert [slot.gpus for slot in make_slots(2)] == [("3",), ("GPU-5", "7")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert not any(slot.gpus for slot in make_slots(len(cores))), "too few for one each: all see it"
    assert_refused(
        f"--jobs={len(cores) + 1} .* {len(cores)}",
        lambda: Sweeper(sweep_of(), tmp_path, jobs=len(cores) + 1),
    )
    seen = "sorted(os.sched_getaffinity(0)), os.environ['TQDM_POSITION'], os.environ['CUDA_VISIBLE_DEVICES']"
    code = f"import os, sys; print({seen}, file=open(sys.argv[1], 'w'))"
    slot = Slot(3, frozenset(cores[-1:]), ("GPU-5", "7"))
    LocalProcesses().run([script(tmp_path, code), str(tmp_path / "seen")], slot)
    assert (tmp_path / "seen").read_text() == f"{cores[-1:]} 3 GPU-5,7\n"


@pytest.mark.slow
def test_runs_at_a_time_are_all_stopped_by_one_signal(tmp_path):
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "open(sys.argv[1], 'w').close(); time.sleep(60)"
    )
    begun = [tmp_path / "first", tmp_path / "second"]
    with LocalProcesses() as processes, concurrent.futures.ThreadPoolExecutor(2) as pool:
        commands = [[script(tmp_path, code), str(file)] for file in begun]
        running = [pool.submit(processes.run, command) for command in commands]
        _wait_until(lambda: all(file.exists() for file in begun))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [type(one.exception(timeout=30)) for one in running] == [Interrupted, Interrupted]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent was killed"
)
def test_a_run_does_not_outlive_a_killed_sweep(tmp_path):
    code = 'import os, sys, time; open(sys.argv[1], "w").write(str(os.getpid())); time.sleep(60)'
    parent = (
        "import sys\nfrom alibi.sweeps.processes import LocalProcesses\n"
        "LocalProcesses().run(sys.argv[1:])"
    )
    file = tmp_path / "pid"
    sweep = subprocess.Popen(
        [sys.executable, "-c", parent, script(tmp_path, code), str(file)], cwd=PROJECT
    )
    _wait_until(lambda: file.exists() and file.read_text())
    sweep.kill()
    sweep.wait()
    _wait_until(
        lambda: (
            not pathlib.Path(f"/proc/{file.read_text()}/cmdline").exists()
            or _is_zombie(file.read_text())
        )
    )


def _wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_zombie(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}") and ") Z" in pathlib.Path(f"/proc/{pid}/stat").read_text()
