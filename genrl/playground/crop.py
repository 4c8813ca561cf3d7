"""Questions about a detail that is not to be seen from afar, and tools that show it: parts of one picture, larger, or
of the pages of a collection, which are searched for first (VRAG-RL).

A picture is drawn at 144 pixels; what is shown, at 48, leaves out the mark inside the shape. The model may ask for
parts, `<bbox>[x1,y1,x2,y2]</bbox>` in pixels of what it is shown; they are cut out of the large picture and come back
as the next observation. `<answer>...</answer>` ends the episode, and so does, as a cut, the last turn. What is neither
is told how to do it. (PARA-GRPO's tool.)

In `Crop` a turn may ask for several parts. With `agents` each goes to a sub-agent, which is asked what it shows; the
next observation has their answers, and no picture (ParaVT). In `Search` `<search> words </search>` brings the best page
that was not shown yet, found by the words for what is on it, and the first call of a turn counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from genrl.vlm.environments.contract import Layout, Message, Observation, Question, Split
from genrl_rewards.scorers.objects.shapes import BACKGROUND, COLOURS, PALETTE, SHAPES, outline
from genrl_rewards.scorers.texts import tool_use
from genrl_rewards.scorers.texts.expected import numbers_in
from genrl_rewards.scorers.texts.verifiable import answer_in, exact, ndcg_of

Rule = Literal["accuracy", "para_grpo"]

SHOWN, FACTOR, CELLS = 48, 3, 3
RAW = SHOWN * FACTOR
MARK = 8 / 24  # side of the mark, of that of a cell
LEAST = 8  # pixels of what is shown: the smallest part that is cut out
TOGETHER = 4
"""Parts that are cut out in one turn, at most."""
HELP = "look closer by <bbox>[x1,y1,x2,y2]</bbox> or end by <answer> </answer>"
MISSED = "there is no box and no answer. "
EXAMINE = "what is this ?"
"""What a sub-agent is asked about its part: as in ParaVT nothing of the question that is to be answered."""

Box = tuple[int, int, int, int]


class Thing(NamedTuple):
    """What is in a picture: a shape in a cell (0 to 8, by rows), and the colour of the mark inside it."""

    cell: int
    colour: str
    shape: str
    inside: str

    @property
    def held_out(self) -> bool:
        """Whether pictures with this colour in this cell are for evaluation only: every fourth pair."""
        return (self.cell + COLOURS.index(self.colour)) % 4 == 0

    @property
    def middle(self) -> tuple[float, float]:
        """Middle in the large picture."""
        return RAW / CELLS * (self.cell % CELLS + 0.5), RAW / CELLS * (self.cell // CELLS + 0.5)


class Crop:
    """One episode. rule: what it is worth at its end, `genrl_rewards.scorers.texts.tool_use.para_grpo` or 1 for a right
    answer. agents: whether sub-agents look at the parts."""

    layout: Layout = "conversation"
    help = HELP

    def __init__(self, rule: Rule = "para_grpo", turns: int = 3, begun: str = "<think>", agents: bool = False) -> None:
        if rule not in ("accuracy", "para_grpo"):
            raise ValueError(f"crop: rule is accuracy or para_grpo, not {rule!r}")
        if turns < 1:
            raise ValueError(f"crop: turns must be 1 or more, not {turns}")
        self.rule, self.turns, self.begun, self.agents = rule, turns, begun, agents

    def reset(self, seed: int, split: Split) -> Observation:
        """Draw the picture of this seed, and ask."""
        rng = np.random.default_rng(seed)
        self.thing = random_thing(rng)
        while self.thing.held_out != (split == "eval"):
            self.thing = random_thing(rng)
        self.large, self.answer = draw(self.thing), self.thing.inside
        self.turn, self.said, self.read = 0, "", 0
        self.crops: list[Box] = []
        return shown(self.thing), question(self.thing)

    def step(self, text: str) -> tuple[Message, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. The reward comes with the end."""
        self.turn, self.said = self.turn + 1, self.said + text + "\n"
        answer, asked = answer_in(text), boxes_in(text)
        observation: Message = (MISSED + HELP,)
        if answer is not None:
            observation = ("the end",)
        elif boxes := [box for box in asked if box is not None][:TOGETHER]:
            self.crops += boxes
            observation = tuple(part for box in boxes for part in self._shown(box))
        valid = answer is not None or not isinstance(observation[0], str) or len(observation) > 1
        self.read += len(asked)
        ended, cut = answer is not None, answer is None and self.turn >= self.turns
        right = answer is not None and exact([answer], [self.answer], tag="")[0] == 1.0
        info: dict[str, Any] = {"valid": valid, "success": right}
        if not (ended or cut):
            return observation, 0.0, False, False, info
        reward, info["parts"] = self._worth(right, answered=ended)
        return observation, reward, ended, cut, info

    def render(self) -> NDArray[np.uint8]:
        """The picture, and what was last looked at in a frame."""
        picture = self.large.copy()
        if self.crops:
            ImageDraw.Draw(picture).rectangle(self.crops[-1], outline=(16, 16, 20), width=3)
        return np.asarray(picture)

    def close(self) -> None:
        """Nothing to close."""

    def _shown(self, box: Box) -> Message:
        """Show one part: itself, or the question for its sub-agent."""
        part = cut_out(self.large, box)
        return ("larger : ", Question((part, EXAMINE)), " . ") if self.agents else (part, "larger")

    def _worth(self, right: bool, *, answered: bool) -> tuple[float, dict[str, float]]:
        """The reward and its parts."""
        looked = any(holds(box, self.thing) for box in self.crops)
        parts = {"accuracy": float(right), "looked": float(looked), "crops": float(len(self.crops))}
        if self.rule == "para_grpo":
            form = tool_use.tool_format(self.said)
            tool = tool_use.tool_success(parsed=self.read > 0, executed=bool(self.crops), accurate=right)
            return tool_use.para_grpo(float(right), form, tool), parts | {"format": form, "tool": tool}
        return float(right), parts


