"""Sweeps: what a file means, where a sweep stands, and that kills, crashes and restarts cost nothing finished."""

import concurrent.futures
import errno
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from alibi.data.tokenizers import ByteTokenizer
from alibi.reporting.rows import append_rows
from alibi.runs import RunDirectory, config_hash
from alibi.sweeps import execute, plan
from alibi.sweeps.children import Children, Place, Stopped, places
from alibi.sweeps.definition import load_sweep, make_sweep
from alibi.sweeps.execute import describe_exit, is_in_progress, is_primary
from alibi.sweeps.failures import read_failures, write_failure
from alibi.sweeps.plan import Speed, format_duration, plan_table, survey
from tests.reporting.rowmaker import make_row

PROJECT = pathlib.Path(__file__).resolve().parent.parent
QUICKSTART = PROJECT / "configs" / "sweeps" / "quickstart.py"


def sweep_of(**changed):
    definition = {"config": "configs/quickstart.py", "product": {"position": ["alibi", "t5"]}, "multiples": [1, 2]}
    return make_sweep(definition | changed, title="test")


def finish(sweep, workdir, name, **status):
    """Leaves the work directory of a finished run."""
    run = next(run for run in sweep.runs if run.name == name)
    directory = RunDirectory(workdir / "runs" / name)
    directory.check(run.config)
    directory.claim(run.config, ByteTokenizer())
    directory.release()
    steps = run.config.train.steps
    status = {"state": "finished", "step": steps, "steps": steps, "tokens_per_second": 2048.0} | status
    (directory.checkpoints / str(status["step"])).mkdir(parents=True)
    directory.write_status(**status)


def result(sweep, position="alibi", eval_length=128, perplexity=8.0, **changed):
    """A row of that method's run."""
    run = next(run for run in sweep.runs if run.config.position == position)
    known = {"config_hash": config_hash(run.config), "step": run.config.train.steps}
    return make_row(position, eval_length, perplexity, **(known | changed))


def test_the_quickstart_is_four_methods_at_128_up_to_16_times_that():
    sweep = load_sweep(QUICKSTART)
    assert [run.name for run in sweep.runs] == [
        "sinusoidal-L128-seed0",
        "rotary-L128-seed0",
        "t5-L128-seed0",
        "alibi-L128-seed0",
    ]
    for run in sweep.runs:
        (evaluation,) = run.evaluations
        assert (evaluation.lengths, evaluation.stride, evaluation.split) == ((128, 256, 512, 1024, 2048), None, "valid")


