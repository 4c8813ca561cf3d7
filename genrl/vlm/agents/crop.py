"""A question about a detail that is too small to see, and a tool that shows a part of the picture larger.

The picture is drawn at 192 pixels and shown at 48, where the patterns of the shapes are one even colour: period and
reduction are both 4 pixels. The model may ask for a part, `<bbox>[x1,y1,x2,y2]</bbox>` in pixels of what it is shown;
it is cut out of the large picture and comes back as the next observation. `<answer>...</answer>` ends the episode, and
so does, as a cut, the last turn. What is neither is told how to do it. (VRAG-RL's and PARA-GRPO's tool.)
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from genrl.vlm.agents.contract import Layout, Observation, Split
from rewards import tool_use
from rewards.shapes import BACKGROUND, COLOURS, PALETTE, SHAPES, outline
from rewards.verifiable import answer_in, exact, numbers_in

Rule = Literal["accuracy", "para_grpo", "vrag_rl"]

SHOWN, FACTOR, CELLS = 48, 4, 3
RAW = SHOWN * FACTOR
PERIOD = 4  # pixels of the large picture, half of them dark
PATTERNS = ("rows", "columns", "slants", "checks")
LEAST = 8  # pixels of what is shown: the smallest part that is cut out
HELP = "look closer by <bbox>[x1,y1,x2,y2]</bbox> or end by <answer> </answer>"
MISSED = "there is no box and no answer. "

Kind = tuple[str, str]


def held_out(cells: tuple[int, ...]) -> bool:
    """Whether pictures with shapes in these cells (0 to 8, by rows) are for evaluation only: every fourth set."""
    return (sum(cells) + len(cells)) % 4 == 0


class Crop:
    """One episode. rule: what it is worth at its end, a function of `rewards.tool_use`, or 1 for a right answer.

    Its three to five shapes have different colours or shapes, so that a question names one of them. VRAG-RL's judge is
    the exact comparison here, its rule asks for an answer and for turns that could all be executed, and its retrieved
    pages are the parts that were looked at, relevant where they hold the middle of the shape.
    """

    layout: Layout = "conversation"
    help = HELP

    def __init__(self, rule: Rule = "para_grpo", turns: int = 4, begun: str = "<think>") -> None:
        if rule not in ("accuracy", "para_grpo", "vrag_rl"):
            raise ValueError(f"crop: rule is accuracy, para_grpo or vrag_rl, not {rule!r}")
        if turns < 1:
            raise ValueError(f"crop: turns must be 1 or more, not {turns}")
        self.rule, self.turns, self.begun = rule, turns, begun

    def reset(self, seed: int, split: Split) -> Observation:
        """Draw the picture of this seed, and ask."""
        rng = np.random.default_rng(seed)
        number = int(rng.integers(3, 6))
        sets = [s for s in combinations(range(CELLS**2), number) if held_out(s) == (split == "eval")]
        cells = sets[rng.integers(len(sets))]
        kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
        chosen = [kinds[k] for k in rng.permutation(len(kinds))[:number]]
        self.things = {cell: (kind, PATTERNS[rng.integers(4)]) for cell, kind in zip(cells, chosen, strict=True)}
        self.cell = int(cells[rng.integers(number)])
        self.large = draw(self.things)
        self.turn, self.said, self.read, self.failed = 0, "", 0, 0
        self.crops: list[tuple[int, int, int, int]] = []
        (colour, shape), self.answer = self.things[self.cell]
        return self.large.reduce(FACTOR), f"which pattern has the {colour} {shape} ?"

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. The reward comes with the end."""
        self.turn, self.said = self.turn + 1, self.said + text + "\n"
        given, asked = answer_in(text), re.search(r"<bbox>(.*?)</bbox>", text, re.DOTALL)
        seen: Observation
        if given is not None:
            seen = ("the end",)
        elif asked is None:
            seen = (MISSED + HELP,)
        else:
            self.read += 1
            box = self._box(asked[1])
            seen = (MISSED + HELP,) if box is None else (self._cut(box), "larger")
        ended, valid = given is not None, given is not None or isinstance(seen[0], Image.Image)
        self.failed += not valid
        cut = self.turn >= self.turns and not ended
        right = given is not None and exact([given], [self.answer], tag="")[0] == 1.0
        info: dict[str, Any] = {"valid": valid, "success": right}
        if not (ended or cut):
            return seen, 0.0, False, False, info
        reward, info["parts"] = self._worth(right, answered=ended)
        return seen, reward, ended, cut, info

    def render(self) -> NDArray[np.uint8]:
        """The picture, and what was last looked at in a frame."""
        shown = self.large.copy()
        if self.crops:
            ImageDraw.Draw(shown).rectangle(self.crops[-1], outline=(16, 16, 20), width=3)
        return np.asarray(shown)

    def close(self) -> None:
        """Nothing to close."""

    @property
    def middle(self) -> tuple[float, float]:
        """Of the shape that is asked about, in the large picture."""
        step = RAW / CELLS
        return step * (self.cell % CELLS + 0.5), step * (self.cell // CELLS + 0.5)

    def _box(self, written: str) -> tuple[int, int, int, int] | None:
        """Corners in the large picture; None for what is no part of the picture of some size."""
        found = numbers_in(written)
        if len(found) != 4:
            return None
        left, top, right, bottom = (min(max(value, 0.0), float(SHOWN)) for value in found)
        if right - left < LEAST or bottom - top < LEAST:
            return None
        return (round(left * FACTOR), round(top * FACTOR), round(right * FACTOR), round(bottom * FACTOR))

    def _cut(self, box: tuple[int, int, int, int]) -> Image.Image:
        self.crops.append(box)
        return self.large.resize((SHOWN, SHOWN), Image.Resampling.BOX, box=box)

    def _worth(self, right: bool, *, answered: bool) -> tuple[float, dict[str, float]]:
        """The reward and its parts."""
        x, y = self.middle
        hits = [float(x1 <= x <= x2 and y1 <= y <= y2) for x1, y1, x2, y2 in self.crops]
        parts = {"accuracy": float(right), "looked": float(any(hits)), "crops": float(len(hits))}
        if self.rule == "para_grpo":
            form = tool_use.tool_format(self.said)
            tool = tool_use.tool_success(parsed=self.read > 0, executed=bool(hits), accurate=right)
            return tool_use.para_grpo(float(right), form, tool), parts | {"format": form, "tool": tool}
        if self.rule == "vrag_rl":
            rule, gain = float(answered and not self.failed), tool_use.ndcg(hits, 1)
            return tool_use.vrag_rl(float(right), rule, gain), parts | {"format": rule, "ndcg": gain}
        return float(right), parts


def draw(things: dict[int, tuple[Kind, str]]) -> Image.Image:
    """The large picture: by cell, a kind of shape and its pattern."""
    canvas = np.tile(np.array(BACKGROUND, dtype=np.uint8), (RAW, RAW, 1))
    y, x = np.mgrid[:RAW, :RAW]
    half = PERIOD // 2
    dark = {
        "rows": y // half % 2,
        "columns": x // half % 2,
        "slants": (x + y) // half % 2,
        "checks": (x // half + y // half) % 2,
    }
    step = RAW / CELLS
    for cell, ((colour, shape), pattern) in things.items():
        mask = Image.new("1", (RAW, RAW))
        middle = (step * (cell % CELLS + 0.5), step * (cell // CELLS + 0.5))
        corners = 0.42 * step * outline(shape) + middle
        ImageDraw.Draw(mask).polygon([(float(a), float(b)) for a, b in corners], fill=1)
        inside = np.asarray(mask)
        tone = np.array(PALETTE[colour])
        canvas[inside & (dark[pattern] == 0)] = tone
        canvas[inside & (dark[pattern] == 1)] = tone // 3
    return Image.fromarray(canvas)
