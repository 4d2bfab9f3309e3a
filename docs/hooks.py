"""The part of the documentation site that lies outside `docs/`: the README, a few other pages, and linked source files.

Pages link to files of the repository by relative paths, so that they can be read where the repository is browsed. The
site has a page for each file that is linked: `[x](../runtime/engine.py)` in `docs/walk.md` becomes
`[x](source/runtime/engine.py.md)`. A link to a file that does not exist stays as it is, and fails a strict build.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#:\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".md": "markdown", ".py": "python", ".toml": "toml", ".txt": "text"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside of `docs/`, then a page for each file or folder that a page links to."""
    written = {uri: (ROOT / path).read_text() for path, uri in PAGES.items()}
    for uri, text in written.items():
        files.append(File.generated(config, uri, content=translate(text, uri)))
    repository_paths = {uri: path for path, uri in PAGES.items()}
    for file in list(files.documentation_pages()):
        uri = file.src_uri
        text = written.get(uri) or file.content_string
        for match in LINK.finditer(text):
            path = _path_in_repository(match[2], repository_paths.get(uri, f"docs/{uri}"))
            if path is not None and _uri(path).startswith("source/") and files.get_file_from_path(_uri(path)) is None:
                page = File.generated(config, _uri(path), content=_source_page(path))
                page.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translates the links of a page of `docs/`; those of generated pages are translated already."""
    if page.file.src_uri in GENERATED:
        make, mark = GENERATED[page.file.src_uri]
        markdown = markdown.replace(mark, make())
    return markdown if page.file.generated_by else translate(markdown, page.file.src_uri)


def knobs() -> str:
    """The table of all knobs."""
    from torchtpu import config

    return config.table()


def commands() -> str:
    """A section for each command: what it does, its arguments and options."""
    import typer

    from torchtpu.cli import app

    return "\n\n".join(_command(command, name) for name, command in _commands(typer.main.get_command(app), "torchtpu"))


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{name} {word}")


def _command(command: Any, name: str) -> str:
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    arguments = [parameter for parameter in command.params if parameter not in options]
    named = [a.name.upper() if a.required else f"[{a.name.upper()}]" for a in arguments]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *named])
    text = f"## {name}\n\n{command.help or ''}\n\n```\n{usage}\n```\n"
    rows = [f"| `{', '.join([*o.opts, *o.secondary_opts])}` | {' '.join((o.help or '').split())} |" for o in options]
    return "\n".join([text, "| option | meaning |", "|---|---|", *rows]) if rows else text


GENERATED = {"api/config.md": (knobs, "<!-- knobs -->"), "api/cli.md": (commands, "<!-- commands -->")}


def translate(text: str, uri: str) -> str:
    """The text of a page with links to files of the repository turned into links to pages of the site."""
    source = next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")

    def link(match: re.Match[str]) -> str:
        path = _path_in_repository(match[2], source)
        if path is None:
            return match[0]
        target = posixpath.relpath(_uri(path), posixpath.dirname(uri) or ".")
        return f"{match[1]}{target}{match[3] or ''})"

    return LINK.sub(link, text)


def _path_in_repository(target: str, source: str) -> str | None:
    """The path from the root of the repository that a link in the file `source` leads to; None where nothing is."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if (ROOT / path).exists() and not path.startswith("..") else None


def _uri(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _source_page(path: str) -> str:
    """A page that shows a file, a notebook, or what lies in a folder; the search leaves it out."""
    whole = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if whole.is_dir():
        return head + "\n".join(f"- `{name}`" for name in sorted(os.listdir(whole)) if not name.startswith(("_", ".")))
    if whole.suffix == ".ipynb":
        return head + _notebook(json.loads(whole.read_text()))
    return head + _fenced(whole.read_text(), LANGUAGES.get(whole.suffix, "text"))


def _notebook(notebook: dict[str, Any]) -> str:
    """The cells of a notebook: texts as they are, code and what it printed as blocks."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else _fenced(text, "python"))
        for output in cell.get("outputs", []):
            shown = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append(_fenced("".join(shown), "text"))
    return "\n\n".join(parts)


def _fenced(text: str, language: str) -> str:
    return f"``````{language}\n{text.rstrip()}\n``````\n"
