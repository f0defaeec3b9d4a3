"""Prints the test files that a change may break: python -m tests.changed [COMMIT]

A change is what differs from COMMIT, which defaults to the branch's start from main, or is not
committed. It may break the tests of its folder of `alibi/`, and those that import this folder,
directly or through other folders and scripts, or that name a script, or a page's folder.
"""

import collections
import pathlib
import re
import subprocess
import sys

from tests.test_layers import ROOT, imported, room_of


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, text=True)
    return done.stdout.splitlines()


def changed_files(commit: str = "") -> list[str]:
    """Returns the paths, from the root, of files that differ from `commit` or are untracked."""
    if not commit:
        (commit,) = (
            git("merge-base", "HEAD", "main") if git("branch", "--list", "main") else ["HEAD"]
        )
    return git("diff", "--name-only", commit) + git("ls-files", "--others", "--exclude-standard")


def node_of(path: str) -> str:
    """A folder of `alibi/` or `configs/` is one node, since its files know each other by names."""
    parts = pathlib.PurePath(path).with_suffix("").parts
    return room_of(".".join(parts)) if parts[0] in ("alibi", "configs") else path


def affected_tests(changed: list[str]) -> list[str]:
    """Returns the test files that a change of these files may break, in order."""
    tracked = git("ls-files", "*.py", "*.sh", "--", ":!examples")
    files = [path for path in sorted({*tracked, *changed}) if (ROOT / path).is_file()]
    tests = [path for path in files if re.fullmatch(r"tests/(.*/)?test_\w+\.py", path)]
    if "tests/conftest.py" in changed:
        return tests
    library = ("alibi/", "configs/", "tests/")
    named = [path for path in {*files, *changed} if not path.startswith(library)]
    users = collections.defaultdict(set)
    for path in files:
        if path.endswith(".py"):
            for module in imported(ROOT / path):
                users[node_of(module.replace(".", "/") + ".py")].add(node_of(path))
        if path in tests:
            text = (ROOT / path).read_text()
            for other in named:
                top, name = pathlib.PurePath(other).parts[0], pathlib.PurePath(other).name
                code = other.endswith((".py", ".sh"))
                folder = not code and (f'"{top}"' in text or f'"{top}/' in text)
                if folder or f'"{name}"' in text or other in text:
                    users[other].add(path)
    found, left = set(), [node_of(path) for path in changed]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += users[node]
    return [path for path in tests if path in found or pathlib.PurePath(path).parts[1] in found]


if __name__ == "__main__":
    print(*affected_tests(changed_files(*sys.argv[1:])), sep="\n")
