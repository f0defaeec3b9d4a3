"""What the entry points share: flags read, and whatever the user can mend said in one line instead of a traceback."""

import collections
import os
import pathlib
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from alibi.atomic import local_path
from alibi.data.cache import cache_root, check_paths
from alibi.errors import FAILED, UserError
from alibi.host_memory import keep_freed_memory
from alibi.parallel import peers
from configs import base

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

EXIT_SECONDS = 10.0  # after a failure

flags.disclaim_key_flags()  # what is defined here belongs to the entry point that asks for it: --help shows it


def run(main: Callable[[], int | None], *, required: tuple[str, ...] = (), addresses: tuple[str, ...] = ()) -> None:
    """Parses the flags, calls `main` and exits: 0 or what it returns, 1 after an error of use, 130 after Ctrl-C.

    The flags `addresses` may name places of object stores, such as gs://BUCKET/PATH; any other flag that does is
    refused.

    Errors of use are ValueError, OSError and UserError; any other exception is a bug and
    keeps its traceback.
    """
    flags.mark_flags_as_required(list(required))
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append("")  # so that position=my_package.my_file:MyMethod finds what lies where the user stands
    logging.set_verbosity(logging.WARNING)
    keep_freed_memory()
    app.run(lambda argv: _ending(_guarded(main, argv, addresses)), flags_parser=_parse)


def define_config_flag(default: str | None = None, says: str = "") -> flags.FlagHolder:
    """The flag that names a config file; its keys are set by --config.KEY=VALUE as by the part behind its colon."""
    text = f"FILE.py[:KEY=VALUE,...] with {says or 'get_config()'}"
    # No arguments: what ml_collections would read of them, `run` reads, with options of position methods and tuples.
    return config_flags.DEFINE_config_file("config", default, text, sys_argv=[])


def define_jobs_flag() -> flags.FlagHolder[int]:
    """The flag by which an entry point runs several runs of a sweep at a time."""
    text = "runs at a time, each on its share of the cores; 0: one where there is a GPU or TPU, else one a core up to 4"
    return flags.DEFINE_integer("jobs", 1, text, lower_bound=0)


def define_host_flags() -> None:
    """The flags by which an entry point runs on several hosts."""
    flags.DEFINE_bool("multihost", False, "this process is one of several; the cluster says which")
    flags.DEFINE_string("coordinator_address", None, "HOST:PORT of the first process, the same on every process")
    flags.DEFINE_integer("num_processes", None, "processes in all")
    flags.DEFINE_integer("process_id", None, "this process, from 0")


def host_flags() -> list[str]:
    """Those of `define_host_flags` that were given, for a process that this one starts."""
    names = ("multihost", "coordinator_address", "num_processes", "process_id")
    return [f"--{name}={flags.FLAGS[name].value}" for name in names if flags.FLAGS[name].value not in (None, False)]


def join_hosts() -> None:
    """Connects to the other processes if the flags say that there are any; before any device is used."""
    given = flags.FLAGS
    if (given.num_processes or given.process_id) is not None and not given.coordinator_address:
        raise ValueError("--num_processes and --process_id need --coordinator_address=HOST:PORT of the first process")
    if given.multihost or given.coordinator_address:
        peers.join(given.coordinator_address, given.num_processes, given.process_id)


