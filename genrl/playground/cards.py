"""Gym-Cards by name, drawn here: number line, EZPoints, Points24 and blackjack (RL4VLM's; no code of theirs).

One turn is one step. `{"action": "..."}` says what to do, the word alone too; what is none of the words, or not allowed
now, changes nothing and is paid -1. Rewards: number line 1 at the target; formulas 10 for one of all cards that is
worth the target, else -1 at its end; blackjack 1, 0 or -1. J, Q and K count 10.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl.vlm.environments.discrete import named

Game = Literal["numberline", "ezpoints", "points24", "blackjack"]

RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
SUITS = ((20, 20, 24), (200, 30, 40))  # of black and of red ink
LAST = 5  # the largest number on the line
HEIGHT, WIDTH, CARD = 96, 240, (44, 64)  # pixels
PAPER, TABLE, INK = (250, 250, 246), (38, 110, 74), (20, 20, 24)
# On fractions: 8 / (3 - 8 / 3) is 24, but not in floats.
OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
TARGETS = {"ezpoints": (2, 12, "+*"), "points24": (4, 24, "+-*/")}
"""By game: cards, what the formula is to be worth, and its operators."""

NUMBERS = tuple(str(number) for number in range(1, 11))
WORDS: dict[Game, tuple[str, ...]] = {
    "numberline": ("+", "-"),
    "ezpoints": (*NUMBERS, "+", "*", "="),
    "points24": (*NUMBERS, "+", "-", "*", "/", "(", ")", "="),
    "blackjack": ("stand", "hit"),
}
"""The actions."""
GAMES = tuple(WORDS)
ASKED = {game: f"use every card once in a formula that is {target}" for game, (_, target, _) in TARGETS.items()} | {
    "numberline": "move the current number to the target",
    "blackjack": "come nearer to 21 than the dealer, and not above",
}


class Cards:
    """One episode of a game. limit: steps after which it is cut. The formulas are dealt so that there is one."""

    layout: Layout = "steps"
    begun = ""

    def __init__(self, game: Game, limit: int = 20) -> None:
        if game not in GAMES:
            raise ValueError(f"cards: game is one of {', '.join(GAMES)}, not {game!r}")
        if limit < 1:
            raise ValueError(f"cards: limit must be 1 or more, not {limit}")
        self.game, self.limit, self.words = game, limit, WORDS[game]
        self.help = f'actions: {", ".join(self.words)}. answer {{"thoughts": "...", "action": "..."}}'

    def reset(self, seed: int, split: Split) -> Observation:
        """Deal. The two splits are dealt from different streams of one seed."""
        self.rng = np.random.default_rng([seed, split == "eval"])
        self.elapsed, self.formula = 0, list[str]()
        self.hand: list[str] = []
        if self.game == "numberline":
            self.target, self.current = (int(k) for k in self.rng.choice(LAST + 1, 2, replace=False))
        elif self.game == "blackjack":
            self.hand, self.dealer = [self._card(), self._card()], [self._card(), self._card()]
        else:
            number, target, operators = TARGETS[self.game]
            while not self.hand or solution([value(rank) for rank in self.hand], target, operators) is None:
                self.hand = [self._card() for _ in range(number)]
        self.suits = [SUITS[k] for k in self.rng.integers(2, size=24)]
        return self._shown()

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`."""
        self.elapsed += 1
        place = named(text, self.words, "json" if "{" in text else "plain")
        word = None if place is None else self.words[place]
        play = {"numberline": self._move, "blackjack": self._draw}.get(self.game, self._write)
        paid, ended, allowed = (-1.0, False, False) if word is None else play(word)
        cut = self.elapsed >= self.limit and not ended
        return self._shown(), paid, ended, cut, {"valid": allowed, "success": ended and paid > 0}

    def render(self) -> NDArray[np.uint8]:
        """The table, [96, 240, 3]."""
        canvas = Image.new("RGB", (WIDTH, HEIGHT), TABLE)
        pen = ImageDraw.Draw(canvas)
        if self.game == "numberline":
            _label(pen, (10, 18), f"target {self.target}")
            _label(pen, (10, 54), f"current {self.current}")
        else:
            apart = min(CARD[0] + 4, 176 // len(self.hand))  # many cards lie over each other
            for k, rank in enumerate(self.hand):
                _picture(pen, 6 + k * apart, rank, self.suits[k])
            if self.game == "blackjack":
                _picture(pen, WIDTH - CARD[0] - 6, self.dealer[0], self.suits[-1])
            _label(pen, (6, 68), "".join(self.formula))
        return np.asarray(canvas)

    def close(self) -> None:
        """Nothing to close."""

    def _shown(self) -> Observation:
        return Image.fromarray(self.render()), ASKED[self.game]

    def _card(self) -> str:
        return RANKS[self.rng.integers(len(RANKS))]

    def _move(self, word: str) -> tuple[float, bool, bool]:
        target = self.current + (1 if word == "+" else -1)
        if inside := 0 <= target <= LAST:
            self.current = target
        return (float(target == self.target) if inside else -1.0), target == self.target, inside

    def _draw(self, word: str) -> tuple[float, bool, bool]:
        if word == "hit":
            self.hand.append(self._card())
            bust = points(self.hand) > 21
            return -float(bust), bust, True
        while points(self.dealer) < 17:
            self.dealer.append(self._card())
        hand_points, other = points(self.hand), points(self.dealer)
        return float(other > 21 or hand_points > other) or -float(hand_points < other), True, True

    def _write(self, word: str) -> tuple[float, bool, bool]:
        number, target, _ = TARGETS[self.game]
        numbers = [part for part in self.formula if part.isdigit()]
        if word == "=":
            right = len(numbers) == number and worth("".join(self.formula)) == target
            return (10.0 if right else -1.0), True, True
        left = sorted(map(value, self.hand))
        for part in numbers:
            left.remove(int(part))
        if word.isdigit() and (int(word) not in left or (self.formula and self.formula[-1].isdigit())):
            return -1.0, False, False
        self.formula.append(word)
        return 0.0, False, True


def value(rank: str) -> int:
    """Number that a card is in a formula."""
    return min(RANKS.index(rank) + 1, 10)


def points(hand: list[str]) -> int:
    """Points of a hand in blackjack: one ace counts 11 where that is not above 21."""
    total = sum(map(value, hand))
    return total + 10 if "A" in hand and total + 10 <= 21 else total


def worth(formula: str) -> Fraction | None:
    """Value of a formula of whole numbers, + - * / and brackets; None where it is none."""

    def of(node: ast.AST) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATORS[SIGNS[type(node.op)]](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        raise SyntaxError

    try:
        return of(ast.parse(formula, mode="eval").body)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def solution(numbers: Sequence[int], target: int, operators: str) -> str | None:
    """A formula of all of the numbers that is worth the target; None where there is none."""

    def solve(parts: list[tuple[Fraction, str]]) -> str | None:
        if len(parts) == 1:
            return parts[0][1] if parts[0][0] == target else None
        for i, k in permutations(range(len(parts)), 2):
            (left_value, left), (other, right) = parts[i], parts[k]
            remaining = [part for place, part in enumerate(parts) if place not in (i, k)]
            for sign in operators:
                if sign != "/" or other:
                    solved = solve([*remaining, (OPERATORS[sign](left_value, other), f"({left}{sign}{right})")])
                    if solved is not None:
                        return solved
        return None

    solved = solve([(Fraction(number), str(number)) for number in numbers])
    return None if solved is None else solved[1:-1]


def _picture(pen: ImageDraw.ImageDraw, left: int, rank: str, ink: tuple[int, int, int]) -> None:
    pen.rounded_rectangle((left, 4, left + CARD[0], 4 + CARD[1]), 5, fill=PAPER, outline=INK)
    _label(pen, (left + 6, 20), rank, ink)


def _label(pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, ink: tuple[int, int, int] = PAPER) -> None:
    pen.text(at, text, fill=ink, font=ImageFont.load_default(24))
