"""Templates of jobs: texts for sbatch, kubectl or bash with placeholders, such as
configs/launch/slurm.sh.

A placeholder is a name in double braces, {{NAME}}, or with a default, {{NAME=DEFAULT}}. A template
with {{TASK}} is repeated for each task. Any other template sets the shell variable TASK itself.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

PLACEHOLDER = re.compile(r"\{\{([A-Z_]+)(?:=(.*?))?\}\}")
LONGEST_NAME = 40  # Kubernetes makes the names of pods and hosts from it, of at most 63 characters


def fill(template: str, values: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """Returns `template` with its placeholders filled from `chosen`, else from `values`, else by
    their defaults.

    Raises:
      ValueError: a placeholder without a value, or an unknown name in `chosen`.
    """
    names = {match[1] for match in PLACEHOLDER.finditer(template)}
    if unknown := sorted(chosen.keys() - names):
        raise ValueError(
            f"--set={unknown[0]}: no such placeholder; the template has {', '.join(sorted(names))}"
        )

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        filled = chosen.get(name, values.get(name, default))
        if filled is None:
            raise ValueError(f"the template needs {name}; give --set={name}=...")
        return filled

    return PLACEHOLDER.sub(value, template)


def fill_tasks(
    template: str, values: Mapping[str, str], chosen: Mapping[str, str], tasks: int
) -> str:
    """Returns the text for all tasks. Raises as `fill`."""
    values = {**values, "TASKS": str(tasks), "LAST_TASK": str(tasks - 1)}
    if "{{TASK}}" not in template:
        return fill(template, values, chosen)
    return "".join(fill(template, {**values, "TASK": str(task)}, chosen) for task in range(tasks))


def command_line(words: Sequence[str], tasks: int | None) -> str:
    """Returns `words` for a shell. With `tasks`, the task is the shell variable TASK."""
    return shlex.join(words) + ("" if tasks is None else f' "--task=$TASK/{tasks}"')


def job_name(name: str) -> str:
    """Returns `name` as names of Kubernetes are: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:LONGEST_NAME].strip("-") or "job"


def submit_command(template: str) -> list[str]:
    """Returns the command for the filled template, which it reads from its standard input."""
    if "#SBATCH" in template:
        return ["sbatch"]
    return ["kubectl", "create", "--filename=-"] if "apiVersion:" in template else ["bash"]
