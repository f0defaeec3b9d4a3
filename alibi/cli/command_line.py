"""The commands' frame: flags in, an exit code and one-line errors out."""

import collections
import contextlib
import faulthandler
import io
import os
import re
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from absl import app, flags, logging

from alibi.cli.host_memory import keep_freed_memory
from alibi.config import load_config
from alibi.config.fields import nearest
from alibi.config.tree import KEYS, OTHER_NAMES, SHORT_NAMES
from alibi.errors import (
    FAILED,
    REQUEUE,
    Interrupted,
    explain,
    ignore_signals,
    masked,
    print_error,
    signals_raised,
)
from alibi.parallel import hosts
from alibi.storage.cache import cache_root
from alibi.storage.files import local_path

EXIT_SECONDS = 10.0  # in which a process ends after a failure
NEVER_EMPTY = ("workdir", "workdirs", "output_dir", "init_from", "position", "position_options")
CHECKPOINTS = "latest, best (by the NLL of eval.max_tokens tokens in validations) or a step"
RESUMES = "all work is saved, and the same command goes on from there"
_stops: list[Interrupted] = []  # kept: MLIR may crash when the frames of a trace are freed
_own_flags: dict[str, list[flags.Flag]] = {}  # each command's, by its module

# Settings of JAX under which the library works, but not the commands.
UNUSED = {
    "jax_enable_x64": (False, "parameters are float32"),
    "jax_numpy_dtype_promotion": ("standard", "Optax needs it"),
}

flags.disclaim_key_flags()  # --help shows the flags below under the entry point that defines them


class MaskedText(io.TextIOWrapper):
    """A stream that writes all messages `masked`, libraries' and tracebacks' too."""

    def write(self, text: str) -> int:
        return super().write(masked(text))


