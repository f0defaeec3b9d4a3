"""Processes of a sweep: signals, crashes, cores and a killed sweep."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from alibi.sweeps.children import Children, Place, Stopped, places
from alibi.sweeps.execute import describe_exit
from tests.sweeps.sweepmaker import PROJECT


def test_a_signal_is_passed_on_once_and_the_sweep_ends_when_the_run_has():
    code = (
        "import signal, sys, time, os\n"
        "def stop(*_): time.sleep(0.3); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop); os.kill(os.getppid(), signal.SIGINT); time.sleep(30)"
    )
    start = time.monotonic()
    with pytest.raises(Stopped), Children() as children:
        children.run([sys.executable, "-c", code])
    assert 0.3 < time.monotonic() - start < 20


def test_a_crash_ends_only_its_own_process():
    with Children() as children:
        assert children.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == -signal.SIGKILL
        assert children.run([sys.executable, "-c", ""]) == 0
    assert "no memory was left" in describe_exit(-9)
    assert describe_exit(1) == "ended with exit code 1; its message stands above"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_runs_at_a_time_have_cores_of_their_own(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    assert places(1) == [Place()]  # one run takes what it finds
    dealt = [sorted(place.cores) for place in places(len(cores))]
    assert [core for share in dealt for core in share] == cores
    assert all(dealt)
    with pytest.raises(ValueError, match=f"jobs={len(cores) + 1} must be between 1 and {len(cores)}"):
        places(len(cores) + 1)
    seen = "sorted(os.sched_getaffinity(0)), os.environ['TQDM_POSITION']"
    code = f"import os, sys; print({seen}, file=open(sys.argv[1], 'w'))"
    with Children() as children:
        children.run([sys.executable, "-c", code, str(tmp_path / "seen")], Place(3, frozenset(cores[-1:])))
    assert (tmp_path / "seen").read_text() == f"{cores[-1:]} 3\n"


def test_runs_at_a_time_are_all_stopped_by_one_signal():
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\ntime.sleep(60)"
    with Children() as children, concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(children.run, [sys.executable, "-c", code]) for _ in range(2)]
        _wait_until(lambda: len(children._running) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert [type(one.exception(timeout=30)) for one in running] == [Stopped, Stopped]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_a_run_does_not_outlive_a_killed_sweep(tmp_path):
    parent = (
        "import sys\nfrom alibi.sweeps.children import Children\n"
        "with Children() as children:\n"
        "    children.run([sys.executable, '-c', 'import os, sys, time; "
        'open(sys.argv[1], "w").write(str(os.getpid())); time.sleep(60)\', sys.argv[1]])'
    )
    file = tmp_path / "pid"
    sweep = subprocess.Popen([sys.executable, "-c", parent, str(file)], cwd=PROJECT)
    _wait_until(lambda: file.exists() and file.read_text())
    sweep.kill()
    sweep.wait()
    _wait_until(lambda: not pathlib.Path(f"/proc/{file.read_text()}/cmdline").exists() or _is_zombie(file.read_text()))


def _wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_zombie(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}") and ") Z" in pathlib.Path(f"/proc/{pid}/stat").read_text()
