"""docs/configuration.md is the one the schema makes."""

from __future__ import annotations

from pathlib import Path

from genrl.config.page import markdown


def test_the_page_is_current(root: Path) -> None:
    assert (root / "docs" / "configuration.md").read_text() == markdown(), (
        "run `python -m genrl.config.page > docs/configuration.md`"
    )
