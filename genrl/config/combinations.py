"""Combinations of settings that cannot work, refused before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genrl.config.schema import Config


class ImpossibleConfig(ValueError):
    """Settings that contradict each other. `problems` holds (keys concerned, what to do) pairs."""

    def __init__(self, problems: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(f"{', '.join(keys)}: {text}" for keys, text in problems))
        self.problems = problems


def refuse_impossible(config: Config) -> None:
    """Raise ImpossibleConfig with every contradiction of `config`; return nothing if there is none."""
