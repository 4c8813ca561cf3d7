"""YAML text -> plain values plus the line of every key, with YAML 1.2 scalars and size limits.

Only the event and node layers of PyYAML's SafeLoader are used; values are built here, from text, so no tag can
construct an object. Differences from PyYAML's own values: `1e-4` is a float, `on`/`yes`/`off` are text, `010` is 10,
dates are text. Duplicate keys, tags, several documents and anything large or deep are refused.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader as CSafeLoader  # type: ignore[assignment]

MAX_BYTES = 200_000
MAX_NODES = 5_000  # counted after aliases are expanded, so an alias bomb stops here
MAX_DEPTH = 40
LOOKALIKES = "\u00a0\u3000：，［］｛｝“”„‘’"
"""Characters that editors and input methods put in the place of those that YAML reads."""

KeyPath = tuple[str | int, ...]

_SCALARS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN"),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    ("float", re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"), "-+0123456789."),
)


class SourceError(ValueError):
    """A text that is not acceptable YAML. `problems` holds (line or None, what is wrong) pairs."""

    def __init__(self, problems: list[tuple[int | None, str]]) -> None:
        super().__init__("; ".join(text for _, text in problems))
        self.problems = problems


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema, which refuses what is large or deep as it reads."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    num_nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Do as SafeLoader, within the limits: it recurses, and hostile nesting would be a RecursionError."""
        self.num_nodes, self.depth = self.num_nodes + 1, self.depth + 1
        line = _line(self.peek_event())  # type: ignore[no-untyped-call]
        if self.num_nodes > 2 * MAX_NODES:  # keys are nodes, too
            raise SourceError([(line, f"more than {MAX_NODES:,} values; this is not a configuration file")])
        if self.depth > MAX_DEPTH + 1:  # a value inside the innermost level
            raise SourceError([(line, f"nested deeper than {MAX_DEPTH} levels")])
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which this module would read as a number (`1e-4`)."""

    yaml_implicit_resolvers = {first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: object) -> bool:
        """Write equal values twice instead of by anchor and alias: easier to read and to edit."""
        return True


for _name, _pattern, _first in _SCALARS:
    _firsts = [*_first, ""] if _name == "null" else [*_first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _firsts)
    Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, [*_first])


@dataclass
class Source:
    """A parsed text: its value and, for each path into it, the line (from 1) where the key or item stands."""

    value: object
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read(path: Path) -> Source:
    """Parse the YAML file at `path`. SourceError names the line; OSError if the file cannot be read."""
    with path.open("rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise SourceError([(None, f"larger than {MAX_BYTES:,} bytes; this is not a configuration file")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SourceError([(line, f"byte {raw[error.start]:#04x} is not UTF-8; save the file as UTF-8")]) from None
    return parse(text)


def parse(text: str) -> Source:
    """Parse YAML `text`; SourceError if it is not one acceptable document."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = " (a tab; indent with spaces)" if "'\\t'" in str(error.problem) else ""
        near = text.splitlines()[max(0, mark.line - 1) : mark.line + 1] if mark else []
        if odd := next((character for character in "".join(near) if character in LOOKALIKES), ""):
            hint = f" ({odd!r} is a {unicodedata.name(odd).lower()}: write the plain character)"
        raise SourceError([(mark.line + 1 if mark else None, f"not YAML: {error.problem}{hint}")]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SourceError([(line, f"character {error.character!r} is not allowed in YAML")]) from None
    if node is None:
        return Source(None)
    builder = _Builder()
    value = builder.build(node, (), 0)
    if builder.problems:
        raise SourceError(builder.problems)
    return Source(value, builder.lines)


def plain(text: str) -> Any:
    """`yaml.safe_load` by libyaml, which is ten times as fast but lets tabs through: for what `dump` wrote. Raises
    yaml.YAMLError where it is no YAML."""
    return yaml.load(text, Loader=CSafeLoader)  # noqa: S506


class _Builder:
    """Walks the node graph once, expanding aliases under a limit and collecting problems."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[tuple[int | None, str]] = []
        self.num_nodes = 0

    def build(self, node: yaml.Node, path: KeyPath, depth: int) -> object:
        line = _line(node)
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or depth > MAX_DEPTH:
            text = f"more than {MAX_NODES:,} values or {MAX_DEPTH} levels once aliases (*name) are expanded"
            raise SourceError([(line, text)])
        self.lines.setdefault(path, line)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in _KINDS[type(node)]:
            self.problems.append((line, f"tag {node.tag!r} is not allowed; write plain values"))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        return self._scalar(node.tag.rpartition(":")[2], node.value, line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, object]:
        value: dict[str, object] = {}
        for key_node, item in node.value:
            line = _line(key_node)
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.tag.endswith(":str"):
                self.problems.append((line, f"a key must be text, found {_key(key)}; put it in quotes if meant"))
            elif key in value:
                first = self.lines[(*path, key)]
                where = ".".join(map(str, (*path, key)))
                self.problems.append((line, f"{where}: written twice, first on line {first}; keep one"))
            else:
                self.lines[(*path, key)] = line
                value[key] = self.build(item, (*path, key), depth + 1)
        return value

    def _scalar(self, kind: str, text: str, line: int) -> object:
        if odd := [character for character in text if "\ud800" <= character <= "\udfff" or character == "\0"]:
            what = "the character NUL; leave it out" if odd[0] == "\0" else "half a character; write the whole one"
            self.problems.append((line, f"{text[:40]!r} has {what}"))
            return None
        matched = next((name for name, pattern, _ in _SCALARS if pattern.match(text)), "str")
        if kind == "str":
            return text
        if kind != matched and not (kind == "float" and matched == "int"):  # an explicit tag: `!!int abc`
            self.problems.append((line, f"{text!r} is not of the tagged type {kind!r}; write it without a tag"))
            return None
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if len(text) > 300 or not math.isfinite(float(text)):
            self.problems.append((line, f"the number {text[:40]} is too large"))
            return None
        return int(text) if kind == "int" else float(text)


def _key(value: object) -> str:
    return repr(value[:60]) if isinstance(value, str) else "a list or section"


def _line(node: yaml.Node | yaml.Event) -> int:
    return node.start_mark.line + 1 if node.start_mark else 1


_KINDS: dict[type[yaml.Node], tuple[str, ...]] = {
    yaml.MappingNode: ("map",),
    yaml.SequenceNode: ("seq",),
    yaml.ScalarNode: ("str", "null", "bool", "int", "float"),
}
