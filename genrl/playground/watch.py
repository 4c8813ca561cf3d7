"""A question about a clip of which a few frames are shown, and a tool that shows further ones (Conan, PARA-GRPO).

"which shape appears ?": in one to three frames that follow each other there is a shape, the others are empty. So
many evenly spaced frames are shown as the episode's budget has it; `<clip>[a,b]</clip>` shows the frames a to b,
counted from 1, several calls in one turn as well, four frames a turn at most. `<answer>...</answer>` ends, and so does,
as a cut, the last turn. What is neither is told how to do it. For Conan every turn begins with a score of 1 to 5 for
each of the frames that it was shown last.

With `agents` the clips of a turn go to a sub-agent each, which is asked the same question about its frames; the next
observation has their answers, and no picture (ParaVT).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from genrl.playground.shapes import SIZE, Scene, Thing, draw
from genrl.vlm.environments.contract import Layout, Message, Observation, Question, Split
from genrl_rewards.scorers.objects.shapes import COLOURS, SHAPES
from genrl_rewards.scorers.texts import tool_use
from genrl_rewards.scorers.texts.expected import numbers_in
from genrl_rewards.scorers.texts.verifiable import answer_in, exact

Rule = Literal["accuracy", "para_grpo", "conan"]

PICTURE = 48  # pixels a side
FRAMES, LONGEST = 8, 3  # of the clip; of the part with the shape
TOGETHER = 4
"""Frames that are shown in one turn, at most; with sub-agents: clips in a turn, and frames of a clip."""
ASKED = "which shape appears ?"
HELP = "look at frames by <clip>[a,b]</clip> or end by <answer> </answer>"
SCORES = "begin by <score> </score> of 1 to 5 for each frame. "


def held_out(colour: str, first: int) -> bool:
    """Whether clips with a shape of this colour from this frame on are for evaluation only: every fourth pair."""
    return (COLOURS.index(colour) + first) % 4 == 0


def frame(thing: Thing | None) -> Image.Image:
    """Draw a frame with this thing, or empty."""
    return Image.fromarray(draw(Scene("single", () if thing is None else (thing,)), PICTURE))


class Watch:
    """One episode. rule: what it is worth at its end, PARA-GRPO's or Conan's, or 1 for a right answer.

    budgets: numbers of frames of which one is drawn for each seed, so it is one for a group (PARA-GRPO: K of
    {4, 8, 16, 32, 64}). agents: whether sub-agents look at the clips that are asked for; not for Conan, whose model
    scores the frames that it sees itself.
    """

    layout: Layout = "conversation"

    def __init__(
        self,
        rule: Rule = "conan",
        budgets: Sequence[int] = (4,),
        turns: int = 3,
        begun: str = "<think>",
        agents: bool = False,
    ) -> None:
        if rule not in ("accuracy", "para_grpo", "conan"):
            raise ValueError(f"watch: rule is accuracy, para_grpo or conan, not {rule!r}")
        if not budgets or not all(1 <= number <= FRAMES for number in budgets):
            raise ValueError(f"watch: budgets are numbers of frames from 1 to {FRAMES}, not {list(budgets)}")
        if turns < 1:
            raise ValueError(f"watch: turns must be 1 or more, not {turns}")
        if agents and rule == "conan":
            raise ValueError("watch: agents goes with para_grpo or accuracy; for conan the model scores what it sees")
        self.agents = agents
        self.rule, self.budgets, self.turns, self.begun = rule, tuple(budgets), turns, begun
        self.help = SCORES * (rule == "conan") + HELP

    def reset(self, seed: int, split: Split) -> Observation:
        """Draw the clip of this seed, and ask."""
        rng = np.random.default_rng(seed)
        while True:
            colour = COLOURS[rng.integers(len(COLOURS))]
            first, length = int(rng.integers(FRAMES)), int(rng.integers(LONGEST)) + 1
            if first + length <= FRAMES and held_out(colour, first) == (split == "eval"):
                break
        self.relevant = frozenset(range(first, first + length))
        self.answer = SHAPES[rng.integers(len(SHAPES))]
        self.frames = []
        for k in range(FRAMES):
            x, y = rng.uniform(0.4, 0.6, 2) * SIZE
            thing = Thing(colour, self.answer, float(x), float(y), float(rng.uniform(16, 19)))
            self.frames.append(frame(thing if k in self.relevant else None))
        budget = int(rng.choice(self.budgets))
        self.shown = [int((k + 0.5) * FRAMES / budget) for k in range(budget)]
        self.seen, self.turn, self.said, self.read = set(self.shown), 0, "", 0
        self.scored: list[dict[int, float]] = []
        self.asked: list[tuple[frozenset[int], frozenset[int]]] = []
        self.formed = True
        return (*self._pictures(), ASKED)

    def step(self, text: str) -> tuple[Message, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. The reward comes with the end."""
        self.turn, self.said = self.turn + 1, self.said + text + "\n"
        if self.shown:
            scores = numbers_in(answer_in(text, "score") or "")
            self.scored.append(
                dict(zip(self.shown, scores, strict=False)) | {k: 0.0 for k in self.shown[len(scores) :]}
            )
        answer = answer_in(text)
        calls = [call for call in map(numbers_in, re.findall(r"<clip>(.*?)</clip>", text, re.DOTALL)) if len(call) == 2]
        self.formed = self.formed and bool(answer) != bool(calls)
        clips = [list(range(max(0, round(a) - 1), min(FRAMES, round(b)))) for a, b in calls]
        if self.agents:
            clips = [clip[:TOGETHER] for clip in clips if clip][:TOGETHER]
        frames = list(dict.fromkeys(k for clip in clips for k in clip))
        self.read += len(calls)
        self.shown = [] if answer is not None else sorted(frames if self.agents else frames[:TOGETHER])
        observation: Message = ("the end",) if answer is not None else (f"there is no clip and no answer. {self.help}",)
        if self.shown:
            self.asked.append((frozenset(self.shown), self.relevant - self.seen))
            self.seen |= set(self.shown)
            observation = (
                tuple(part for clip in clips for part in self._asked(clip)) if self.agents else self._pictures()
            )
        ended, valid = answer is not None, answer is not None or bool(self.shown)
        cut = self.turn >= self.turns and not ended
        right = ended and exact([answer or ""], [self.answer], tag="")[0] == 1.0
        info: dict[str, Any] = {"valid": valid, "success": right}
        if not (ended or cut):
            return observation, 0.0, False, False, info
        reward, info["parts"] = self._worth(right)
        return observation, reward, ended, cut, info

    def render(self) -> NDArray[np.uint8]:
        """The frames side by side, those never shown pale."""
        pale = [
            np.asarray(frame) if k in self.seen else np.asarray(frame) // 4 + 190 for k, frame in enumerate(self.frames)
        ]
        return np.concatenate(pale, axis=1).astype(np.uint8)

    def close(self) -> None:
        """Nothing to close."""

    def _pictures(self) -> Observation:
        """What is shown, and which frames it is."""
        return (*(self.frames[k] for k in self.shown), f"frames {' '.join(str(k + 1) for k in self.shown)} . ")

    def _asked(self, clip: Sequence[int]) -> Message:
        """What the sub-agent of a clip is to answer, and which frames these are."""
        frames = f"frames {' '.join(str(k + 1) for k in clip)} : "
        return frames, Question((*(self.frames[k] for k in clip), ASKED)), " . "

    def _worth(self, right: bool) -> tuple[float, dict[str, float]]:
        """The reward and its parts."""
        looked = float(bool(self.relevant & self.seen))
        parts = {"accuracy": float(right), "looked": looked, "requests": float(len(self.asked))}
        if self.rule == "para_grpo":
            form = tool_use.tool_format(self.said, call="clip", numbers=2)
            tool = tool_use.tool_success(parsed=self.read > 0, executed=bool(self.asked), accurate=right)
            return tool_use.para_grpo(float(right), form, tool), parts | {"format": form, "tool": tool}
        if self.rule == "conan":
            clue = tool_use.conan_clue(self.scored, self.relevant)
            action = tool_use.conan_action(self.asked, clue)
            reward = tool_use.conan(float(right), clue, action, formed=self.formed)
            return reward, parts | {"format": float(self.formed), "clue": clue, "action": action}
        return float(right), parts
