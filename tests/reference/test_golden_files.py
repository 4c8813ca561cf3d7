"""tests/golden holds what tests read, and its README says what each file is."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
READ = re.compile(r'\b(?:golden|golden_json)\(f?"(\w+)(\{)?|\bGOLDEN / "(\w+)"')


def names_read(source: str) -> set[str]:
    """What a test file reads: whole names; of `f"vlm_{name}"` the beginning, joined with each string of that file."""
    names = set[str]()
    for beginning, more, folder in READ.findall(source):
        ends = re.findall(r'"(\w+)"', source) if more else [""]
        names |= {(beginning or folder) + end for end in ends}
    return names


def test_every_golden_file_is_read_and_described() -> None:
    there = {path.stem for path in (TESTS / "golden").iterdir() if path.name != "README.md"}
    sources = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    read = set[str]().union(*(names_read(source) for source in sources if "golden" in source or "GOLDEN" in source))
    assert there - read == set(), "no test reads these"
    rows = re.findall(r"^\| (`.*?`) \|", (TESTS / "golden" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`(\w+)(?:\.\w+)?`", row)]
    assert sorted(described) == sorted(there)
