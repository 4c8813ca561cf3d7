"""ConfigError: everything wrong with a configuration, each with its place, in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from genrl.config.yaml_source import KeyPath

Finding = tuple[tuple[str, ...], str]
"""Keys concerned, and what is wrong with them and what to write instead."""


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
