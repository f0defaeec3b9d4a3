"""What every entry point does with its flags."""

from alibi.command_line import _with_position_options


def test_options_of_a_position_method_go_behind_the_colon():
    """There ml_collections finds no key to override, since a config file does not know the methods' options."""
    argv = [
        "train.py",
        "--config=c.py",
        "--config.seed=1",
        "--config.position_options.slopes=closed_form",
        "--workdir=w",
    ]
    moved = ["train.py", "--config=c.py:position_options.slopes=closed_form", "--config.seed=1", "--workdir=w"]
    assert _with_position_options(argv) == moved
    joined = _with_position_options(["--config=c.py:position=t5", "--config.position_options.num_buckets=8"])
    assert joined == ["--config=c.py:position=t5,position_options.num_buckets=8"]
    assert _with_position_options(moved) == moved
