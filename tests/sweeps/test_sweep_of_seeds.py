"""Seeds of a config train in one process, and each by itself if that fails."""

from alibi.errors import REQUEUE
from alibi.runs import config_hash
from alibi.storage.claims import Claim
from alibi.storage.files import resolve
from alibi.sweeps.execute import Sweeper, run_sweeper
from alibi.sweeps.processes import Ended
from alibi.sweeps.state import TASKS, seeds_command
from alibi.training import loop
from tests.refusals import assert_refused
from tests.reporting.rowmaker import append_rows
from tests.sweeps.sweepmaker import PROJECT, finish, result, sweep_of
from tests.sweeps.test_execute import Trainer

SEEDS = ("alibi-L128-seed0", "alibi-L128-seed1", "alibi-L128-seed2")


class SeedsTrainer(Trainer):
    """Trains all runs that a command names, or makes the row of one; `ends` has the end of several."""

    def run(self, command, slot):
        named = [run for run in self.sweep.runs if f"runs/{run.name}" in " ".join(command)]
        self.commands.append((command, len(slot.locks), *(run.name for run in named)))
        if self.ends and len(named) > 1:
            return self.ends["seeds"]
        for run in named:
            if command[0] == "train.py":
                finish(self.sweep, self.workdir, run.name)
            else:
                known = {"run": run.name, "config_hash": config_hash(run.config)}
                append_rows(
                    self.workdir / "results.jsonl",
                    [result(self.sweep, run.config.position, **known)],
                )
        return Ended(0)


def sweeper_of(tmp_path, **ends):
    """A sweep of three seeds of ALiBi and one of T5."""
    runs = [{"position": "t5"}, *({"position": "alibi", "seed": seed} for seed in range(3))]
    sweep = sweep_of(product={}, runs=runs, multiples=[1])
    trainer = SeedsTrainer(sweep, tmp_path, ends=ends)
    return trainer, Sweeper(
        sweep, tmp_path, processes=trainer, report=lambda failures: "", seeds_together=True
    )


def trained(trainer):
    return [named for command, _, *named in trainer.commands if command[0] == "train.py"]


def test_the_seeds_of_a_config_are_one_command(tmp_path):
    trainer, sweeper = sweeper_of(tmp_path)
    assert run_sweeper(sweeper) == 0
    assert trained(trainer) == [[*SEEDS], ["t5-L128-seed0"]]
    assert len(trainer.commands) == 2 + 4, "an evaluation for each run"
    command, locks, *_ = trainer.commands[0]
    assert locks == 3, "the process holds the claims of its runs, even if the sweep is killed"
    assert "--seeds=0,1,2" in command
    assert f"--workdir={','.join(f'{tmp_path}/runs/{name}' for name in SEEDS)}" in command
    again = SeedsTrainer(sweeper.sweep, tmp_path)
    sweeper.processes = again
    assert run_sweeper(sweeper) == 0
    assert again.commands == [], "all was done before"


def test_seeds_that_are_trained_are_left_out(tmp_path):
    trainer, sweeper = sweeper_of(tmp_path)
    finish(sweeper.sweep, tmp_path, SEEDS[1])
    assert run_sweeper(sweeper) == 0
    assert trained(trainer) == [[SEEDS[0], SEEDS[2]], ["t5-L128-seed0"]]


def test_seeds_that_do_not_train_together_train_by_themselves(tmp_path, capsys):
    trainer, sweeper = sweeper_of(tmp_path, seeds=Ended(1, "seeds at different updates"))
    assert run_sweeper(sweeper) == 0
    assert trained(trainer) == [[*SEEDS], ["t5-L128-seed0"], *([name] for name in SEEDS)]
    assert "what is left is trained by itself: seeds at diff" in capsys.readouterr().out


def test_seeds_that_are_stopped_are_unfinished(tmp_path):
    trainer, sweeper = sweeper_of(tmp_path, seeds=Ended(REQUEUE, "stopped by a signal"))
    assert run_sweeper(sweeper) == REQUEUE
    assert sweeper.unfinished == dict.fromkeys(SEEDS, "stopped by a signal")
    assert trained(trainer) == [[*SEEDS], ["t5-L128-seed0"]]


def test_a_seed_held_by_another_process_is_left_to_it(tmp_path):
    trainer, sweeper = sweeper_of(tmp_path)
    held = Claim(resolve(tmp_path) / TASKS / SEEDS[2], "at work")
    assert run_sweeper(sweeper) == REQUEUE
    held.release()
    assert [*sweeper.unfinished] == [SEEDS[2]]
    assert trained(trainer) == [["t5-L128-seed0"], [SEEDS[0]], [SEEDS[1]]]


def test_several_hosts_are_refused(tmp_path):
    sweep = sweep_of(product={"position": ["alibi"], "seed": [0, 1]}, multiples=[1])
    assert_refused(
        "--seeds_together",
        Sweeper,
        sweep,
        tmp_path,
        flags=("--multihost=True",),
        seeds_together=True,
    )


def test_their_command_trains_them(tmp_path, run_script, monkeypatch):
    """Each has its own run, where the sweep finds it."""
    given = []
    monkeypatch.setattr(loop, "train_seeds", lambda *of: given.append(of))
    runs = sweep_of(product={"seed": [0, 1]}).runs
    script, *words = seeds_command(runs, tmp_path)
    run_script(PROJECT / script, *words)
    places = {seed: f"{tmp_path}/runs/{SEEDS[seed]}" for seed in (0, 1)}
    assert given == [(runs[0].config, places)]
