"""What the README shows is what is in the files, and the pages it names are there."""

from __future__ import annotations

import re
from pathlib import Path


def test_readme_shows_the_files_as_they_are(root: Path) -> None:
    text = (root / "README.md").read_text()
    for file in ("configs/quickstart.yaml", "docs/example_reward.py"):
        assert (root / file).read_text().strip() in text, f"README.md shows another {file}"


def test_readme_links_exist(root: Path) -> None:
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
