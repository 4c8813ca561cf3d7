"""The site: what is in it, where its links lead, and how it looks and works in a browser."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.browser import chromium

NARROW = (
    *("index", "methods", "configuration", "commands", "results", "notebooks/text_to_image", "guides/one_card"),
    *("guides/editing", "diffusion_nft", "trees", "vla_offline", "memory", "papers", "rewards"),
)
"""Pages with the widest tables, code, equations and pictures."""


def opened(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'genrl-diffusion[docs]'")
    return opened(Path(__file__).parents[2] / "docs" / "theme" / "hooks.py")


def pages(nav: Any) -> Iterator[str]:
    """The pages that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(part)


def test_every_page_is_in_the_navigation_once(root: Path) -> None:
    docs = root / "docs"
    written = {path.relative_to(docs).as_posix() for kind in ("*.md", "*.ipynb") for path in docs.rglob(kind)}
    named = list(pages(yaml.safe_load((root / "mkdocs.yml").read_text())["nav"]))
    assert len(named) == len(set(named))
    assert written == {page for page in named if page != "commands.md" and not page.startswith("source/")}


def test_links_to_files_lead_to_their_pages_and_those_of_files_back(hooks: ModuleType) -> None:
    from mkdocs.exceptions import PluginError

    page = hooks.DOCS / "guides" / "one_card.md"
    text = "[a](../../configs/quickstart.yaml) [b](../memory.md#x) ![c](../../assets/world.png)\n"
    text += "```\n[d](../nothing.py)\n```\n"
    moved = hooks.rewrite(text, page, "guides/one_card.md")
    assert "[a](../source/configs/quickstart.yaml.file.md) [b](../memory.md#x) ![c](../source/assets/world" in moved
    assert "[d](../nothing.py)" in moved  # code stays as it is
    files = [hooks.ROOT / "configs" / "quickstart.yaml", hooks.DOCS / "example_reward.py"]
    assert hooks.linked(hooks.DOCS / "start.md") == files
    text = hooks.rewrite("[a](docs/extending.md#a-method)", hooks.ROOT / "CONTRIBUTING.md", "source/CONTRIBUTING.md")
    assert text == "[a](../extending.md#a-method)"
    for link in ("../configs/nothing.yaml", "example_rewards.py", "../../outside.md"):
        with pytest.raises(PluginError, match=re.escape(f"docs/start.md links to {link}, which does not exist")):
            hooks.rewrite(f"[a]({link})", hooks.DOCS / "start.md", "start.md")


def test_the_page_of_the_command_line_has_every_command(hooks: ModuleType) -> None:
    import typer

    from genrl.cli.app import app

    text, group = hooks.command_line(), typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"\n## `genrl {name}`\n" in text
        for option in (option for parameter in command.params for option in parameter.opts if option.startswith("--")):
            assert f"`{option}" in text, f"genrl {name} {option}"


def test_examples_of_docstrings_become_code(root: Path) -> None:
    pytest.importorskip("griffe", reason="mkdocstrings is not installed: pip install 'genrl-diffusion[docs]'")
    doctests = opened(root / "docs" / "theme" / "doctests.py")
    text = "Text.\n\n>>> def f():\n...     return 1\n>>> f()\n1\n\nMore.\n"
    assert doctests.fenced(text) == "Text.\n\n```pycon\n>>> def f():\n...     return 1\n>>> f()\n1\n```\n\nMore.\n"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hooks: ModuleType) -> Iterator[tuple[str, Path]]:
    """The address of the site, built strictly, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=hooks.ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert built.returncode == 0, built.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()
    thread.join()


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere_and_fit_a_telephone(site: tuple[str, Path]) -> None:
    address, folder = site
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.html")}
    assert {"commands.html", "notebooks/text_to_image.html", "source/configs/quickstart.yaml.file.html"} < names
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(r"^- <(?:strong|code)>", text, re.MULTILINE), f"{name}: a list that runs on in a paragraph"
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text):
            assert not re.search(r"(?:src|href)=.?(?:https?:)?//", tag), f"{name}: {tag}"
    with chromium() as browser:
        page, asked = browser.new_page(viewport={"width": 390, "height": 800}), set()
        page.on("request", lambda request: asked.add(request.url))
        for name in NARROW:
            page.goto(f"{address}{name}.html", wait_until="domcontentloaded")
            assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), name
        page.evaluate("document.querySelector('article').innerHTML += `<div style='width: 500px'>wide</div>`")
        assert page.evaluate("document.documentElement.scrollWidth > innerWidth")  # what is too wide is seen
    assert not {url for url in asked if not url.startswith((address, "data:", "blob:"))}


@pytest.mark.slow
def test_keys_are_filtered_pages_found_and_equations_typeset(site: tuple[str, Path]) -> None:
    address, folder = site
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{address}configuration.html")
        rows = page.locator("article tbody tr:visible")
        every = rows.count()
        page.fill(".key-filter", "sampling fit_batch")
        assert 0 < rows.count() < every and all("fit_batch" in row.inner_text() for row in rows.all())
        assert page.locator(".key-count").inner_text().split()[0] == str(rows.count())
        page.fill(".key-filter", "no such key")
        assert rows.count() == 0 and page.locator(".key-count").inner_text() == "0 rows"
        page.fill(".key-filter", "")
        assert rows.count() == every
        page.goto(f"{address}start.html")
        assert page.locator(".key-filter").count() == 0
        page.goto((folder / "diffusion_nft.html").as_uri())  # from the disk, too
        page.wait_for_selector(".arithmatex .katex")
        assert page.locator(".katex-error").count() == 0
        page.get_by_placeholder("Search").first.press_sequentially("reward hacking")  # the page listens to keys
        page.locator(".md-search-result__link", has_text="Prevent reward hacking").first.wait_for(timeout=60_000)