def random_thing(rng: np.random.Generator) -> Thing:
    """Any thing; the mark has another colour than the shape."""
    outer, inner = (COLOURS[k] for k in rng.permutation(len(COLOURS))[:2])
    return Thing(int(rng.integers(CELLS**2)), outer, SHAPES[rng.integers(len(SHAPES))], inner)


def question(thing: Thing) -> str:
    """For the colour of the mark."""
    return f"which colour is inside the {thing.colour} {thing.shape} ?"


def draw(thing: Thing, *, marked: bool = True) -> Image.Image:
    """The large picture."""
    canvas = Image.new("RGB", (RAW, RAW), BACKGROUND)
    pen, side, (x, y) = ImageDraw.Draw(canvas), RAW / CELLS, thing.middle
    corners = 0.46 * side * outline(thing.shape) + (x, y)
    pen.polygon([(float(a), float(b)) for a, b in corners], fill=PALETTE[thing.colour])
    if marked:
        half = MARK * side / 2
        pen.rectangle((x - half, y - half, x + half - 1, y + half - 1), fill=PALETTE[thing.inside])
    return canvas


def shown(thing: Thing) -> Image.Image:
    """The picture as it is shown first."""
    return draw(thing, marked=False).reduce(FACTOR)


def holds(box: Box, thing: Thing) -> bool:
    """Whether the middle of the thing is in a part."""
    x, y = thing.middle
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def boxes_in(text: str) -> list[Box | None]:
    """The parts that a text asks for, in pixels of the large picture; None for four numbers that are no part of some
    size. What is not four numbers is no call."""
    calls = [numbers_in(written) for written in re.findall(r"<bbox>(.*?)</bbox>", text, re.DOTALL)]
    return [_box(numbers) for numbers in calls if len(numbers) == 4]


def _box(numbers: list[float]) -> Box | None:
    left, top, right, bottom = (min(max(value, 0.0), float(SHOWN)) for value in numbers)
    if right - left < LEAST or bottom - top < LEAST:
        return None
    return round(left * FACTOR), round(top * FACTOR), round(right * FACTOR), round(bottom * FACTOR)


def cut_out(large: Image.Image, box: Box) -> Image.Image:
    """A part of the large picture at the size of what is shown."""
    return large.resize((SHOWN, SHOWN), Image.Resampling.BOX, box=box)


SEARCH_HELP = (
    "search by <search> </search>, look closer at the last page by <bbox>[x1,y1,x2,y2]</bbox> "
    "or end by <answer> </answer>"
)
ACTION = re.compile(r"<(search|bbox|answer)>(.*?)</\1>", re.DOTALL)


