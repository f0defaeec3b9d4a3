"""Settings that hold for every test, a run that is small enough to train in seconds, and the
optional real corpora.
"""

import atexit
import gc
import math
import os
import pathlib
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from tests import annotations, compilations, slow
from tests.programs import HAS_OLDER

# Before JAX is imported, and for the commands that tests start: the CPU, unless tools/device_check.sh
# names another platform for its own tests, and no trace in the user's own cache.
os.environ["JAX_PLATFORMS"] = os.environ.get("ALIBI_TEST_PLATFORM", "cpu")
# Compiling takes most of the tests' time, and running almost none: XLA's quick passes only, and its
# older code generator. That one orders sums otherwise than the one that users get, as another
# processor does: a bound of a test must hold for both. Programs whose text or memory is tested
# (`programs.AS_USERS`), and commands of tests with the fixture `as_users`, have the users' one.
QUICK = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
OLDER = " --xla_cpu_use_fusion_emitters=false" if HAS_OLDER else ""
ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"
if ON_CPU and "PYTEST_XDIST_WORKER" not in os.environ:  # a worker inherits them
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + QUICK + OLDER
# Else each process compiles the project's modules again, and PyTorch's and transformers'.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Programs are compiled once for all tests, for commands that they start, and for later runs: kept in
# $ALIBI_TEST_CACHE, else beside the user's token files.
KEPT = os.environ.get(
    "ALIBI_TEST_CACHE", os.environ.get("ALIBI_CACHE", "~/.cache/alibi") + "/tests"
)
# The cache of token files is new for each run: that of the first process, which removes it at its
# end, and of the workers of pytest-xdist, which inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["ALIBI_CACHE"] = tempfile.mkdtemp(prefix="alibi-test-cache-")
    atexit.register(shutil.rmtree, os.environ["ALIBI_CACHE"], ignore_errors=True)
    try:
        kept = compilations.make_folder(pathlib.Path(KEPT).expanduser().absolute())
        atexit.register(compilations.tidy, kept)
    except OSError:  # as in a container whose home is read-only
        kept = pathlib.Path(os.environ["ALIBI_CACHE"], "compilations")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(kept)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# No test reads where in the code an operation was traced, which takes 8% of the time of tests that trace.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax
import jaxtyping
import pytest

# Array annotations of the layers that compute are checked at each call, from their first
# import on. Not those of `alibi.training`, whose states are also trees of shapes and
# shardings, nor of `alibi.evaluation` and `alibi.data`, which take whatever slices like tokens.
CHECKED = ["alibi.slopes", "alibi.positions", "alibi.attention", "alibi.model"]
jaxtyping.install_import_hook(CHECKED, f"{annotations.__name__}.check")

from alibi.config import Config, MeshConfig, OptimizerConfig, make_config
from alibi.parallel import sharding

make_mesh = sharding.make_mesh


