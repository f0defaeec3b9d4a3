"""Writes docs/api.md, the public names of the package from their docstrings, and in docs/evaluation.md
the table of the evaluators' options.

    python -m tools.api_page

An example is the docstring's section "Example:", which the tests run.
"""

import ast
import inspect
import operator
import re
import textwrap
from typing import Any

import alibi
from alibi.cli import command_line
from alibi.evaluation.base import help_of, options_by_name
from alibi.reporting.measure import EVALUATORS
from tools import ROOT

PAGE = ROOT / "docs" / "api.md"
EVALUATION = ROOT / "docs" / "evaluation.md"
HEAD = """\
# Public names

`import alibi` takes no time: each name is imported at its first use. The types of arrays, such as
`Tile`, are in [positions/shapes.py](../alibi/positions/shapes.py) with their shapes. This page is
made by `python -m tools.api_page`.
"""
# Names that are no functions or classes, and have no docstring of their own.
CONSTANTS = {
    "METHODS": """The registry of [position methods](methods.md): the name of each method, and where its class is.

Example:
  >>> "alibi" in METHODS and "rotary" in METHODS
  True
""",
}
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")


def names() -> list[str]:
    """Returns the public names, and for a module its classes, such as linen.SelfAttention."""
    public_names = []
    for name in alibi.__all__:
        public = getattr(alibi, name)
        if inspect.ismodule(public):
            classes = inspect.getmembers(public, inspect.isclass)
            public_names += [
                f"{name}.{each}"
                for each, of in classes
                if of.__module__ == public.__name__ and not each.startswith("_")
            ]
        else:
            public_names.append(name)
    return sorted(public_names, key=str.lower)


def docstring(name: str) -> str:
    """Returns the docstring of a public name."""
    text = CONSTANTS.get(name) or inspect.getdoc(operator.attrgetter(name)(alibi))
    assert text, f"{name} lacks a docstring"
    return text


def page() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for name in names():
        parts.append(f"## {name}\n")
        if name not in CONSTANTS:
            of = operator.attrgetter(name)(alibi)
            head = signature(of)
            for constant in re.findall(r"= ([A-Z_]+)\b", head):  # a default by name
                head = head.replace(
                    f"= {constant}", f"= {getattr(inspect.getmodule(of), constant)}"
                )
            parts.append(f"```\n{head}\n```\n")
        parts.append(as_markdown(name, docstring(name)))
    return "\n".join(parts)


def signature(of: Any) -> str:
    """Returns the head of a function, or a class with its arguments or fields, as written."""
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    if isinstance(written, ast.ClassDef):
        made = [one for one in written.body if getattr(one, "name", "") == "__init__"]
        if not made:
            fields = [ast.unparse(one) for one in written.body if isinstance(one, ast.AnnAssign)]
            bases = ", ".join(map(ast.unparse, written.bases))
            return "\n    ".join([f"class {of.__name__}({bases}):", *fields]).replace("'", '"')
        (written,) = made
    assert isinstance(written, ast.FunctionDef)
    args = written.args
    positional = [one for one in [*args.posonlyargs, *args.args] if one.arg != "self"]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    lines = [_argument(*one) for one in zip(positional, defaults, strict=True)]
    if args.kwonlyargs:
        lines += ["*", *map(_argument, args.kwonlyargs, args.kw_defaults)]
    lines += [f"**{ast.unparse(args.kwarg)}"] if args.kwarg else []
    returned = f" -> {_annotation(written.returns)}".replace("'", '"') if written.returns else ""
    return "\n    ".join([f"{of.__name__}(", *(f"{line}," for line in lines)]) + f"\n){returned}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    value = "" if default is None else f" = {ast.unparse(default)}"
    kind = f": {_annotation(argument.annotation)}" if argument.annotation else ""
    return argument.arg + (kind + value).replace("'", '"')


def _annotation(written: ast.expr) -> str:
    """Returns a type as it is written, or as the text of it says."""
    return (
        str(written.value)
        if isinstance(written, ast.Constant) and written.value
        else ast.unparse(written)
    )


def as_markdown(name: str, text: str) -> str:
    """Returns a name's docstring as Markdown. Each argument and each error is a list item."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    lines = [parts[0].strip(), ""]
    for section, body in zip(parts[1::2], parts[2::2], strict=True):
        body = textwrap.dedent(body).strip()
        if section == "Example":
            code = f"from alibi import {name.partition('.')[0]}\n{_without_prompts(body)}"
            code = re.sub(r"\A((?:(?:import|from) .*\n)+)", r"\1\n", code)
            lines += ["```python", code, "```", ""]
            continue
        heading = {"Args": "Arguments"}.get(section, section)
        if section == "Returns":
            lines += [f"**{heading}**: {' '.join(body.split())}", ""]
            continue
        items = re.split(r"\n(?=\S)", body)
        lines += [f"**{heading}**", ""]
        for item in items:
            names, _, meaning = " ".join(item.split()).partition(": ")
            item = f"- {', '.join(f'`{name}`' for name in names.split(', '))}:"
            causes = meaning.split("; ") if section == "Raises" else [meaning]
            lines += [f"{item} {meaning}"] if len(causes) == 1 else [item]
            lines += [f"    - {cause.removesuffix('.')}." for cause in causes if len(causes) > 1]
        lines.append("")
    return "\n".join(lines)


def _without_prompts(example: str) -> str:
    """Returns an example as code that can be copied, its results as comments."""
    return "\n".join(
        line[4:] if line.startswith((">>> ", "... ")) else f"# {line}" if line else line
        for line in example.splitlines()
    )


def with_options(text: str) -> str:
    """Returns a page whose table with the heading "option" has a line for each option of an evaluator."""
    lines = ["| option | evaluator | meaning |", "|---|---|---|"]
    for name, field in options_by_name(EVALUATORS).items():
        owners = [each for each in EVALUATORS if name in options_by_name([each])]
        others = [each for each in EVALUATORS if each not in owners]
        named = ", ".join(min(owners, others, key=len))
        with_it = named if len(owners) <= len(others) else f"all but {named}"
        lines.append(f"| `--{name}` | {with_it} | {help_of(field)} |")
    table = "\n".join(lines) + "\n"
    return re.sub(r"^\| option \|(.*\n)+?(?=\n)", lambda _: table, text, flags=re.MULTILINE)


def main() -> None:
    for path, text in ((PAGE, page()), (EVALUATION, with_options(EVALUATION.read_text()))):
        path.write_text(text)
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    command_line.run(main)
