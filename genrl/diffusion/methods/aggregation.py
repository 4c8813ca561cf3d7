"""Rules of methods that make one advantage of several rewards by themselves. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.method import Finding
from genrl.diffusion.methods.layout import Tree

if TYPE_CHECKING:
    from genrl.config.schema import Config


def sum_of_tree(tree: Tree | None, key: str) -> Iterator[Finding]:
    """Refuse trees that have advantages of their own beside those that the setting `key` asks for."""
    if tree is not None and tree.normalise == "depth":
        text = "normalises rewards by themselves, at every depth; write group"
        yield ("trainer.tree.normalise", f"trainer.{key}"), text
    if tree is not None and tree.contrast is not None:
        text = "has advantages of its own, over a prompt's history; write null"
        yield ("trainer.tree.contrast", f"trainer.{key}"), text


def plain_scores(config: Config, aggregate: str) -> Iterator[Finding]:
    """Refuse rewards that are normalised before they are aggregated."""
    for index, reward in enumerate(config.rewards):
        if reward.normalize != "none":
            text = f"{aggregate} judges and normalises the scores themselves; write none"
            yield (f"rewards.{index}.normalize", "trainer.aggregate"), text
