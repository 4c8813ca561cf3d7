"""A question about a detail on one of several drawn pages: search for the page, look at a part of it, answer (VRAG-RL).

A page is a picture as `crop` draws it, found by the words for what is on it. `<search> words </search>` brings the
best page that was not shown yet, at 48 pixels; `<bbox>[x1,y1,x2,y2]</bbox>` a part of the last page, its corners in
pixels of what is shown and cut out of the page's own 144; `<answer>...</answer>` ends, and so does, as a cut, the last
turn. The first of them in a turn counts; a turn with none that can be executed is told why and how.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl.vlm.environments.crop import RAW, boxes_in, cut_out, draw, drawn_by, holds, question, shown
from genrl_rewards.scorers.texts import tool_use
from genrl_rewards.scorers.texts.verifiable import exact, ndcg_of

HELP = (
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
    help = HELP

    def __init__(self, pages: int = 4, turns: int = 4, begun: str = "<think>") -> None:
        if pages < 1 or turns < 1:
            raise ValueError(f"search: pages and turns must be 1 or more, not {pages} and {turns}")
        self.pages, self.turns, self.begun = pages, turns, begun

    def reset(self, seed: int, split: Split) -> Observation:
        """Draw the pages of this seed, and ask."""
        rng = np.random.default_rng(seed)
        while True:
            self.things = [drawn_by(rng) for _ in range(self.pages)]
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
        found = ACTION.search(text)
        action, written = (found[1], found[2]) if found else ("", "")
        ended = action == "answer"
        seen: Observation = ("the end",)
        if action == "search":
            seen = self._page(written)
        elif action == "bbox":
            seen = self._part(f"<bbox>{written}</bbox>")
        elif not ended:
            seen = (f"there is no action. {HELP}",)
        valid = ended or isinstance(seen[0], Image.Image)
        self.failed = self.failed or not valid
        cut = self.turn >= self.turns and not ended
        right = ended and exact([written], [self.answer], tag="")[0] == 1.0
        info: dict[str, Any] = {"valid": valid, "success": right}
        if not (ended or cut):
            return seen, 0.0, False, False, info
        rule = float(ended and not self.failed)
        gain = ndcg_of([str(page) for page in self.fetched], [str(self.gold)])
        looked = float(self.looked)
        info["parts"] = {"accuracy": float(right), "format": rule, "ndcg": gain, "looked": looked}
        return seen, tool_use.vrag_rl(float(right), rule, gain), ended, cut, info

    def render(self) -> NDArray[np.uint8]:
        """The last page that was fetched, white before."""
        blank = np.full((RAW, RAW, 3), 255, np.uint8)
        return np.asarray(draw(self.things[self.fetched[-1]])) if self.fetched else blank

    def close(self) -> None:
        """Nothing to close."""

    def _page(self, query: str) -> Observation:
        new = [page for page in self.index.ranked(query) if page not in self.fetched]
        if not new:
            return (f"there is no other page for it. {HELP}",)
        self.fetched.append(new[0])
        return shown(self.things[new[0]]), "page"

    def _part(self, text: str) -> Observation:
        if not self.fetched:
            return (f"there is no page to look at. {HELP}",)
        box = next(iter(boxes_in(text)), None)
        if box is None:
            return (f"there is no box in it. {HELP}",)
        page = self.things[self.fetched[-1]]
        self.looked = self.looked or (self.fetched[-1] == self.gold and holds(box, page))
        return cut_out(draw(page), box), "larger"
