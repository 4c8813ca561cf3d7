"""What mkdocs does not do itself: repository files that pages link to, and the page of the command line.

Pages link to files as a reader of the repository needs it (`../configs/quickstart.yaml`). The site carries those files
as pages below `source/`, so that the links work offline too. A link to a file that does not exist stops the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCE = "source"
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add the page of the command line, the pages that are always there, and every repository file that is linked."""
    files.append(File.generated(config, "commands.md", content=command_line()))
    waiting = [ROOT / "CONTRIBUTING.md", ROOT / "assets" / "README.md"]
    for page in DOCS.rglob("*.md"):
        waiting += linked(page)
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        files.append(repository_file(path, config))
        if path.suffix == ".md":
            waiting += linked(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to repository files to their pages on the site."""
    return rewrite(markdown, origin(page.file.src_uri), page.file.src_uri)


def origin(uri: str) -> Path:
    """The file of the repository that a page of the site shows."""
    inside = uri.removeprefix(f"{SOURCE}/")
    return DOCS / uri if inside == uri else ROOT / inside.removesuffix(".file.md")


def carried(path: Path) -> str:
    """The address of a repository file on the site: itself, if it is Markdown or a picture, or a page that shows it."""
    inside = path.relative_to(ROOT).as_posix()
    shown = path.suffix in (".md", ".png", ".svg")
    return f"{SOURCE}/{inside}" if shown else f"{SOURCE}/{inside}.file.md"


def target(page: Path, link: str) -> Path | None:
    """The repository file that a link means; None for one that mkdocs resolves and checks itself.

    Raises PluginError where there is no such file."""
    path = Path(os.path.normpath(page.parent / link))
    if path.is_relative_to(DOCS) and path.suffix not in LANGUAGES:
        return None
    if not path.is_relative_to(ROOT) or not path.exists():
        raise PluginError(f"{page.relative_to(ROOT)} links to {link}, which does not exist; correct the link")
    return path


def linked(page: Path) -> list[Path]:
    """The repository files that a page links to."""
    found = (target(page, match[2]) for match in LINK.finditer(prose(page.read_text(encoding="utf-8"))))
    return [path for path in found if path is not None]


def prose(markdown: str) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)


def rewrite(markdown: str, page: Path, uri: str) -> str:
    """The text of `page` with its links to repository files pointing to their pages on the site, seen from `uri`."""
    here = os.path.dirname(uri)

    def moved(match: re.Match[str]) -> str:
        path = target(page, match[2])
        if path is not None:
            address = carried(path)
        elif uri.startswith(f"{SOURCE}/"):
            address = Path(os.path.normpath(page.parent / match[2])).relative_to(DOCS).as_posix()
        else:
            return match[0]
        return f"{match[1]}{os.path.relpath(address, here or '.')}{match[3] or ''}{match[4]}"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else LINK.sub(moved, block) for block in blocks)


def repository_file(path: Path, config: Any) -> File:
    """A file of the repository as a page or picture of the site."""
    uri, inside = carried(path), path.relative_to(ROOT).as_posix()
    if not uri.endswith(".file.md"):
        return File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
    if path.is_dir():
        names = sorted(f"{inside}/{entry.name}" for entry in path.iterdir() if not entry.name.startswith((".", "__")))
        body = "\n".join(names)
    else:
        body = path.read_text(encoding="utf-8").rstrip("\n")
    # a search finds what pages say before it finds files
    front = "---\nsearch: {boost: 0.1}\n---\n\n"
    text = f"{front}# {inside}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{body}\n````\n"
    return File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def command_line() -> str:
    """The help of every command, from the command line itself."""
    import typer
    from typer.cli import get_docs_for_click

    from genrl.cli.app import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="genrl", title="Command line")
    # typer's list of commands cuts their texts short, and the headings below are such a list
    return re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)