def run(main: Callable[..., int | None], **options: Any) -> None:
    """Prepares the process, runs `execute` on the command line with `options`, and exits."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS refuses its own limit if that is infinite
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.path.append("")  # position=my_package.my_file:MyMethod is found from the current directory
    sys.stderr = MaskedText(sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, None, True)
    faulthandler.enable()
    logging.use_absl_handler()
    logging.get_absl_handler().python_handler.stream = sys.stderr
    logging.set_verbosity(logging.WARNING)
    keep_freed_memory()
    # --help shows the text of the module that defines the command
    sys.modules["__main__"].__doc__ = sys.modules[main.__module__].__doc__
    app.define_help_flags()
    code = execute(main, sys.argv, **options)
    if code == REQUEUE and not jax.distributed.is_initialized():
        with contextlib.suppress(OSError):  # its reader may be gone
            sys.stdout.flush()
        os._exit(code)  # MLIR may crash as Python ends amid a trace
    if code:  # threads of libraries may wait for a disk, and JAX for other processes
        end = threading.Timer(EXIT_SECONDS, os._exit, [code])
        end.daemon = True
        end.start()
    sys.exit(code)


def execute(
    main: Callable[..., int | None],
    argv: list[str],
    *,
    takes: str = "",
    required: Collection[str] = (),
    addresses: Collection[str] = (),
    resumes: str = "",
    absent: Mapping[str, str] | None = None,
) -> int:
    """Parses the flags in `argv`, which begins with the program, and calls `main`.

    Returns the exit code: the result of `main`, 0 for None, 1 (FAILED) after a user's error, 75
    (REQUEUE) if a signal stopped a resumable command, or another process was lost, 130 after another
    Ctrl-C. Other exceptions are bugs, and are raised.

    Args:
      takes: describes the words that `main` gets, for messages, or "" if it takes none.
      required: necessary flags.
      addresses: flags that are no local path: addresses such as gs://BUCKET/PATH, or texts.
      resumes: the message of a resumable command after a signal. SIGNALS raise Interrupted in
        `main`.
      absent: flags of other commands that a user may try, each with a remedy.
    """
    command_flags = _own_flags.get(main.__module__, [])
    for flag in command_flags:
        flag.unparse()
        flags.FLAGS[flag.name] = flag
        flags.FLAGS.register_flag_by_module(argv[0], flag)  # as if the program defined it
    if isinstance(sys.stdout, io.TextIOWrapper):  # may lack characters of a text or a path
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        words = _parse(argv, takes, required, absent or {})
        _check_values(addresses)
        for setting, (needed, why) in UNUSED.items():
            if getattr(jax.config, setting) != needed:
                jax.config.update(setting, needed)
                print(f"{setting} is set to {needed}: {why}", file=sys.stderr)
        # a process finds the programs of earlier processes
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compilations"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        with signals_raised() if resumes else contextlib.nullcontext():
            code = main(*words) or 0
        sys.stdout.flush()  # here, where its error is explained
        return code
    except Interrupted as stop:
        ignore_signals()
        _stops.append(stop)
        print(str(stop) or f"stopped; {resumes}", file=sys.stderr)
        return REQUEUE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if hosts.is_lost_connection(error):
            print_error(
                f"another process was lost ({str(error).splitlines()[0][:200]}); the same command goes on from the "
                "saved work"
            )
            return REQUEUE
        if reason := explain(error):
            print_error(reason)
        elif jax.distributed.is_initialized():
            # not raised: JAX would wait for the other processes before this one ends
            traceback.print_exc()
        else:
            raise
        return FAILED
    finally:
        flags.FLAGS.remove_flag_values([flag.name for flag in command_flags])


def own_flags(module: str) -> None:
    """Keeps a command's flags until `execute` runs it: a process can import several commands, with
    equal names for flags.
    """
    _own_flags[module] = flags.FLAGS.get_flags_for_module(module)
    flags.FLAGS.remove_flag_values([flag.name for flag in _own_flags[module]])


def _parse(
    argv: list[str], takes: str, required: Collection[str], absent: Mapping[str, str]
) -> list[str]:
    """Parses the flags, loads --config, and returns the other words.

    Raises:
      ValueError: an unknown flag or key (the nearest is suggested), a refused value, a missing flag,
        or words that the command doesn't take.
    """
    values = flags.FLAGS
    values.set_gnu_getopt(bool(takes))  # flags may stand after other words
    try:
        program, *rest = argv  # absl would stop at the program, which is no flag
        rest, overrides = _split_overrides(values.read_flags_from_files(rest, force_gnu=False))
        _, *words = values([program, *rest])
    except flags.UnrecognizedFlagError as error:
        reason = absent.get(error.flagname.partition(".")[0].replace("-", "_"))
        hint = f"{reason}; " if reason else _suggest(error.flagname)
        raise ValueError(f"there is no flag --{error.flagname}; {hint}--help shows all") from None
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if words and not takes:
        raise ValueError(f"unknown arguments: {' '.join(words)}; flags start with --")
    missing = [f"--{name} ({values[name].help})" for name in required if values[name].value is None]
    missing += [takes] if takes and not words else []
    if missing:
        raise ValueError(
            f"give {' and '.join(missing)}; --help shows how the command is used, and all flags"
        )
    if "config" in values and values["config"].value is not None:
        values["config"].value = load_config(values["config"].value, dict(overrides))
    return words


def _split_overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Returns the words without --config.KEY=VALUE, and the keys with their values.

    It also takes --config.KEY VALUE, --config.KEY (True) and --noconfig.KEY (False).
    """
    kept: list[str] = []
    overrides: list[tuple[str, Any]] = []
    words = collections.deque(argv)
    while words:
        word = words.popleft()
        key = re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", word, re.DOTALL)
        if key is None or "config" not in flags.FLAGS:
            kept.append(word)
            continue
        value: Any = key[3] if key[3] is not None else not key[1]
        if value is True and words and re.match(r"[^-]|-\.?\d", words[0]):
            value = words.popleft()
        overrides.append((key[2], value))
    return kept, overrides


def _suggest(name: str) -> str:
    """Returns "did you mean ...? " for the config keys that end in `name`, or are called so in other
    codebases, or else for the nearest flag.
    """
    keys = sorted(KEYS) if "config" in flags.FLAGS else []
    end = SHORT_NAMES.get(name) or OTHER_NAMES.get(name.rpartition(".")[2], name)
    meant = [f"config.{key}" for key in keys if f".{key}".endswith(f".{end}")]
    named = {key.rpartition(".")[2]: f"config.{key}" for key in keys}
    named |= {flag: flag for flag in flags.FLAGS}
    meant = meant or [named.get(nearest(name.rpartition(".")[2], named), "")]
    return f"did you mean {' or '.join(f'--{one}' for one in meant)}? " if meant[0] else ""


