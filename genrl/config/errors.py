"""ConfigError: everything wrong with a configuration, each with its place, in one message; and files by the place that
names them.

A file that a configuration names is below the current folder, or else beside the YAML file: one that is beside its
prompts can be trained from anywhere; and so can one of a folder `configs`, whose names are written from the folder that
it lies in. At last `assets/...` is what comes with genrl, whoever names it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genrl.config.yaml_source import KeyPath

Finding = tuple[tuple[str, ...], str]
"""Keys concerned, and what is wrong with them and what to write instead."""


def command(*words: object) -> str:
    """A command of genrl as a shell reads it: names with spaces are quoted."""
    return shlex.join(["genrl", *map(str, words)])


class ImpossibleConfig(ValueError):
    """Settings that contradict each other. `problems` holds (keys concerned, what to do) pairs."""

    def __init__(self, problems: list[Finding]) -> None:
        super().__init__("; ".join(f"{', '.join(keys)}: {text}" for keys, text in problems))
        self.problems = problems


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a file and its line, or the command line."""

    label: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


Origins = Mapping[KeyPath, Origin]


@dataclass(frozen=True)
class Problem:
    """One thing to put right."""

    origin: Origin
    path: str
    """Dotted path of the key, or keys; empty where the text itself is not YAML."""
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin), self.path, self.text) if part)


class ConfigError(ValueError):
    """A configuration that is refused. The message lists all problems, one per line; so does `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.origin.label, problem.origin.line or 0))
        self.problems = tuple(ordered)
        count = f"{len(ordered)} problems" if len(ordered) > 1 else "1 problem"
        super().__init__("\n".join([f"{count} in the configuration; nothing was loaded", *map(str, ordered)]))


def dotted(path: KeyPath) -> str:
    """The path as it is written in an override: ("rewards", 0, "name") -> rewards.0.name."""
    return ".".join(str(part) for part in path)


def origin_of(path: KeyPath, origins: Origins) -> Origin:
    """Find where `path` was written, or the nearest section around it."""
    for end in range(len(path), -1, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return Origin("configuration")


_ABSENT = re.compile(r"no such (file|folder)|not a prompt file|there is no (file|folder)|does not exist")
_LOOKED = re.compile(r" \(looked from [^)]*\)")  # of code that knows the current folder alone
_LONGEST = 400
"""Characters of a path: longer texts are templates and questions."""


def _folders(origin: Origin) -> list[Path]:
    """Folders in which a path that was written there is looked up, in this order."""
    file = Path(origin.label)
    if origin.line is None or not file.is_file():  # an override, or an argument in a script
        return [Path()]
    above = (folder.parent for folder in file.resolve().parents if folder.name == "configs")
    return [Path(), file.parent, *above]


def with_places(text: str, origin: Origin) -> str:
    """A message; of one that says that a file or folder is not there, with where it was looked for."""
    places = dict.fromkeys(str(folder.resolve()) for folder in _folders(origin))
    if len(places) < 2 or not _ABSENT.search(text):
        return text
    return f"{_LOOKED.sub('', text)} (looked in {' and in '.join(places)})"


def locate(tree: dict[str, Any], origins: Origins) -> None:
    """Put, in place, the path from the current folder for each one that is only beside the file that names it.

    Any key may name a file, those of a reward's arguments too; so what counts is that the text looks like a path and
    that there is something. Overrides mean the current folder: who types one is in it.
    """
    from genrl.recipes import shipped

    for path, node, key, value in list(_texts(tree, ())):
        name, colon, part = value.partition(".py:")
        name += ".py" if colon else ""
        origin = origins.get(path)
        if path == ("output",) or origin is None or not _looks_like_path(name):
            continue
        places = [folder / name for folder in _folders(origin)]
        there = next((place for place in places if _exists(place)), shipped(name) or places[0])
        if there != places[0]:
            node[key] = f"{there}:{part}" if colon else str(there)


def _texts(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any, str]]:
    """(path, section or list, its key, text) of every text."""
    items: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(value, str):
            yield (*path, key), node, key, value
        else:
            yield from _texts(value, (*path, key))


def _looks_like_path(text: str) -> bool:
    """Whether a text may name a file: names of rewards and methods have no slash and no ending."""
    if not text or len(text) > _LONGEST or "\n" in text or "://" in text or text.startswith(("/", "~")):
        return False
    return "/" in text or Path(text).suffix != ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no name of a file: a part that is too long
        return False
