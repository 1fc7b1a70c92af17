"""What `make docs` needs beside mkdocs.yml: documents from outside docs/, the reference, and its cross-references.

mkdocs calls the functions whose names begin with ``on_``; griffe, which reads the source for the reference, finds the
class :class:`References`.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmark-programs.md",
    "deploy/README.md": "deploy.md",
}
"""Documents that GitHub wants elsewhere, and the pages that they are."""
NOT_SEARCHED = {"changelog.md"}
"""It names everything that shoal has, so it would be among the results of every search."""
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?P<short>~?)(?P<path>[\w.]+)`")
_ENTRY = re.compile(r"^::: (?P<path>[\w.]+)\n\n?", re.MULTILINE)
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s>\"]+")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Each part of the reference becomes a section of the navigation, with a page for each class."""
    package = griffe.load("shoal", search_paths=[ROOT / "src"])
    for file in REFERENCE:
        _reference[f"api/{file.name}"] = Reference.split(file, package)

    def expand(entry: Any) -> Any:
        if isinstance(entry, list):
            return [expand(each) for each in entry]
        if isinstance(entry, dict):
            return {title: expand(inner) for title, inner in entry.items()}
        pages = _reference[entry].pages if entry in _reference else {}
        return [{"Overview": entry}, *({name: page} for page, (name, _) in pages.items())] if pages else entry

    config.nav = expand(config.nav)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents from outside docs/, a page for each example, and a page for each class."""
    for name, page in OUTSIDE.items():
        if page not in files.src_uris:
            head = "---\nsearch:\n  exclude: true\n---\n" if page in NOT_SEARCHED else ""
            files.append(File.generated(config, page, content=head + relink((ROOT / name).read_text("utf-8"), name)))
    for reference in _reference.values():
        for page, (_, text) in reference.pages.items():
            files.append(File.generated(config, page, content=text))
    for example in sorted((ROOT / "examples").iterdir()):
        if example.suffix in (".py", ".ipynb"):
            name = f"examples/{example.name}"
            files.append(File.generated(config, page_of(name), content=page_of_example(example)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the pages made of what they lead to."""
    if page.file.generated_by:
        return markdown
    if page.file.src_uri in _reference:
        markdown = _reference[page.file.src_uri].text
    return relink(markdown, f"docs/{page.file.src_uri}")


def on_post_build(*, config: MkDocsConfig) -> None:
    """The search finds all pages except those that would drown the others."""
    index = json.loads((Path(config.site_dir) / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    if drowning := found & {page.replace(".md", ".html") for page in NOT_SEARCHED}:
        raise PluginError(f"the search index has {', '.join(drowning)}")


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Nobody who reads the documents tells a third party of it."""
    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


@dataclass
class Reference:
    """A page of docs/api: a list of its classes, each of which has a page of its own, and everything else in full."""

    text: str
    pages: dict[str, tuple[str, str]]
    """For each class, the path of its page, its name and the page's text."""

    @classmethod
    def split(cls, file: Path, package: griffe.Object | griffe.Alias) -> Reference:
        head, *entries = _ENTRY.split(file.read_text("utf-8"))
        classes, rest, pages = [], [], {}
        for path, body in zip(entries[::2], entries[1::2], strict=True):
            entry = f"::: {path}\n" + (body if body.startswith(" ") else f"\n{body}")
            found: griffe.Object | griffe.Alias = package
            for name in path.split(".")[1:]:
                found = found[name]
            if not found.is_class:
                rest.append(entry)
                continue
            name = path.rpartition(".")[2]
            page = f"api/{file.stem}/{name}.md"
            pages[page] = name, f"::: {path}\n    options: {{ heading_level: 1 }}\n"
            says = found.docstring.value.partition("\n\n")[0].replace("\n", " ") if found.docstring else ""
            says = _ROLE.sub(lambda match: f"`{match['path'].rpartition('.')[2]}`", says.replace("``", "`"))
            classes.append(f"- [`{name}`]({file.stem}/{name}.md): {says}\n")
        return cls("\n".join([head, "".join(classes), *rest]), pages)


_reference: dict[str, Reference] = {}
"""By the page of docs/api. The hooks of mkdocs share it."""


def page_of(name: str) -> str:
    """The page of a file of the repository; "" if it has none."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name.startswith("examples/") and name.endswith((".py", ".ipynb")):
        return name.replace(".", "-") + ".md"
    return OUTSIDE.get(name, "examples.md" if name == "examples" else "")


def relink(markdown: str, source: str) -> str:
    """Turn links between files of the repository into links between pages.

    Args:
        markdown: the text.
        source: where it is in the repository.
    """
    page = page_of(source)

    def replace(match: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["target"]))
        if any(name == f"docs/{page}" for reference in _reference.values() for page in reference.pages):
            return match[0]
        if not (ROOT / name).exists():
            raise PluginError(f"{source} has a link to {match['target']}, which does not exist")
        target = page_of(name)
        if not target:
            return match["text"]  # a file that is no page, such as a test
        return f"[{match['text']}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{match['anchor'] or ''})"

    # Not in blocks of code, where brackets are something else.
    return "".join(
        part if part.lstrip().startswith("```") else _LINK.sub(replace, part)
        for part in re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    )


def page_of_example(path: Path) -> str:
    """A program, or the cells of a notebook, as a page."""
    if path.suffix == ".py":
        return f"# {path.name}\n\n```python\n{path.read_text('utf-8')}```\n"
    shown = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        is_text = cell["cell_type"] == "markdown"
        shown.append(relink(text, f"examples/{path.name}") if is_text else f"```python\n{text}\n```")
        shown += [f"```text\n{''.join(out['text'])}```" for out in cell.get("outputs", []) if "text" in out]
    return "\n\n".join(shown) + "\n"


class References(griffe.Extension):
    """Docstrings name things as Sphinx does; here these become links to the reference, or stay code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._visit(pkg)

    def _visit(self, obj: griffe.Object) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("``", "`")
            text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = _ROLE.sub(lambda match: self._link(match, obj), text)
        for member in obj.members.values():
            if isinstance(member, griffe.Object):
                self._visit(member)

    def _link(self, match: re.Match[str], obj: griffe.Object) -> str:
        path, module = match["path"], obj.module
        if path.startswith("."):
            path = (module.path if module.is_init_module else module.path.rpartition(".")[0]) + path
        else:
            first, dot, rest = path.partition(".")
            with contextlib.suppress(griffe.NameResolutionError):
                path = obj.resolve(first) + dot + rest
        name = path.rpartition(".")[2] if match["short"] else match["path"]
        return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'
