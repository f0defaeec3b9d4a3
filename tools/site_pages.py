"""Adds to the site what lies outside docs/: a hook for MkDocs, see mkdocs.yml.

The pages link files in the repository. A linked page or picture enters the site as it is. A linked
source file, folder or notebook becomes a page. So every link works offline, and MkDocs warns about a
link to nothing, which `--strict` makes an error.
"""

import json
import os
import pathlib
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIRST = (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")
AS_IS = {".md", ".png", ".jsonl", ".json", ".csv", ".tex", ".html"}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}
SEARCHED = {"api.md": 4, "CHANGELOG.md": 0.001}  # weights of pages in the search
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, and whatever it and the pages link, to the files of the site."""
    docs = pathlib.Path(config.docs_dir)
    waiting = [*FIRST, *docs.glob("**/*.md"), *docs.glob("**/*.ipynb")]
    seen = set(waiting)
    for path in waiting:  # grows
        uri = site_uri(path)
        if path.suffix == ".ipynb":
            files.append(File.generated(config, uri, content=notebook(path)))
        elif path.is_dir() or path.suffix not in AS_IS:
            files.append(File.generated(config, uri, content=source(path)))
        elif not path.is_relative_to(docs):
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        for target in linked(path):
            if target not in seen and target.exists():
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Returns a page without comments, and with links to places in the site.

    The search finds the public names first, then the pages, and no results: a table of numbers
    would fill its panel.
    """
    if page.file.src_uri.startswith(("results/", "notebooks/", "source/")):
        page.meta["hide"] = ["toc"]  # wide tables and code
    origin = of_uri(page.file.src_uri)
    if origin is None:
        return markdown
    searched = origin in FIRST or origin.is_relative_to(ROOT / "docs")
    weight = SEARCHED.get(page.file.src_uri, 1)
    page.meta["search"] = {"boost": weight} if searched else {"exclude": True}
    here = pathlib.PurePosixPath(page.file.src_uri).parent
    parts = FENCE.split(COMMENT.sub(_without_line, markdown))

    def to_site(link: re.Match) -> str:
        uri = site_uri(pathlib.Path(os.path.normpath(origin.parent / link[2])))
        return link[1] + os.path.relpath(uri, here) + (link[3] or "")

    return "".join(part if part.startswith("```") else LINK.sub(to_site, part) for part in parts)


def _without_line(comment: re.Match) -> str:
    """Returns what stays of a comment: its line end, unless it has the line for itself."""
    alone = comment.start() == 0 or comment.string[comment.start() - 1] == "\n"
    return "\n" if comment[0].endswith("\n") and not alone else ""


def site_uri(path: pathlib.Path) -> str:
    """Returns the place of a file in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(ROOT / "docs"):
        path, ending = path.relative_to(ROOT / "docs"), path.suffix
        return str(path.with_suffix(".md") if ending == ".ipynb" else path)
    inside = path.relative_to(ROOT)
    as_is = path.suffix in AS_IS and not path.is_dir()
    return (
        str(inside) if as_is else f"source/{str(inside).lstrip('.')}.md"
    )  # dot files are left out


def of_uri(uri: str) -> pathlib.Path | None:
    """Returns the file at a place in the site, None for pages that are made here."""
    if uri.startswith("source/"):
        return None
    if uri == "index.md":
        return ROOT / "README.md"
    of_docs = ROOT / "docs" / uri
    return of_docs if of_docs.exists() or of_docs.with_suffix(".ipynb").exists() else ROOT / uri


def linked(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files that a page or notebook links, and the files of a folder."""
    if path.is_dir():
        yield from _files(path)
    if path.suffix == ".ipynb":
        text = notebook(path)
    elif path.suffix == ".md":
        text = path.read_text()
    else:
        return
    for block in FENCE.split(COMMENT.sub("", text)):
        if not block.startswith("```"):
            for link in LINK.finditer(block):
                yield pathlib.Path(os.path.normpath(path.parent / link[2]))


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in LANGUAGES)


def source(path: pathlib.Path) -> str:
    """Returns a source file as a page, or a folder as a page of its files."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return head + "\n".join(
            f"- [{one.name}]({path.name}/{one.name}.md)" for one in _files(path)
        )
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def notebook(path: pathlib.Path) -> str:
    """Returns a notebook as a page: text, code, and what the code printed and drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![Figure](data:image/png;base64,{picture})")
            elif printed := "".join(output.get("text", data.get("text/plain", []))):
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
