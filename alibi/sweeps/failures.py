"""failures.json in a sweep's directory: why each run was last given up, until it succeeds."""

import json
import os
import pathlib

FAILURES_FILE = "failures.json"


def read_failures(workdir: pathlib.Path) -> dict[str, str]:
    """Reasons by run; none where the file is missing or damaged."""
    try:
        found = json.loads((workdir / FAILURES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_failure(workdir: pathlib.Path, run: str, reason: str) -> None:
    """Records why `run` failed, atomically; an empty `reason` takes its record away."""
    before = read_failures(workdir)
    after = {name: known for name, known in before.items() if name != run} | ({run: reason} if reason else {})
    if after == before:
        return
    temporary = workdir / f".{FAILURES_FILE}-{os.getpid()}"
    temporary.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
    temporary.replace(workdir / FAILURES_FILE)
