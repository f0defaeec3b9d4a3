"""The site is built without a warning, and needs no network."""

import importlib.util
import json
import re

import pytest
from click.testing import CliRunner

from tests.hosts import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        words = ["build", "--strict", f"--site-dir={folder}"]
        result = CliRunner().invoke(importlib.import_module("mkdocs.__main__").cli, words)
    assert result.exit_code == 0, result.output
    # --strict counts only those of mkdocs' own loggers
    assert "WARNING" not in result.output, result.output
    return folder


def test_every_page_is_in_the_site(site):
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in (ROOT / "docs").glob("**/*"):
        if page.suffix in (".md", ".ipynb"):
            place = page.relative_to(ROOT / "docs")
            assert (site / place.with_suffix(".html")).exists(), place
            assert f": {place.with_suffix('.md')}\n" in navigation, f"{place} is missing from nav"
    assert "Train short, test long" in (site / "index.html").read_text()
    # linked sources are pages, comments of figures are gone
    assert "def alibi_slopes" in re.sub(
        "<.*?>", "", (site / "source/alibi/slopes.py.html").read_text()
    )
    assert "ppl(" not in (site / "results" / "index.html").read_text()


def test_the_search_finds_pages_without_a_network(site):
    """Its index is a script beside the pages, which a browser also reads from a file."""
    text = (site / "search" / "search_index.js").read_text()
    index = json.loads(text.partition("=")[2].rstrip("; \n"))
    found = {entry["location"] for entry in index["docs"] if "passkey" in entry["text"].lower()}
    assert "evaluation.html#passkeys" in found
    folders = {entry["location"].partition("/")[0] for entry in index["docs"]}
    assert folders & {"source", "results", "tests", "alibi", "examples"} == set()


def test_the_search_works_in_a_page_that_is_opened_as_a_file(site, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(error))
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("slopes")
    found = page.locator(".md-search-result__item a")
    found.nth(1).wait_for(timeout=20_000)
    # a page, then what it says of the word
    assert found.nth(1).get_attribute("href").endswith("/api.html?h=slopes#alibi_slopes")
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()


def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*src=\"?(https?:)?//|<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*href=\"?(https?:)?//"
    )
    pages = [*site.glob("**/*.html")]
    assert len(pages) > 50
    for page in pages:
        assert not loads.search(page.read_text()), page
