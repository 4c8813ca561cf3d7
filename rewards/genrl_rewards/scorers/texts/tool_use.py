"""Rewards of episodes in which a model may use a tool before it answers: those of PARA-GRPO, VRAG-RL and Conan.

Pure functions of what was written and what resulted; the latter is known to the environment that has the tool.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from genrl_rewards.scorers.texts.expected import numbers_in

SUBSTANTIVE = 3
"""The words that a thought must have to count as one (our choice: PARA-GRPO does not give a number)."""
MOST = 8
"""The most frames that one request should find (Conan)."""


def tool_format(text: str, *, call: str = "bbox", numbers: int = 4) -> float:
    """PARA-GRPO's R_fmt of all that a model wrote in an episode: `min(1, base + anchor / 2 + early call + balance)`.

    base: .2 for a thought of at least `SUBSTANTIVE` words, .3 and .2 for the opening and the closing tag of an answer
    that is not empty. anchor: .4 for a closed thought, .3 if an answer follows it, -.3 for one that is never closed.
    early call: .3 for a thought before the first call of the tool that can be parsed (`<bbox>` with four numbers).
    balance: .1 if all tags are balanced.
    """
    thought = re.search(r"<think>(.*?)</think>", text, re.DOTALL)
    opened = re.search(r"<think>(.*)", text, re.DOTALL)
    words = (thought or opened)[1].split() if thought or opened else []  # type: ignore[index]
    answer = re.search(r"<answer>\s*(?!</answer>)\S", text)
    base = 0.2 * (len(words) >= SUBSTANTIVE) + 0.3 * bool(answer) + 0.2 * bool(answer and "</answer>" in text)
    anchor = 0.4 * bool(thought) - 0.3 * bool(opened and not thought)
    anchor += 0.3 * bool(re.search(r"</think>\s*<answer>.*?</answer>", text, re.DOTALL) and thought)
    written = re.finditer(rf"<{call}>(.*?)</{call}>", text, re.DOTALL)
    calls = [match for match in written if len(numbers_in(match[1])) == numbers]
    considered = bool(calls and thought and thought.end() <= calls[0].start())
    tags = ("think", "answer", call)
    balanced = bool(text) and all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in tags)
    return min(1.0, base + 0.5 * anchor + 0.3 * considered + 0.1 * balanced)


def tool_success(*, parsed: bool, executed: bool, accurate: bool) -> float:
    """PARA-GRPO's R_tool: .1 for a call that can be parsed, .3 if it was executed, .5 more before a right answer."""
    if not parsed:
        return 0.0
    return (0.3 if executed else 0.1) + 0.5 * accurate


def para_grpo(accuracy: float, form: float, tool: float) -> float:
    """PARA-GRPO's reward: `R_acc + 1.0 R_fmt + R_tool`."""
    return accuracy + form + tool


def vrag_rl(judge: float, rule: float, gain: float) -> float:
    """VRAG-RL's reward: `.7 judge + .1 rule + .2 NDCG` if the rule (the format) is kept, else the rule's score."""
    return 0.7 * judge + 0.1 * rule + 0.2 * gain if rule > 0 else rule


def conan_clue(rounds: Sequence[Mapping[int, float]], relevant: Collection[int]) -> float:
    """Conan's R_clue: the mean over rounds of the intersection over union of predicted and truly relevant frames.

    rounds: for each, the score (1 to 5) of every frame that was shown in it. Predicted are the frames with 4 or more,
    or if there are none, with 3 or more. A round with nothing predicted and nothing relevant counts 1; no rounds: 0.
    """
    overlaps = []
    for scores in rounds:
        predicted = {k for k, score in scores.items() if score >= 4} or {k for k, score in scores.items() if score >= 3}
        true = {k for k in scores if k in relevant}
        overlaps.append(len(predicted & true) / len(predicted | true) if predicted | true else 1.0)
    return sum(overlaps) / len(overlaps) if overlaps else 0.0


def conan_action(requests: Sequence[tuple[Collection[int], Collection[int]]], clue: float) -> float:
    """Conan's R_action: the mean over requests of the recall of relevant unseen frames; `clue` without requests.

    requests: for each, the frames that it returned, and the relevant ones that had not been seen before. At most `MOST`
    of the latter count; if there was none, the request is worth 0 (our choice: the paper does not say).
    """
    recalls = [min(1.0, len({*got} & {*left}) / min(MOST, len(left))) if left else 0.0 for got, left in requests]
    return sum(recalls) / len(recalls) if recalls else clue


def conan(outcome: float, clue: float, action: float, *, formed: bool) -> float:
    """Conan's reward: `outcome + (clue + action if the outcome > 0) + .5` for the format.

    outcome: of `genrl_rewards.scorers.texts.verifiable.exact` or `choice`, or `rouge` for free answers. formed: every
    turn had exactly one of a request and an answer that is not empty.
    """
    return outcome + (clue + action if outcome > 0 else 0.0) + 0.5 * formed
