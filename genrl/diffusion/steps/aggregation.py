"""Rules of methods that make one advantage of several rewards by themselves, or choose among them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.config.run_config import FileFinding
from genrl.diffusion.steps.layout import Tree

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt
    from genrl.diffusion.config.schema import Config


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


def named_rewards(config: Config, rows: Sequence[Prompt], column: str) -> Iterator[FileFinding]:
    """Refuse the first prompt whose `column` (trainer.reward_column) names none of the rewards trained on."""
    trained = [label for label, reward in zip(config.reward_labels, config.rewards, strict=True) if reward.weight != 0]
    for row in rows:
        if (label := row.columns.get(column)) in trained:
            continue
        near = get_close_matches(str(label), trained, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        has = f"no column {column!r}" if column not in row.columns else f"{column} {label!r}, which is no reward"
        where = f"{config.prompts.train}:{row.line}"
        yield (
            ("trainer", "reward_column"),
            f"{where} has {has}; {hint}rewards that are trained on: {', '.join(trained)}",
        )
        return
