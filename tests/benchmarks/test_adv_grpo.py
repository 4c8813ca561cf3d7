"""The table of Adv-GRPO's page is the one that the stored runs give."""

from __future__ import annotations

from pathlib import Path

from benchmarks.adv_grpo import report, told


def test_the_page_shows_what_is_stored(root: Path) -> None:
    assert report() in (root / "docs/adv_grpo.md").read_text(encoding="utf-8")


def test_each_seed_stands_where_training_ends() -> None:
    assert told([0.25, 0.5], each=False) == "0.38"
    assert told([0.25, 0.5], each=True) == "**0.38** (0.25, 0.50)"
