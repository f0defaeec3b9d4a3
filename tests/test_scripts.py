"""The set-up script's messages and the sweep script's command line, as a newcomer meets them."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path):
    """The set-up script and requirements in a folder of their own, with a space in its name."""
    folder = tmp_path / "a clone"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "setup.sh", folder / "scripts")
    for name in ("requirements.txt", "requirements-test.txt"):
        (folder / name).write_text("")
    return folder


@pytest.fixture
def tools(tmp_path):
    """A PATH with the programs of the script, but no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (
        "bash",
        "dirname",
        "sed",
        "cat",
        "cksum",
        "tee",
        "tail",
        "rm",
        "uname",
        "mkdir",
        "sleep",
    ):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def setup(clone, path, *arguments, **environment):
    return subprocess.run(
        ["bash", str(clone / "scripts" / "setup.sh"), *arguments],
        cwd="/",
        env={"PATH": str(path), "HOME": str(clone), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_any_python_it_says_what_is_needed(clone, tools):
    result = setup(clone, tools)
    assert result.returncode == 1
    assert (
        "Python 3.11 to 3.14 is needed, with its venv module; found no python at all."
        in result.stderr
    )
    assert "PYTHON=/path/to/python" in result.stderr


@pytest.mark.parametrize(("minor", "by_name"), [(9, False), (15, True)])
def test_a_python_that_the_pins_do_not_fit(clone, tools, minor, by_name):
    """It is never found by itself; a newer Python may be given by name, an older Python may not."""
    python = tools / "python3"
    answers = f"[[ $# == 2 ]] || {{ echo 3.{minor}.1; exit $(({minor} < 11 || $3 < {minor})); }}"
    python.write_text(f'#!/bin/bash\n[[ "$1" == -c ]] || exit 1\n{answers}\n')
    python.chmod(0o755)
    result = setup(clone, tools)
    assert result.returncode == 1
    assert (
        f"Python 3.11 to 3.14 is needed, with its venv module; found python3 (3.{minor}.1)."
        in result.stderr
    )
    assert (
        f"making .venv with {python}" in setup(clone, tools, PYTHON="python3").stdout
    ) is by_name


@pytest.mark.slow
def test_set_ups_at_once_and_a_second_time_and_a_failed_one(clone, tools):
    """Two at once take turns, and a dead one's lock is no obstacle. The project then imports from anywhere."""
    lock = clone / ".setup-lock"
    lock.mkdir()
    (lock / "pid").write_text(f"{2**22 + 1}\n")  # beyond the greatest number of a process
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda _: setup(clone, tools, PYTHON=sys.executable), range(2))]
    assert [done.returncode for done in both] == [0, 0]
    assert sum("making .venv" in done.stdout for done in both) == 1
    assert sum("waiting for another set-up" in done.stdout for done in both) == 1
    assert not lock.exists()
    second = setup(clone, tools)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    (clone / "alibi.py").write_text("")
    python = clone / ".venv" / "bin" / "python"
    subprocess.run([python, "-c", "import alibi"], cwd="/", check=True)
    # Extras that are there are not installed again, whatever else is there, in whatever order.
    stamp = clone / ".venv" / ".installed-requirements.txt"
    installed = stamp.read_text().rstrip()
    stamp.write_text(f"{installed} gcs tpu\n")
    for asked in ("tpu gcs", "gcs\ttpu tpu", "gcs", ""):
        assert setup(clone, tools, *(f"--extra={extra}" for extra in asked.split())).stdout == ""
        assert setup(clone, tools, ALIBI_EXTRA=asked).stdout == ""
    (clone / "requirements.txt").write_text("no-such-package-of-this-project==1.0\n")
    failed = setup(clone, tools, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert failed.returncode == 1
    assert "the installation failed" in failed.stderr
    assert "A connection to a Python package index is needed once" in failed.stderr
    assert not [*(clone / ".venv").glob(".installed*")], "which says what need not be tried"
    (clone / "requirements.txt").write_text("")
    stamp.write_text(f"{installed} tpu\n")
    python.unlink()
    # pip installs nothing
    python.write_text(f'#!/bin/bash\n[[ "$*" == *pip* ]] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert "installing requirements.txt" in setup(clone, tools, "--extra=gcs").stdout
    assert {*stamp.read_text().split()} >= {"gcs", "tpu"}
    assert setup(clone, tools, "--extra=tpu", "--extra=gcs").stdout == ""
    # Other requirements, or the tools of the tests, are something to do.
    (clone / "requirements.txt").write_text("# changed\n")
    assert "installing requirements.txt" in setup(clone, tools).stdout
    assert "installing requirements-test.txt" in setup(clone, tools, "--test").stdout
    assert setup(clone, tools).stdout == ""


@pytest.mark.parametrize("argument", ["--tests", "--extra=rocm"])
def test_unknown_arguments(clone, tools, argument):
    result = setup(clone, tools, argument)
    assert result.returncode == 1
    assert "known are" in result.stderr


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-test.txt"])
def test_every_requirement_is_pinned_and_no_other_framework_is_among_them(name):
    lines = (PROJECT / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "-r"))]
    assert all("==" in pin for pin in pins)
    names = {pin.partition("==")[0] for pin in pins}
    assert not {
        name for name in names if name in ("torch", "tensorflow") or name.startswith("nvidia")
    }


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_each_python_gets_one_version_of_each_package_and_what_pyproject_allows(minor):
    python = {
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.0",
        "sys_platform": "linux",
    }
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(python)]
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins)
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = [*project["dependencies"], *extras["train"], *extras["data"], *extras["report"]]
    for requirement in map(Requirement, allowed):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_an_installed_package_needs_no_clone():
    """It has all files; tests/package imports its modules."""
    patterns = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["alibi"]
    for file in filter(pathlib.Path.is_file, (PROJECT / "alibi").rglob("*")):
        assert file.suffix in (".py", ".pyc") or any(map(file.match, patterns)), file
        assert (file.parent / "__init__.py").exists() or file.suffix != ".py", (
            "setuptools finds packages"
        )


