"""Card games: the same for the same seed, played well they pay, what is not allowed changes nothing."""

from __future__ import annotations

import ast
from typing import Any, get_args

import numpy as np
import pytest

from genrl.playground import cards
from genrl.playground.cards import GAMES, Cards, Game
from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.opening import open_environment


def opened(game: str, seed: int = 0, **options: Any) -> Cards:
    one = open_environment(Environment(name=f"cards-{game}", options=options))
    assert isinstance(one, Cards)
    one.reset(seed, "train")
    return one


def say(word: str) -> str:
    return f'{{"thoughts": "so", "action": "{word}"}}'


def test_the_target_is_reached_by_the_shortest_way() -> None:
    for seed in range(20):
        one = opened("numberline", seed)
        assert one.current != one.target
        word, far = ("+", one.target - one.current) if one.target > one.current else ("-", one.current - one.target)
        paid = [one.step(say(word))[1:4] for _ in range(far)]
        assert paid == [(0.0, False, False)] * (far - 1) + [(1.0, True, False)]


@pytest.mark.parametrize("game", ["ezpoints", "points24"])
def test_a_formula_of_all_cards_that_is_the_target_pays(game: str) -> None:
    number, target, operators = cards.TARGETS[game]
    for seed in range(8):
        one = opened(game, seed)
        values = [cards.value(rank) for rank in one.hand]
        formula = cards.solution(values, target, operators)
        assert formula is not None and len(values) == number
        numbers = [node.value for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Constant)]
        assert sorted(numbers) == sorted(values) and cards.worth(formula) == target
        words = formula.replace("10", "x")
        for word in words:
            _, reward, ended, _, info = one.step(say(word.replace("x", "10")))
            assert (reward, ended, info["valid"]) == (0.0, False, True)
        assert one.step(say("="))[1:3] == (10.0, True)
    one = opened(game)
    assert one.step(say("="))[1:3] == (-1.0, True)  # a formula without the cards


def test_blackjack_pays_who_is_nearer_to_21() -> None:
    for mine, theirs, paid in (
        (["K", "9"], ["K", "8"], 1.0),
        (["K", "7"], ["K", "8"], -1.0),
        (["A", "7"], ["9", "9"], 0.0),  # the ace counts 11
    ):
        one = opened("blackjack")
        one.hand, one.dealer = list(mine), list(theirs)
        assert one.step(say("stand"))[1:3] == (paid, True)
    one = opened("blackjack")
    one.hand = ["K", "Q", "2"]
    while (told := one.step(say("hit")))[1:3] == (0.0, False):
        assert cards.points(one.hand) <= 21
    assert told[1:3] == (-1.0, True) and cards.points(one.hand) > 21
    assert cards.points(["A", "A", "9"]) == 21 and cards.points(["A", "K", "Q"]) == 21
    one = opened("blackjack")
    one.dealer = ["2", "3"]
    one.step(say("stand"))
    assert cards.points(one.dealer) >= 17


@pytest.mark.parametrize(
    ("game", "before", "word"),
    [
        ("numberline", [], "up"),
        ("points24", [], "11"),
        ("points24", ["first"], "first"),  # a number after a number, or one that is used up
        ("blackjack", [], "double"),
    ],
)
def test_what_is_not_allowed_changes_nothing(game: str, before: list[str], word: str) -> None:
    one = opened(game)
    own = {"first": str(cards.value(one.hand[0]))} if one.hand else {}
    for earlier in before:
        assert one.step(own[earlier])[4]["valid"]
    seen = one.render()
    (picture, _), reward, ended, cut, info = one.step(own.get(word, word))
    assert (reward, ended, cut, info["valid"], info["success"]) == (-1.0, False, False, False, False)
    assert (np.asarray(picture) == seen).all()


def test_the_end_of_the_line_and_the_limit() -> None:
    one = opened("numberline", limit=3)
    one.current, one.target = 0, 5
    assert [one.step(say("-"))[1:4] for _ in range(3)] == [(-1.0, False, False)] * 2 + [(-1.0, False, True)]
    assert one.current == 0


@pytest.mark.parametrize("formula", ["", "1+", "(1", "2**3", "1//1", "-1", "1/0", "1.5", "a", "1 1", "True"])
def test_what_is_no_formula_is_worth_nothing(formula: str) -> None:
    assert cards.worth(formula) is None


def test_refused() -> None:
    assert get_args(Game) == GAMES
    for options, text in (({"game": "poker"}, "one of numberline"), ({"game": "blackjack", "limit": 0}, "1 or more")):
        with pytest.raises(ValueError, match=text):
            Cards(**options)  # type: ignore[arg-type]
