"""What most tests of rewards do: score and see no failure, and load what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import genrl_rewards


def scored(reward: genrl_rewards.Reward, **given: Any) -> genrl_rewards.Scores:
    """Its scores; a failure is shown with its traceback."""
    scores = genrl_rewards.score(reward, **given)
    assert not scores.failures, scores.failures[0].traceback
    return scores


def refused(words: str, name: str, args: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Loading this reward fails with this message."""
    with pytest.raises(ValueError, match=words):
        genrl_rewards.load(name, dict(args or {}), **more)
