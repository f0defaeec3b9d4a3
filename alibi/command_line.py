"""What the entry points share: flags read, and whatever the user can mend said in one line instead of a traceback."""

import os
import re
import sys
from collections.abc import Callable

import jax
from absl import app, flags, logging

from alibi.data.cache import cache_root
from alibi.errors import UserError
from alibi.host_memory import keep_freed_memory


def run(main: Callable[[], int | None], *, required: tuple[str, ...] = ()) -> None:
    """Parses the flags, calls `main` and exits: 0 or what it returns, 1 after an error of use, 130 after Ctrl-C.

    Errors of use are ValueError, OSError and UserError; any other exception is a bug and
    keeps its traceback.
    """
    flags.mark_flags_as_required(list(required))
    logging.set_verbosity(logging.WARNING)
    keep_freed_memory()
    _keep_compilations()
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


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
        jax.distributed.initialize(given.coordinator_address, given.num_processes, given.process_id)


def _keep_compilations() -> None:
    """Compiled programs are found again by a later process: a resumed run, another seed, an evaluation."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compilations"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _guarded(main: Callable[[], int | None], argv: list[str]) -> int:
    try:
        if argv[1:]:
            raise ValueError(f"unknown arguments: {' '.join(argv[1:])}; flags start with --")
        return main() or 0
    except (ValueError, OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(_behind_the_colon(argv))
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        unknown_key = "unknown config key: " if isinstance(error, AttributeError | KeyError) else ""
        print(f"error: {unknown_key}{_last_cause(str(error))}", file=sys.stderr)
        sys.exit(1)


def _behind_the_colon(argv: list[str]) -> list[str]:
    """Moves flags of keys that the config file itself must know behind the colon of --config.

    These are options of position methods, which no config file lists, and what it may
    derive others from: the training length (a batch of whole sequences) and the number of
    updates (a schedule that ends with them).
    """
    moved = [word for word in argv if re.match(r"--?config\.(position_options\.\w+|train_length|train\.steps)=", word)]
    files = [word for word in argv if re.match(r"--?config=", word)]
    if not moved or not files:
        return argv
    keys = ",".join(word.partition("config.")[2] for word in moved)
    whole = files[-1] + ("," if ":" in files[-1] else ":") + keys
    return [whole if word is files[-1] else word for word in argv if word not in moved]


def _last_cause(message: str) -> str:
    """The user's part of a message: ml_collections puts a traceback around what a config file raised."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    if "Traceback" in message:
        raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
        lines = lines[raised[-1] :] if raised else lines[-1:]
        lines[0] = re.sub(r"^[\w.]*(Error|Exception): ", "", lines[0])
    return " ".join(lines).replace("\\n", ". ").replace("\\'", "'").strip("'")