@pytest.mark.parametrize("path", sorted(QUICKSTART.parent.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_sweep_of_the_project_can_be_run(path):
    """Their configs, options and names are checked when they are read."""
    assert load_sweep(path).runs


def test_the_sweep_of_what_the_paper_tried_has_its_options():
    runs = {run.name: run.config for run in load_sweep(QUICKSTART.parent / "negative_results.py").runs}
    assert {name for name, config in runs.items() if config.model.window == 128} == {
        f"{method}-window" for method in ("sinusoidal", "rotary", "alibi")
    }
    for method in ("sinusoidal", "rotary", "alibi"):  # each beside itself without a window
        assert (runs[method].position, runs[method].model.window) == (method, 0)
    slopes = [runs[f"alibi-random-{draw}"].position_options.to_dict() for draw in range(3)]
    assert slopes == [{"slopes": "random", "draw": draw} for draw in range(3)]


def test_products_explicit_runs_and_evaluations_of_their_own():
    sweep = sweep_of(
        product={"position": ["alibi"], "train_length": [64, 128], "seed": [0, 1]},
        runs=[
            {"position": "none", "model.dropout": 0.1, "lengths": [300], "stride": [1, 100], "split": "train"},
            {
                "position": "alibi",
                "name": "mine",
                "evaluations": [{"multiples": [1]}, {"lengths": [512], "stride": 64}],
            },
        ],
    )
    assert [run.name for run in sweep.runs] == [
        "alibi-L64-seed0",
        "alibi-L64-seed1",
        "alibi-L128-seed0",
        "alibi-L128-seed1",
        "none-L128-dropout=0.1-seed0",
        "mine",
    ]
    assert sweep.runs[1].config.train_length == 64
    assert sweep.runs[1].config.seed == 1
    assert sweep.runs[0].evaluations[0].lengths == (64, 128)
    assert [(e.lengths, e.stride, e.split) for e in sweep.runs[4].evaluations] == [
        ((300,), 1, "train"),
        ((300,), 100, "train"),
    ]
    assert [(e.lengths, e.stride) for e in sweep.runs[5].evaluations] == [((128,), None), ((512,), 64)]


def test_the_flags_give_train_py_the_same_config():
    run = sweep_of(runs=[{"data.train": "a.txt,b.txt", "seed": 3, "name": "x"}], product={"seed": [0]}).runs[1]
    assert run.config_flags() == [
        f"--config={PROJECT / 'configs/quickstart.py'}:seed=3",
        "--config.data.train=a.txt,b.txt",
    ]
    code = (
        "from absl import app\nfrom ml_collections import config_flags\n"
        "flag = config_flags.DEFINE_config_file('config')\n"
        "app.run(lambda argv: print(flag.value.data.train, flag.value.seed))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *run.config_flags()], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "a.txt,b.txt 3\n"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"product": {"position": ["alibi", "sinusodial"]}},
            r"run \(position=sinusodial\): .*did you mean 'sinusoidal'",
        ),
        ({"product": {"model.widht": [64]}}, "unknown config key 'model.widht'; did you mean 'model.width'"),
        ({"product": {"position": "alibi"}}, "product key 'position' needs a list of values"),
        ({"product": {"model.num_heads": [3]}}, "num_heads=3 does not divide model.width=128"),
        ({"product": {"train_length": [100]}}, "batch_tokens=2048 must be a multiple of 100"),
        ({"multiple": [1]}, "unknown key 'multiple' in the sweep; did you mean 'multiples'"),
        ({"lengths": [128]}, "either 'multiples' or 'lengths'"),
        ({"multiples": [0.5]}, "whole numbers of tokens"),
        ({"stride": 129}, "stride=129 must be between 1 and the length 128"),
        ({"stride": 64.0}, "stride=64.0 must be a whole number"),
        ({"split": "train2"}, "split 'train2' is unknown; use one of train, valid, test"),
        ({"split": "test"}, "data.test is empty"),
        ({"product": {"seed": [0]}, "runs": [{"seed": 0}]}, "runs of equal name: alibi-L128-seed0"),
        ({"runs": [{"name": "../x"}]}, "must do as a directory's name"),
        ({"config": "configs/absent.py"}, "configs/absent.py does not exist"),
    ],
)
def test_a_bad_sweep_is_refused_before_the_first_run(changed, message):
    with pytest.raises(ValueError, match=message):
        sweep_of(**changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"has no get_sweep\(\)"),
        ("def get_sweep(:", "does not load: SyntaxError"),
        ("def get_sweep():\n    return 3", "must return a dictionary, not int"),
        ("def get_sweep():\n    return {'config': 'configs/quickstart.py'}", "the sweep has no runs"),
        ("def get_sweep():\n    return {'runs': [{}]}", "the sweep names no config"),
    ],
)
def test_a_bad_sweep_file(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_sweep(tmp_path / "bad.py")


def test_states_of_runs(tmp_path):
    sweep = sweep_of(product={"position": ["alibi", "t5", "none", "rotary", "sinusoidal"]})
    finish(sweep, tmp_path, "alibi-L128-seed0")
    finish(sweep, tmp_path, "t5-L128-seed0")
    finish(sweep, tmp_path, "none-L128-seed0", state="running", step=200)
    finish(sweep, tmp_path, "rotary-L128-seed0", state="failed", step=30, reason="update 31:\nloss nan")
    rows = [
        result(sweep, "alibi", 128),
        result(sweep, "alibi", 256),
        result(sweep, "t5", 128),
        result(sweep, "t5", 256, None, error="memory"),
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    states = survey(sweep, tmp_path)
    assert [state.describe() for state in states] == [
        "done",
        "trained, 1 of 2 results",
        "at step 200 of 500",
        "failed: update 31: loss nan",
        "missing",
    ]
    # Only a process that is at work now makes "running" true.
    assert survey(sweep, tmp_path, in_progress=True)[2].describe() == "running, at step 200 of 500"
    assert [[e.lengths for e in state.missing] for state in states[:3]] == [[], [(256,)], [(128, 256)]]
    # Without its last checkpoint a run can't be evaluated: it is trained from the one before, if there is one. What
    # has all its results needs none.
    checkpoints = {method: tmp_path / "runs" / f"{method}-L128-seed0" / "checkpoints" for method in ("alibi", "t5")}
    (checkpoints["alibi"] / "500").rmdir()
    (checkpoints["t5"] / "500").rename(checkpoints["t5"] / "400")
    alibi, t5, *_ = survey(sweep, tmp_path)
    assert (alibi.describe(), t5.describe(), t5.tokens_left) == ("done", "at step 400 of 500", 100 * 2048)
    (checkpoints["t5"] / "400").rmdir()
    described = survey(sweep, tmp_path)[1].describe()
    assert described.startswith(f"failed: {checkpoints['t5'].parent} has no checkpoint, but that of step 500 was saved")


def test_results_of_an_earlier_step_or_another_stride_do_not_count(tmp_path):
    sweep = sweep_of(product={"position": ["alibi"]}, stride=64)
    finish(sweep, tmp_path, "alibi-L128-seed0")
    rows = [
        result(sweep, eval_length=128),
        result(sweep, eval_length=256, stride=64, step=300),
        result(sweep, eval_length=128, stride=64),
        result(sweep, eval_length=256, stride=64, config_hash="another run of this name"),
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    (state,) = survey(sweep, tmp_path)
    assert [e.lengths for e in state.missing] == [(256,)]


def test_what_a_method_cannot_do_is_not_tried_again(tmp_path):
    sweep = sweep_of(product={"position": ["learned"]})
    finish(sweep, tmp_path, "learned-L128-seed0")
    append_rows(
        tmp_path / "results.jsonl",
        [result(sweep, "learned", 128), result(sweep, "learned", 256, None, error="table ends", limit=True)],
    )
    assert [state.describe() for state in survey(sweep, tmp_path)] == ["done"]


def test_a_limit_is_no_failure_of_a_run(tmp_path, monkeypatch):
    """The evaluation alone fails where a text is too short for all its lengths; in a sweep the row says so for good."""
    sweep = sweep_of(product={"position": ["alibi"]})
    finish(sweep, tmp_path, "alibi-L128-seed0")
    sweeper = execute.Sweeper(sweep, tmp_path)
    monkeypatch.setattr(sweeper, "_evaluate", lambda *_: "the text has 60 tokens")
    assert sweeper._bring_to_end(sweep.runs[0], "alibi", None) == "the text has 60 tokens"
    rows = [result(sweep, "alibi", length, None, error="the text has 60 tokens", limit=True) for length in (128, 256)]
    monkeypatch.setattr(sweeper, "_evaluate", lambda *_: append_rows(tmp_path / "results.jsonl", rows) or "too short")
    assert sweeper._bring_to_end(sweep.runs[0], "alibi", None) == ""


def test_a_full_disk_is_a_failure_of_the_run_that_met_it(tmp_path):
    sweep = sweep_of(product={"position": ["alibi", "t5"]})
    for name in ("alibi", "t5"):
        finish(sweep, tmp_path, f"{name}-L128-seed0")
    rows = [result(sweep, position, length) for position in ("alibi", "t5") for length in (128, 256)]
    append_rows(tmp_path / "results.jsonl", rows)
    reports = iter([OSError(errno.ENOSPC, "No space left on device"), "the report"])

    def report(failures):
        if isinstance(made := next(reports), OSError):
            raise made
        return made

    sweeper = execute.Sweeper(sweep, tmp_path, report=report)
    why = f"no space left to write {tmp_path}; what was saved before is whole: make space and repeat the command"
    assert sweeper.execute() == {"alibi-L128-seed0": why}, "the second run was done, and reported"


def test_a_work_directory_of_another_config_is_named_with_its_keys(tmp_path):
    finish(sweep_of(), tmp_path, "alibi-L128-seed0")
    changed = sweep_of(
        product={"position": ["alibi"]}, config="configs/quickstart.py:train.steps=700,log.every_steps=3"
    )
    (state,) = survey(changed, tmp_path)
    assert state.state == "conflict"
    assert "differing: train.steps (500 there, 700 in the sweep)" in state.reason


def test_why_a_run_was_given_up_is_kept_until_it_succeeds(tmp_path):
    sweep = sweep_of()
    finish(sweep, tmp_path, "t5-L128-seed0", state="interrupted", step=200)
    write_failure(tmp_path, "alibi-L128-seed0", "there is no file\n'a.txt'")
    write_failure(tmp_path, "t5-L128-seed0", describe_exit(-9))
    assert [state.describe() for state in survey(sweep, tmp_path)] == [
        "failed: there is no file 'a.txt'",
        "at step 200 of 500; failed: was killed by SIGKILL; most often that means no memory was left",
    ]
    write_failure(tmp_path, "alibi-L128-seed0", "")
    assert next(state.describe() for state in survey(sweep, tmp_path)) == "missing"
    assert list(read_failures(tmp_path)) == ["t5-L128-seed0"]


def test_the_first_error_of_a_script_is_kept_and_everything_still_printed(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "error"
    script.write_text(
        "import sys\nprint('bar', file=sys.stderr)\nfor why in sys.argv[1:]: print(f'error: {why}', file=sys.stderr)\n"
        "sys.exit(3)"
    )
    command = [sys.executable, execute.CHILD, file, script, "no such file", "1 of 1 failed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "bar\nerror: no such file\nerror: 1 of 1 failed\n")
    assert file.read_text() == "no such file"


def test_paths_that_flags_cannot_carry_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds a comma"):
        execute.Sweeper(sweep_of(), tmp_path / "a,b")
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "c.py").write_text((PROJECT / "configs" / "quickstart.py").read_text())
    with pytest.raises(ValueError, match="holds a colon"):
        sweep_of(config=str(folder / "c.py"))


def test_time_left_comes_from_the_speed_of_finished_runs(tmp_path, monkeypatch):
    sweep = sweep_of()
    states = survey(sweep, tmp_path)
    assert Speed.of(states).seconds_left(states) is None
    # Three passes of two operations for each of 4 x 196,608 + 256 x 128 weights, attention to 64.5 keys a query:
    # 1,024,000 tokens at 40e9 operations a second, and 15 s for each of two processes.
    flops = 3 * 2 * (4 * 196_608 + 256 * 128 + 2 * 4 * 128 * 64.5)
    assert Speed.of(states).seconds_left(states[:1], rough=True) == pytest.approx(1_024_000 * flops / 40e9 + 30)
    rough = "time left in all: ~{} (~: rough, training at 40 GFLOP/s a run, until one run has shown the speed)\n"
    assert plan_table(states).endswith(rough.format("6 min"))
    assert plan_table(states, jobs=2).endswith(rough.format("3 min"))
    monkeypatch.setattr(plan, "is_on_cpu", lambda: False)
    assert plan_table(states).endswith("time left in all: unknown until one run has shown the speed\n")
    finish(sweep, tmp_path, "alibi-L128-seed0")
    append_rows(
        tmp_path / "results.jsonl", [result(sweep, "alibi", 128, seconds=2.0), result(sweep, "alibi", 256, seconds=3.0)]
    )
    states = survey(sweep, tmp_path)
    # 500 updates of 2,048 tokens at 2,048 tokens/s, 5 s of evaluation, and 15 s to start each of the two.
    assert Speed.of(states).seconds_left(states) == pytest.approx(500 + 5 + 2 * 15)
    assert [format_duration(s) for s in (None, 45, 634, 7200)] == ["unknown", "45 s", "11 min", "2.0 h"]
    assert plan_table(states) == (
        "run               parameters     tokens  time left  state\n"
        "alibi-L128-seed0     826,112  1,024,000        0 s  done\n"
        "t5-L128-seed0        826,240  1,024,000      9 min  missing\n"
        "\n"
        "time left in all: about 9 min\n"
    )


def test_a_sweep_says_how_long_it_took_for_what(tmp_path, monkeypatch, capsys):
    """Of three runs one is trained and evaluated before, one trained, one neither: it takes 2 h 0 min and 59 s."""
    sweep = sweep_of(product={"position": ["alibi", "t5", "none"]}, multiples=[1])
    for position in ("alibi", "t5"):
        finish(sweep, tmp_path, f"{position}-L128-seed0")
    append_rows(tmp_path / "results.jsonl", [result(sweep, "alibi", run="alibi-L128-seed0")])
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now, strftime=time.strftime)

    def script(self, name, flags, place):
        if name == "train.py":
            finish(sweep, tmp_path, "none-L128-seed0")
            clock.now += 2 * 3600 + 59
        else:
            position = "t5" if "/t5-L128-seed0" in flags[0] else "none"
            append_rows(tmp_path / "results.jsonl", [result(sweep, position, run=f"{position}-L128-seed0")])
            clock.now += 100
        return 0, ""

    monkeypatch.setattr(execute.Sweeper, "_run_script", script)
    monkeypatch.setattr(execute, "time", clock)
    assert execute.Sweeper(sweep, tmp_path, report=lambda failures: "report").execute() == {}
    assert capsys.readouterr().out.endswith("\nreport\ntook 2 h 4 min; runs trained: 1, evaluated: 2\n")


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


def test_the_lock_shows_a_sweep_at_work(tmp_path):
    import fcntl

    assert not is_in_progress(tmp_path)
    with (tmp_path / ".lock").open("a") as file:
        assert not is_in_progress(tmp_path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_in_progress(tmp_path)
    assert not is_in_progress(tmp_path)


@pytest.mark.parametrize(
    ("process_id", "multihost", "environment", "primary"),
    [
        (None, False, {}, True),
        (0, True, {"SLURM_PROCID": "3"}, True),
        (1, False, {}, False),
        (None, True, {"TPU_WORKER_ID": "0"}, True),
        (None, True, {"SLURM_PROCID": "2"}, False),
        (None, False, {"SLURM_PROCID": "2"}, True),  # a single process in a cluster's job
    ],
)
def test_one_process_of_many_writes_the_report(process_id, multihost, environment, primary):
    assert is_primary(process_id, multihost, environment) is primary


def _wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_zombie(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}") and ") Z" in pathlib.Path(f"/proc/{pid}/stat").read_text()
