"""Chromium for tests that click through a page. Skipped where no browser is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

QUIET = ("gpu", "background-networking", "component-update", "sync")
ARGUMENTS = ("--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET))  # tests may run as root


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser, closed at the end."""
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: pip install playwright")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