def _check_values(addresses: Collection[str]) -> None:
    """Raises ValueError for an empty flag, or an address where a path is needed."""
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        if flag.name in NEVER_EMPTY and flag.present and flag.value in ("", []):
            raise ValueError(
                f"--{flag.name} is empty; give a value, or leave it out (is a shell variable unset?)"
            )
        for value in flag.value if isinstance(flag.value, list) else [flag.value]:
            if isinstance(value, str) and flag.name not in addresses:
                local_path(value, f"--{flag.name}")
    if "config" in flags.FLAGS and (config := flags.FLAGS["config"].value) is not None:
        from alibi.data.tokens import check_paths  # a quarter of a second to import

        check_paths(config.data)


def define_config_flag(
    default: str | None = None, help: str = "a config file such as configs/quickstart.py"
) -> flags.FlagHolder:
    """Defines --config=FILE.py:KEY=VALUE,.... --config.KEY=VALUE sets keys, too."""
    return flags.DEFINE_string(
        "config", default, f"{help}, as FILE.py[:KEY=VALUE,...]", flag_values=flags.FLAGS
    )


def config_words() -> list[str]:
    """Returns the words --config and --config.KEY of this command line, for another process."""
    words = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    kept, overrides = _split_overrides(words)
    named = re.findall(r"(?m)^--?config[=\n](.*)", "\n".join(kept))
    keys = [f"--config.{key}={value}" for key, value in overrides]
    return [f"--config={named[-1]}", *keys] if named else []


def define_jobs_flag() -> flags.FlagHolder[int]:
    """Defines --jobs, how many runs a sweep makes at a time."""
    return flags.DEFINE_integer(
        "jobs",
        1,
        "runs at a time, each on its share of the cores; 0 means one with a GPU or TPU, else one a core up to 4",
        lower_bound=0,
    )


def define_device_flags() -> None:
    """Defines --devices and --device_kind, the devices of a plan."""
    flags.DEFINE_integer("devices", 1, "devices of a plan, in all")
    flags.DEFINE_string(
        "device_kind",
        None,
        "kind of the devices of a plan, by JAX's name or a common one, such as 'TPU v5e' or H100; cpu: this machine",
    )


def planned_devices(plans: bool, when: str) -> tuple[int, str] | None:
    """Returns --devices and --device_kind, or None if neither is set.

    Args:
      plans: whether the command prints a plan.
      when: the flags for a plan, in errors.

    Raises:
      ValueError: no plan is printed, or --devices has no kind.
    """
    values = flags.FLAGS
    flag = next((name for name in ("device_kind", "devices") if values[name].present), None)
    if flag and not plans:
        raise ValueError(
            f"--{flag} is for the plan that {when} prints; leave it out, or ask for the plan"
        )
    if flag and values.device_kind is None:
        raise ValueError("--devices needs their kind too, such as --device_kind='TPU v5e'")
    return (values.devices, values.device_kind) if flag else None


def define_host_flags() -> None:
    """Defines the flags for several hosts."""
    flags.DEFINE_bool("multihost", False, "this process is one of several; the cluster says which")
    flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of the first process, the same on every process"
    )
    flags.DEFINE_integer("num_processes", None, "processes in all")
    flags.DEFINE_integer("process_id", None, "this process, from 0")


def host_flags() -> list[str]:
    """Returns the set flags of `define_host_flags`, for another process."""
    names = ("multihost", "coordinator_address", "num_processes", "process_id")
    values = {name: flags.FLAGS[name].value for name in names}
    return [
        f"--{name}={value}"
        for name, value in values.items()
        if value is not None and value is not False
    ]


def join_hosts(*, keep_sigterm: bool = True) -> None:
    """Connects to the other processes if flags name any, before a device is used. See `hosts.join`."""
    values = flags.FLAGS
    if (values.num_processes or values.process_id) is not None and not values.coordinator_address:
        raise ValueError(
            "--num_processes and --process_id need --coordinator_address=HOST:PORT of the first process"
        )
    if values.multihost or values.coordinator_address:
        hosts.join(
            values.coordinator_address,
            values.num_processes,
            values.process_id,
            keep_sigterm=keep_sigterm,
        )