@pytest.mark.parametrize(
    ("name", "option", "code", "shown"),
    [
        *(
            (name, "--help", 0, f"bash {name}.sh")
            for name in (
                "scripts/setup",
                "tools/device_check",
                "tools/more_tests",
                "tools/pack_wheels",
            )
        ),
        *(
            ("scripts/quickstart", option, code, "usage: bash scripts/quickstart.sh [WORKDIR]")
            for option, code in (("--help", 0), ("-h", 0), ("--job=2", 2))
        ),
        ("tools/device_check", "--dryy", 1, "device_check: --dryy is no option; use --dry or"),
    ],
)
def test_an_option_shows_the_usage_and_does_nothing(tmp_path, name, option, code, shown):
    """Alone in a folder: whatever came after the usage would fail, and train nothing."""
    script = shutil.copy(PROJECT / f"{name}.sh", tmp_path)
    result = subprocess.run(
        ["bash", script, option], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert shown in result.stdout + result.stderr
    assert code or not result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [pathlib.Path(script).name]


def test_scripts_are_valid_bash():
    scripts = [*PROJECT.glob("scripts/*.sh"), *PROJECT.glob("tools/*.sh"), PROJECT / ".ci" / "run"]
    check = 'for script; do bash -n "$script" || exit 1; done'
    subprocess.run(["bash", "-c", check, "check", *scripts], check=True)


def test_dry_run_lists_the_quickstart_and_writes_nothing(run_script, tmp_path):
    workdir = tmp_path / "work"
    words = (
        f"--sweep={PROJECT / 'configs/sweeps/quickstart.py'}",
        f"--workdir={workdir}",
        "--dry_run",
    )
    result = run_script(PROJECT / "scripts" / "sweep.py", *words)
    names = [line.split()[0] for line in result.stdout.splitlines()[1:5]]
    assert names == [
        "sinusoidal-L128-seed0",
        "rotary-L128-seed0",
        "t5-L128-seed0",
        "alibi-L128-seed0",
    ]
    assert result.stdout.count("missing") == 4
    assert not workdir.exists()