def smallest_mesh(mesh: MeshConfig, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns the mesh on as few devices as its sizes allow: programs of the default mesh, on all 8,
    take three times as long to compile.
    """
    needed = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.tensor) if size > 0)
    return make_mesh(mesh, jax.devices()[:needed] if devices is None else devices)


# Before any module takes the name from there.
sharding.make_mesh = smallest_mesh

from alibi import optimizers

make_optimizer = optimizers.make_optimizer
MADE: dict[str, Any] = {}


def one_optimizer(config: OptimizerConfig, steps: int) -> Any:
    """Returns the optimizer of earlier trainings with the same config."""
    key = repr((config, steps))
    if key not in MADE:
        MADE[key] = make_optimizer(config, steps)
    return MADE[key]


optimizers.make_optimizer = one_optimizer

from alibi.training import step

make_train_step = step.make_train_step
STEPS: dict[tuple, Any] = {}


def one_train_step(*arguments: Any, **options: Any) -> jax.stages.Wrapped:
    """Returns the step of earlier trainings with the same model, optimizer and seed, which JAX need
    not trace again.
    """
    # JAX traces anew at another precision, but not for other random numbers.
    key = (*jax.tree.leaves((arguments, options)), jax.config.jax_default_prng_impl)
    if key not in STEPS:
        STEPS[key] = make_train_step(*arguments, **options)
    return STEPS[key]


step.make_train_step = one_train_step

from alibi.cli import command_line

# Tracing makes many small objects that live on; at Python's own pace, searching all of them for
# garbage again and again takes a twentieth of the tests' time.
gc.set_threshold(100_000, 50, 100)
jax.config.update("jax_num_cpu_devices", 8)
if ON_CPU:
    jax.devices()  # XLA reads its flags now, before `as_users` changes them for commands
jax.config.update("jax_numpy_rank_promotion", "raise")


# What these make takes seconds: each test that asks for one is slow.
SLOW_FIXTURES = {"browser", "environment", "wheel", "tools"}


# They start many processes, and come first: at the end one of them would keep a single core busy.
LONGEST = (
    "test_multihost",
    "test_faults",
    "test_end_to_end",
    "test_gpu_study",
    "test_device_check",
)


@pytest.hookimpl(tryfirst=True)  # before the marks decide
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    measured = slow.names()
    for item in items:
        if item.nodeid in measured or SLOW_FIXTURES & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Annotations are checked in quick tests of these folders, and where the check itself is tested. That
    is a tenth of a test's time, and the others call the same functions.
    """
    folder, file = item.path.parent.name, item.path.stem
    checks = folder in ("attention", "positions", "model") or file == "test_shapes"
    is_slow = item.get_closest_marker("slow") is not None
    jaxtyping.config.update("jaxtyping_disable", is_slow or not checks)


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The folder `shared` beside the project, with real corpora and recorded results; skips where
    it is absent.
    """
    folder = pathlib.Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the optional folder {folder} with corpora and recorded results")
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; skips where it is absent."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        if not found and not pathlib.Path(own).exists():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=found or own, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def as_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compile with the users' code generator."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "").replace(OLDER, ""))


@pytest.fixture
def all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings and evaluations take all 8 devices, as those of users do."""
    for module in ("alibi.runs.trained", "alibi.training.loop"):
        monkeypatch.setattr(f"{module}.make_mesh", make_mesh)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not checked, as for users: what they get of a wrong argument is the
    function's own message.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """A training text of 6,000 bytes and a validation text of 700, of words that repeat enough to
    be learned.
    """
    folder = tmp_path_factory.mktemp("text")
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "sat",
        "ran",
        "on",
        "under",
        "mat",
        "tree",
        "and",
        "then",
        "saw",
        "it",
    ]
    files = {}
    for number, (split, size) in enumerate({"train": 6000, "valid": 700}.items()):
        rng = random.Random(number)
        text = ""
        while len(text) < size:
            text += " ".join(rng.choices(words, k=8)) + ".\n"
        files[split] = folder / f"{split}.txt"
        files[split].write_text(text[:size])
    return files


@pytest.fixture(scope="session")
def tiny_config(
    tiny_text: dict[str, pathlib.Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Config]:
    """A function of overrides (a key, with two underscores for each dot) to the config of a tiny
    run.
    """
    cache = tmp_path_factory.getbasetemp() / "token-cache"
    files = {f"data__{split}": str(file) for split, file in tiny_text.items()} | {
        "data__cache_dir": str(cache)
    }

    def make(**overrides: object) -> Config:
        return make_config(
            "length=16,train.steps=6,train.batch_tokens=128,optimizer.warmup_steps=2,data.corpus=text,"
            "model.num_layers=1,model.width=16,model.num_heads=2,model.feed_forward=32,eval.every_steps=3,"
            "eval.batch_tokens=64,checkpoint.every_steps=2,log.every_steps=1,log.tensorboard=false",
            **(files | overrides),
        )

    return make


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs an entry point in this process, which spares the imports of a new one; gives its output.
    It ends with `code`.
    """

    def run(
        script: pathlib.Path, *words: object, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        codes = []
        arguments = [str(script), *map(str, words)]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])

        def execute(main: Callable[..., int | None], **options: object) -> None:
            codes.append(command_line.execute(main, arguments, **options))

        monkeypatch.setattr(command_line, "run", execute)
        capfd.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        done = subprocess.CompletedProcess(arguments, codes[0], *capfd.readouterr())
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
