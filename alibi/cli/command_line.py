"""What the entry points share: flags read, and whatever the user can mend said in one line instead of a traceback."""

import collections
import contextlib
import functools
import os
import re
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TextIO, cast

import jax
from absl import app, flags, logging

from alibi.config import load_config
from alibi.config.fields import nearest
from alibi.config.tree import KEYS, SHORT_NAMES
from alibi.cpu.host_memory import keep_freed_memory
from alibi.data.cache import cache_root, check_paths
from alibi.errors import FAILED, REQUEUE, Interrupted, explain, ignore_signals, print_error, signals_raised
from alibi.parallel import hosts
from alibi.storage.files import local_path

# Files that a process needs to hold open: its libraries, the checkpoint that it writes and the one that it reads.
OPEN_FILES = 64

EXIT_SECONDS = 10.0  # after a failure
RESUMES = "what was done is saved, and the same command goes on from there"

# Flags with what they take: an empty one would be the current directory, or be ignored.
NEVER_EMPTY = {
    **dict.fromkeys(("workdir", "output_dir", "init_from"), "a directory"),
    "position": "a position method or leave the flag out",
    "position_options": "KEY=VALUE,... or leave the flag out",
}

flags.disclaim_key_flags()  # what is defined here belongs to the entry point that asks for it: --help shows it


def run(
    main: Callable[..., int | None],
    *,
    takes: str = "",
    required: tuple[str, ...] = (),
    needless: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    addresses: tuple[str, ...] = (),
    resumes: str = "",
) -> None:
    """Parses the flags, calls `main`, with the other words of the command line where it `takes` any, and exits.

    The code is 0 or what `main` returns; 1 (FAILED) after an error of use; 75 (REQUEUE) where a signal stopped a
    command that goes on when it is given again, or it lost another process; 130 after Ctrl-C otherwise. Errors of use
    are those that `explain` knows; any other exception is a bug and keeps its traceback.

    Args:
      takes: what the words are, for messages; "": there are none.
      required: flags that must be given.
      needless: those of `required` that need not be where one of these other flags is set.
      addresses: flags that may name places of object stores, such as gs://BUCKET/PATH; any other that does is refused.
      resumes: of a command that goes on, what is said after "stopped; ". SIGNALS raise Interrupted in its `main`.
    """
    _open_standard_streams()
    _allow_open_files()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append("")  # so that position=my_package.my_file:MyMethod finds what lies where the user stands
    logging.set_verbosity(logging.WARNING)
    keep_freed_memory()
    flags.FLAGS.set_gnu_getopt(bool(takes))  # flags may stand after such words
    parse = functools.partial(_parse, required=required, needless=needless)
    app.run(lambda argv: _ending(_guarded(main, argv, addresses, resumes, takes)), flags_parser=parse)


def define_config_flag(default: str | None = None, says: str = "") -> flags.FlagHolder:
    """The flag that names a config file; its keys are set by --config.KEY=VALUE as by the part behind its colon."""
    text = f"FILE.py[:KEY=VALUE,...] with {says or 'get_config()'}"
    return flags.DEFINE_string("config", default, text, flag_values=flags.FLAGS)


def config_words() -> list[str]:
    """The words of this command line that gave the config, as one for another process: --config and --config.KEY."""
    kept, overrides = _overrides(flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False))
    named = [word.partition("=")[2] for word in kept if re.match(r"--?config=", word)]
    named += [kept[at + 1] for at, word in enumerate(kept[:-1]) if re.fullmatch(r"--?config", word)]
    return [f"--config={named[-1]}"] + [f"--config.{key}={value}" for key, value in overrides] if named else []


def define_jobs_flag() -> flags.FlagHolder[int]:
    """The flag by which an entry point runs several runs of a sweep at a time."""
    text = "runs at a time, each on its share of the cores; 0: one where there is a GPU or TPU, else one a core up to 4"
    return flags.DEFINE_integer("jobs", 1, text, lower_bound=0)


def define_device_flags() -> None:
    """The flags --devices and --device_kind, of devices that a plan is made for."""
    flags.DEFINE_integer("devices", 1, "devices that the plan is made for, in all")
    text = "kind of these devices, by JAX's name or a common one, such as 'TPU v5e' or H100"
    flags.DEFINE_string("device_kind", None, text)


def planned_devices(plans: bool, when: str) -> tuple[int, str] | None:
    """--devices and --device_kind; None where they weren't given.

    Args:
      plans: whether a plan is printed.
      when: what asks for one.

    Raises:
      ValueError: they would be ignored, since there is no plan, or a number of devices of no kind.
    """
    values = flags.FLAGS
    given = next((name for name in ("device_kind", "devices") if values[name].present), None)
    if given and not plans:
        raise ValueError(f"--{given} is of the plan that {when} prints; leave it out, or ask for that")
    if given and values.device_kind is None:
        raise ValueError("--devices needs their kind too, such as --device_kind='TPU v5e'")
    return (values.devices, values.device_kind) if given else None


def define_host_flags() -> None:
    """The flags by which an entry point runs on several hosts."""
    flags.DEFINE_bool("multihost", False, "this process is one of several; the cluster says which")
    flags.DEFINE_string("coordinator_address", None, "HOST:PORT of the first process, the same on every process")
    flags.DEFINE_integer("num_processes", None, "processes in all")
    flags.DEFINE_integer("process_id", None, "this process, from 0")


def host_flags() -> list[str]:
    """The flags of `define_host_flags` that were given, for a process that this one starts."""
    names = ("multihost", "coordinator_address", "num_processes", "process_id")
    values = {name: flags.FLAGS[name].value for name in names}
    return [f"--{name}={value}" for name, value in values.items() if value is not None and value is not False]


