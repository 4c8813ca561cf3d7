"""tests/golden holds what tests read, and its README says what each file is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def names_read(source: str) -> tuple[set[str], set[str]]:
    """What a test file reads: whole names, and beginnings `f"vlm_{name}"` joined with each string of the same file."""
    whole, beginnings, strings = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name("golden" | "golden_json"), args=[ast.Constant(str(name))]):
                whole.add(name)
            case ast.Call(func=ast.Name("golden"), args=[ast.JoinedStr([ast.Constant(begin), ast.FormattedValue()])]):
                beginnings.add(begin)
            case ast.BinOp(left=ast.Name("GOLDEN"), op=ast.Div(), right=ast.Constant(str(name))):
                whole.add(name)
            case ast.Constant(str(text)):
                strings.add(text)
    return whole, {begin + text for begin in beginnings for text in strings}


def test_every_golden_file_is_read_and_described() -> None:
    there = {path.stem for path in (TESTS / "golden").iterdir() if path.name != "README.md"}
    read, possible = set[str](), set[str]()
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if "golden" in source.lower():
            whole, joined = names_read(source)
            read, possible = read | whole, possible | joined
    assert there - read - possible == set(), "no test reads these"
    assert read <= there, "tests read what is not there"
    rows = re.findall(r"^\| (`.*?`) \|", (TESTS / "golden" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`(\w+)(?:\.\w+)?`", row)]
    assert sorted(described) == sorted(there)