def _keep_compilations() -> None:
    """Compiled programs are found again by a later process: a resumed run, another seed, an evaluation."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compilations"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _check_paths(addresses: Collection[str]) -> None:
    """Raises ValueError where a flag names an address, of which a path would be a local folder `gs:`."""
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        values = flag.value if isinstance(flag.value, list) else [flag.value]
        for value in values if flag.name not in addresses else ():
            if isinstance(value, str):
                local_path(value, f"--{flag.name}")
    if "config" in flags.FLAGS and (config := flags.FLAGS["config"].value) is not None:
        check_paths(config.get("data", {}))


def _ending(code: int) -> int:
    """`code`, with which the process ends soon after a failure: threads of libraries may wait for ever for a disk."""
    if code:
        end = threading.Timer(EXIT_SECONDS, os._exit, [code])
        end.daemon = True
        end.start()
    return code


def _guarded(main: Callable[[], int | None], argv: list[str], addresses: Collection[str]) -> int:
    try:
        if argv[1:]:
            raise ValueError(f"unknown arguments: {' '.join(argv[1:])}; flags start with --")
        for name in ("workdir", "output_dir"):
            if name in flags.FLAGS and flags.FLAGS[name].value == "":  # it would be the current directory
                raise ValueError(f"--{name} is empty; give a directory (is a shell variable unset?)")
        _check_paths(addresses)
        _keep_compilations()
        return main() or 0
    except (ValueError, OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _ended(str(error), FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _ended("interrupted", 130)
    except Exception as error:
        if jax.distributed.is_initialized():
            traceback.print_exc()
        _ended(f"{type(error).__name__}: {error}", FAILED)
        raise


def _ended(reason: str, code: int) -> int:
    """`code`; one of several processes tells the others, which would wait for it, and ends here."""
    if jax.distributed.is_initialized():
        peers.fail(reason.splitlines()[0] if reason else "", code)
    return code


def _parse(argv: list[str]) -> list[str]:
    try:
        argv, overrides = _overrides(flags.FLAGS.read_flags_from_files(argv, force_gnu=False))
        _check_config_file(argv)
        rest = flags.FLAGS(argv)
        for key, value in overrides:
            base.set_key(flags.FLAGS["config"].value, key, value)
        return rest
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        unknown_key = "unknown config key: " if isinstance(error, AttributeError | KeyError) else ""
        print(f"error: {unknown_key}{_last_cause(str(error))}", file=sys.stderr)
        sys.exit(1)


def _overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """The words of a command line without --config.KEY=VALUE, and those as keys and values.

    Also --config.KEY VALUE, --config.KEY (True) and --noconfig.KEY (False).
    """
    kept: list[str] = []
    overrides: list[tuple[str, object]] = []
    words = collections.deque(argv)
    while words:
        word = words.popleft()
        given = re.fullmatch(r"--?(no)?config\.([\w.]+)(?:=(.*))?", word, re.DOTALL)
        if given is None or "config" not in flags.FLAGS:
            kept.append(word)
        elif given[1] or given[3] is not None:
            overrides.append((given[2], "False" if given[1] else given[3]))
        elif words and re.match(r"[^-]|-\.?\d", words[0]):
            overrides.append((given[2], words.popleft()))
        else:
            overrides.append((given[2], True))
    return kept, overrides


def _check_config_file(argv: list[str]) -> None:
    """Raises ValueError where --config names no file: of that ml_collections tells only what comes of it."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        given = re.fullmatch(r"--?config(?:=(.*))?", word, re.DOTALL)
        if given and "config" in flags.FLAGS:
            file = (following if given[1] is None else given[1]).partition(":")[0]
            if not os.path.isfile(file):
                raise ValueError(f"there is no config file {file!r}; did you mean {_nearest_config(file)}?")


def _nearest_config(file: str) -> str:
    """`file` with its ending if only that is missing, else the project's config of the nearest name."""
    if os.path.isfile(f"{file}.py"):
        return f"{file}.py"
    known = {path.stem: path for path in sorted(CONFIGS.glob("[!_]*.py"))}
    path = known[base.nearest(pathlib.PurePath(file).stem, known, cutoff=0.5) or "quickstart"]
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _last_cause(message: str) -> str:
    """The user's part of a message: ml_collections puts a traceback around what a config file raised."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    if "Traceback" in message:
        raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
        lines = lines[raised[-1] :] if raised else lines[-1:]
        lines[0] = re.sub(r"^[\w.]*(Error|Exception): ", "", lines[0])
    return " ".join(lines).replace("\\n", ". ").replace("\\'", "'").strip("'")