def join_hosts(*, keep_sigterm: bool = True) -> None:
    """Connects to the other processes if the flags name any, before any device is used; see `hosts.join`."""
    given = flags.FLAGS
    if (given.num_processes or given.process_id) is not None and not given.coordinator_address:
        raise ValueError("--num_processes and --process_id need --coordinator_address=HOST:PORT of the first process")
    if given.multihost or given.coordinator_address:
        hosts.join(given.coordinator_address, given.num_processes, given.process_id, keep_sigterm=keep_sigterm)


class _Messages:
    """A stream that goes on where nothing can be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_standard_streams() -> None:
    """Gives what was started without stdin, stdout or stderr an empty one: else the next files take their numbers.

    Then what libraries write to stderr would stand in one of these files. And a stderr whose disk is full, or whose
    reader has ended, must not end what is told of there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))
    sys.stderr = cast(TextIO, _Messages(sys.stderr))


def _allow_open_files() -> None:
    """Takes all open files that the system allows; ends where they are too few for any work."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses what it calls unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 0 <= most < OPEN_FILES:
        print_error(f"only {most} open files are allowed, {OPEN_FILES} are needed: ulimit -n 1024")
        sys.exit(1)


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
        check_paths(config.data)


def _ending(code: int) -> int:
    """`code`, with which the process ends soon after a failure: threads of libraries may wait for ever for a disk."""
    if code:
        end = threading.Timer(EXIT_SECONDS, os._exit, [code])
        end.daemon = True
        end.start()
    return code


def _guarded(
    main: Callable[..., int | None], argv: list[str], addresses: Collection[str], resumes: str, takes: str = ""
) -> int:
    try:
        if takes and not argv[1:]:
            raise ValueError(f"give {takes}; --help shows how the command is used, and all flags")
        if argv[1:] and not takes:
            raise ValueError(f"unknown arguments: {' '.join(argv[1:])}; flags start with --")
        for name, needed in NEVER_EMPTY.items():
            if name in flags.FLAGS and flags.FLAGS[name].present and flags.FLAGS[name].value in ("", []):
                raise ValueError(f"--{name} is empty; give {needed} (is a shell variable unset?)")
        _check_paths(addresses)
        _keep_compilations()
        with signals_raised() if resumes else contextlib.nullcontext():
            code = main(*argv[1:]) or 0
        sys.stdout.flush()  # here, where an error of it is told
        return code
    except Interrupted as stop:
        ignore_signals()
        print(str(stop) or f"stopped; {resumes}", file=sys.stderr)
        return REQUEUE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if hosts.is_lost_connection(error):
            print_error(f"another process was lost ({str(error).splitlines()[0][:200]}); {RESUMES}")
            return REQUEUE
        if reason := explain(error):
            print_error(reason)
        elif jax.distributed.is_initialized():
            traceback.print_exc()  # not raised: JAX would wait for the other processes before this one ends
        else:
            raise
        return FAILED


def _parse(
    argv: list[str],
    required: tuple[str, ...] = (),
    needless: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[str]:
    try:
        argv, overrides = _overrides(flags.FLAGS.read_flags_from_files(argv, force_gnu=False))
        rest = flags.FLAGS(argv)
        needed_now = (
            name for name in required if not any(flags.FLAGS[other].value for other in needless.get(name, ()))
        )
        if missing := [flag for flag in map(flags.FLAGS.__getitem__, needed_now) if flag.value is None]:
            needed = " and ".join(f"--{flag.name} ({flag.help})" for flag in missing)
            raise ValueError(f"give {needed}; --help shows how the command is used, and all flags")
        if "config" in flags.FLAGS and flags.FLAGS["config"].value is not None:
            flags.FLAGS["config"].value = load_config(str(flags.FLAGS["config"].value), dict(overrides))
        return rest
    except flags.UnrecognizedFlagError as error:
        told = _unrecognized(error)
    except flags.IllegalFlagValueError as error:
        told = str(error).removeprefix("flag ") + _help_of(str(error))
    except (flags.Error, ValueError, OSError) as error:
        told = str(error)
    print_error(told)
    sys.exit(1)


def _unrecognized(error: flags.UnrecognizedFlagError) -> str:
    """Which flag was meant by one that isn't there: another one, or a key of the config by its whole or last name."""
    name = error.flagname
    keys = sorted(KEYS) if "config" in flags.FLAGS else []
    short = SHORT_NAMES.get(name, name)
    meant = [f"--config.{key}" for key in keys if f".{key}".endswith(f".{short}")]
    if not meant:
        known = [*flags.FLAGS, *(f"config.{key}" for key in keys)]
        meant = [f"--{one}" for one in [nearest(name, known, cutoff=0.6)] if one]
    suggestion = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"there is no flag --{name}; {suggestion}--help shows all flags"


def _help_of(message: str) -> str:
    """What the flag is that a message of absl begins with, for those who gave it another kind of value."""
    named = re.match(r"flag --(\w+)=", message)
    return f"; --{named[1]} is: {flags.FLAGS[named[1]].help}" if named and named[1] in flags.FLAGS else ""


def _overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """The words of a command line without --config.KEY=VALUE, and those as keys and values.

    Also --config.KEY VALUE, --config.KEY (True) and --noconfig.KEY (False).
    """
    kept: list[str] = []
    overrides: list[tuple[str, object]] = []
    words = collections.deque(argv)
    while words:
        word = words.popleft()
        given = re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", word, re.DOTALL)
        if given is None or "config" not in flags.FLAGS:
            kept.append(word)
        elif given[1] or given[3] is not None:
            overrides.append((given[2], "False" if given[1] else given[3]))
        elif words and re.match(r"[^-]|-\.?\d", words[0]):
            overrides.append((given[2], words.popleft()))
        else:
            overrides.append((given[2], True))
    return kept, overrides