class Index:
    """Texts, found by words: a sum over the query's distinct words of term frequency times log(1 + N / df)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.counts = [Counter(re.findall(r"\w+", text.casefold())) for text in texts]
        self.holding = Counter(word for counts in self.counts for word in counts)

    def ranked(self, query: str) -> list[int]:
        """The texts that hold any of the words, best first, the earlier of equal ones first."""
        words = set(re.findall(r"\w+", query.casefold())) & self.holding.keys()
        weight = {word: math.log1p(len(self.counts) / self.holding[word]) for word in words}
        scores = [sum(counts[word] / counts.total() * weight[word] for word in words) for counts in self.counts]
        return sorted((k for k, score in enumerate(scores) if score), key=lambda k: -scores[k])


class Search:
    """One episode. pages: in the collection; what is asked for is on one of them.

    It is worth VRAG-RL's mixture: the judge is the exact comparison, the rule that there is an answer and that every
    turn could be executed, the gain that of the pages that were fetched.
    """

    layout: Layout = "conversation"
    help = SEARCH_HELP

    def __init__(self, pages: int = 4, turns: int = 4, begun: str = "<think>") -> None:
        if pages < 1 or turns < 1:
            raise ValueError(f"search: pages and turns must be 1 or more, not {pages} and {turns}")
        self.pages, self.turns, self.begun = pages, turns, begun

    def reset(self, seed: int, split: Split) -> Observation:
        """Draw the pages of this seed, and ask."""
        rng = np.random.default_rng(seed)
        while True:
            self.things = [random_thing(rng) for _ in range(self.pages)]
            self.gold = int(rng.integers(self.pages))
            self.thing = self.things[self.gold]
            texts = [f"{thing.colour} {thing.shape}" for thing in self.things]
            if texts.count(texts[self.gold]) == 1 and self.thing.held_out == (split == "eval"):
                break
        self.index, self.answer = Index(texts), self.thing.inside
        self.turn, self.failed, self.looked = 0, False, False
        self.fetched: list[int] = []
        return (question(self.thing),)

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. The reward comes with the end."""
        self.turn += 1
        match = ACTION.search(text)
        action, written = (match[1], match[2]) if match else ("", "")
        ended = action == "answer"
        observation: Observation = ("the end",)
        if action == "search":
            observation = self._page(written)
        elif action == "bbox":
            observation = self._part(f"<bbox>{written}</bbox>")
        elif not ended:
            observation = (f"there is no action. {SEARCH_HELP}",)
        valid = ended or isinstance(observation[0], Image.Image)
        self.failed = self.failed or not valid
        cut = self.turn >= self.turns and not ended
        right = ended and exact([written], [self.answer], tag="")[0] == 1.0
        info: dict[str, Any] = {"valid": valid, "success": right}
        if not (ended or cut):
            return observation, 0.0, False, False, info
        rule = float(ended and not self.failed)
        gain = ndcg_of([str(page) for page in self.fetched], [str(self.gold)])
        looked = float(self.looked)
        info["parts"] = {"accuracy": float(right), "format": rule, "ndcg": gain, "looked": looked}
        return observation, tool_use.vrag_rl(float(right), rule, gain), ended, cut, info

    def render(self) -> NDArray[np.uint8]:
        """The last page that was fetched, white before."""
        blank = np.full((RAW, RAW, 3), 255, np.uint8)
        return np.asarray(draw(self.things[self.fetched[-1]])) if self.fetched else blank

    def close(self) -> None:
        """Nothing to close."""

    def _page(self, query: str) -> Observation:
        new = [page for page in self.index.ranked(query) if page not in self.fetched]
        if not new:
            return (f"there is no other page for it. {SEARCH_HELP}",)
        self.fetched.append(new[0])
        return shown(self.things[new[0]]), "page"

    def _part(self, text: str) -> Observation:
        if not self.fetched:
            return (f"there is no page to look at. {SEARCH_HELP}",)
        box = next(iter(boxes_in(text)), None)
        if box is None:
            return (f"there is no box in it. {SEARCH_HELP}",)
        page = self.things[self.fetched[-1]]
        self.looked = self.looked or (self.fetched[-1] == self.gold and holds(box, page))
        return cut_out(draw(page), box), "larger"
