"""Rewards of episodes in which a model may use a tool before it answers: PARA-GRPO's three terms, VRAG-RL's mixture.

Pure functions of what was written and what came of it; the environment that has the tool says the latter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

TAGS = ("think", "answer", "bbox")
SUBSTANTIVE = 3
"""Words from which on a thought counts as one (PARA-GRPO does not say how many; ours)."""


def tool_format(text: str, *, call: str = "bbox") -> float:
    """PARA-GRPO's R_fmt of all that a model wrote in an episode: `min(1, base + anchor / 2 + early call + balance)`.

    base: .2 for a thought of `SUBSTANTIVE` words or more, .3 and .2 for the opening and the closing tag of an answer
    that is not empty. anchor: .4 for a closed thought, .3 where an answer follows it, -.3 for one that is never closed.
    .3 for a thought before the first call of the tool (`<bbox>...</bbox>`), .1 where all tags are balanced.
    """
    thought = re.search(r"<think>(.*?)</think>", text, re.DOTALL)
    begun = re.search(r"<think>(.*)", text, re.DOTALL)
    words = (thought or begun)[1].split() if thought or begun else []  # type: ignore[index]
    answer = re.search(r"<answer>\s*(?!</answer>)\S", text)
    base = 0.2 * (len(words) >= SUBSTANTIVE) + 0.3 * bool(answer) + 0.2 * bool(answer and "</answer>" in text)
    anchor = 0.4 * bool(thought) - 0.3 * bool(begun and not thought)
    anchor += 0.3 * bool(re.search(r"</think>\s*<answer>.*?</answer>", text, re.DOTALL) and thought)
    early = re.search(rf"<{call}>.*?</{call}>", text, re.DOTALL)
    considered = bool(early and thought and thought.end() <= early.start())
    balanced = bool(text) and all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in TAGS)
    return min(1.0, base + 0.5 * anchor + 0.3 * considered + 0.1 * balanced)


def tool_success(*, parsed: bool, executed: bool, accurate: bool) -> float:
    """PARA-GRPO's R_tool: .1 for a call that can be read, .3 for one executed, .5 more before a right answer."""
    if not parsed:
        return 0.0
    return (0.3 if executed else 0.1) + 0.5 * accurate


def para_grpo(accuracy: float, form: float, tool: float) -> float:
    """PARA-GRPO's reward: `R_acc + 1.0 R_fmt + R_tool`."""
    return accuracy + form + tool


def ndcg(relevances: Sequence[float], relevant: int) -> float:
    """Normalised discounted gain of what was fetched, in its order: `sum (2^rel - 1) / log2(rank + 1)` over the ideal
    of `relevant` pieces of relevance 1. 0 where there is nothing relevant or nothing was fetched."""
    gain = sum((2**rel - 1) / math.log2(rank + 2) for rank, rel in enumerate(relevances))
    best = sum(1 / math.log2(rank + 2) for rank in range(relevant))
    return min(1.0, gain / best) if best else 0.0


def vrag_rl(judge: float, rule: float, gain: float) -> float:
    """VRAG-RL's reward: `.7 judge + .1 rule + .2 NDCG` where the rule (the form) is kept, else the rule's score."""
    return 0.7 * judge + 0.1 * rule + 0.2 * gain if rule > 0 else rule
