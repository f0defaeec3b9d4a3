"""Links of the pages lead somewhere, headings included."""

import functools
import re

import pytest

from alibi.config.tree import check_key
from alibi.convert.families import FAMILIES
from alibi.data.corpus import SPLITS
from alibi.evaluation.base import options_by_name
from alibi.reporting.measure import EVALUATORS
from tests.hosts import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "position_method" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "results").glob("**/*.md")),
]


def anchors(page):
    """Returns the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", page.read_text())
    for path, anchor in links:
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def commands(page):
    """Returns the commands of a page's blocks, fenced or indented, each in one line."""
    text = page.read_text()
    fenced = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in fenced + re.findall(r"^(?: {4}\S.*\n)+", text, re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()


@functools.cache
def known_flags():
    folders = (".", "scripts", "tools", "benchmarks", "alibi/cli")
    sources = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    known = set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", text)) | {"config"}
    return known | options_by_name(EVALUATORS).keys() | {f"{split}_file" for split in SPLITS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_scripts_flags_and_keys_that_exist(page):
    known = known_flags()
    for command in commands(page):
        command = command.partition(" #")[0]
        for script in re.findall(r"(?:python|bash) ([\w/]+\.(?:py|sh))", command):
            assert (ROOT / script).exists(), script
        others = (
            "alibi.cli.harness",
            "-m benchmarks",
        )  # flags of lm_eval, and arguments of functions
        if "python " not in command or any(module in command for module in others):
            continue
        for flag in re.findall(r"--([a-z_0-9]+)(?=[=\s]|$)", re.sub(r'"[^"]*"', "", command)):
            assert flag in known or flag.removeprefix("no") in known, f"--{flag} in {command}"
        keys = re.findall(r"--config\.([\w.]+)=", command)
        for several in re.findall(r"--config=\S+?\.py:(\S+)", command):
            keys += re.findall(r"(?:^|,)([a-z][\w.]*)=", several)
        for key in keys:
            check_key(key)  # raises


def test_the_page_of_imports_names_each_family():
    """Its table has the architectures that an import takes, and no others."""
    page = (ROOT / "docs" / "importing.md").read_text()
    table = page.partition("## Families")[2].partition("\n\n[")[0]
    rows = (row.split("|")[1] for row in table.splitlines()[4:])
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {name for family in FAMILIES.values() for name in family.architectures}
