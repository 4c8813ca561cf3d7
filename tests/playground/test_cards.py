"""Card games: the same for the same seed, played well they pay, what is not allowed changes nothing."""

import ast
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from genrl.playground import cards
from genrl.playground.cards import GAMES, Cards, Game
from genrl.playground.grid import Grid
from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.environments.hosts import open_environment


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
    while (outcome := one.step(say("hit")))[1:3] == (0.0, False):
        assert cards.points(one.hand) <= 21
    assert outcome[1:3] == (-1.0, True) and cards.points(one.hand) > 21
    assert cards.points(["A", "A", "9"]) == 21 and cards.points(["A", "K", "Q"]) == 21
    one = opened("blackjack")
    one.dealer = ["2", "3"]
    one.step(say("stand"))
    assert cards.points(one.dealer) >= 17


def test_what_is_not_allowed_changes_nothing() -> None:
    after = opened("points24")
    first = str(cards.value(after.hand[0]))
    assert after.step(first)[4]["valid"]  # now a number would follow a number, and this one is used up
    wrong = {"up": opened("numberline"), "11": opened("points24"), first: after, "double": opened("blackjack")}
    for word, one in wrong.items():
        seen = one.render()
        (picture, _), reward, ended, cut, info = one.step(word)
        assert (reward, ended, cut, info["valid"], info["success"]) == (-1.0, False, False, False, False)
        assert (np.asarray(picture) == seen).all()


def test_the_end_of_the_line_and_the_limit_and_what_is_refused() -> None:
    one = opened("numberline", limit=3)
    one.current, one.target = 0, 5
    assert [one.step(say("-"))[1:4] for _ in range(3)] == [(-1.0, False, False)] * 2 + [(-1.0, False, True)]
    assert one.current == 0 and get_args(Game) == GAMES
    for formula in ("", "1+", "(1", "2**3", "1//1", "-1", "1/0", "1.5", "a", "1 1", "True"):
        assert cards.worth(formula) is None
    for options, text in (({"game": "poker"}, "one of numberline"), ({"game": "blackjack", "limit": 0}, "1 or more")):
        with pytest.raises(ValueError, match=text):
            Cards(**options)  # type: ignore[arg-type]


# -- An expert's walks as an environment: what is paid, what stands in the history, when an episode ends
CLICK = {"action": "click", "box": [10, 20, 30, 60]}
ACTIONS: list[Any] = [CLICK, {"action": "type", "text": "7:30"}, "back", {"action": "wait"}]


def opened_of_trajectories(**options: Any) -> Any:
    return open_environment(Environment(name="trajectories", options=options))


@pytest.fixture
def file(tmp_path: Path) -> str:
    steps = []
    for k, action in enumerate(ACTIONS):
        Image.new("RGB", (40, 80), (k * 20, 0, 0)).save(tmp_path / f"{k}.png")
        steps.append({"image": f"{k}.png", "action": action, "thought": f"thought {k}"})
    (tmp_path / "walks.jsonl").write_text(json.dumps({"instruction": "set the alarm", "steps": steps}) + "\n")
    return str(tmp_path / "walks.jsonl")


def texts(seen: Any) -> str:
    return " ".join(part for part in seen if isinstance(part, str))


def test_an_action_is_paid_by_form_kind_and_place(file: str) -> None:
    for text, paid, valid in [
        ('{"action": "click", "coordinate": [30, 20]}', 1.0, True),
        ('so {"thoughts": "x", "action": "Click", "coordinate": [31, 20]}', 0.5, True),
        ('{"action": "click"}', 0.5, True),
        ('{"action": "type", "text": "7:30"}', 0.1, True),
        ("click it", 0.0, False),
    ]:
        one = opened_of_trajectories(train=file)
        one.reset(0, "train")
        _, reward, _, _, info = one.step(text)
        assert reward == pytest.approx(paid) and info["valid"] == valid and info["matched"] == (paid == 1.0)


def test_the_history_is_the_policys_own_and_patched_where_it_was_wrong(file: str) -> None:
    own = '{"thoughts": "mine", "action": "click", "coordinate": [12, 30]}'
    for patch, shown in (("action", '{"action": "type", "text": "7:30"}'), ("thought", "thought 1")):
        one = opened_of_trajectories(train=file, patch=patch)
        first = one.reset(0, "train")
        assert texts(first) == "set the alarm" and first[0].getpixel((0, 0)) == (0, 0, 0)
        second = one.step(own)[0]
        assert own in texts(second) and second[0].getpixel((0, 0)) == (20, 0, 0)
        third, _, ended, _, info = one.step("nonsense")
        assert not ended and not info["matched"] and "nonsense" not in texts(third)
        assert own in texts(third) and shown in texts(third) and ("thought 1" in texts(third)) == (patch == "thought")
    one = opened_of_trajectories(train=file, expert=True)
    one.reset(0, "train")
    assert "mine" not in texts(one.step(own)[0])  # plain offline training
    one = opened_of_trajectories(train=file, history=1)
    one.reset(0, "train")
    one.step(own)
    assert own not in texts(one.step("nonsense")[0])


def test_an_episode_ends_after_so_many_patches_or_with_the_walk(file: str) -> None:
    right = ['{"action": "click", "coordinate": [12, 30]}', '{"action": "type", "text": "7:30"}', '{"action": "back"}']
    for patches, split, length in ((0, "train", 1), (1, "train", 2), (None, "train", 4), (9, "eval", 1)):
        one = opened_of_trajectories(train=file, patches=patches)
        one.reset(0, split)
        outcomes = [one.step("nonsense") for _ in range(length)]
        assert [outcome[2] for outcome in outcomes] == [False] * (length - 1) + [True]
        assert not outcomes[-1][4]["success"] and outcomes[-1][4]["parts"] == {"progress": 0.0}
    one = opened_of_trajectories(train=file)
    one.reset(0, "eval")
    outcomes = [one.step(text) for text in [*right, '{"action": "wait"}']]
    assert outcomes[-1][2] and outcomes[-1][4]["success"] and outcomes[-1][4]["parts"] == {"progress": 1.0}


def test_without_a_file_a_planner_walks_in_training_and_other_held_out_rooms() -> None:
    one, rooms = opened_of_trajectories(), {"train": set(), "eval": set()}
    for split in ("train", "eval"):
        for seed in range(20):
            one.reset(seed, split)
            assert 2 <= len(one.steps) <= 8
            rooms[split].add(one.steps[0].picture.tobytes())
            outcomes = [one.step(f"floor floor floor {step.action}") for step in list(one.steps)]
            assert outcomes[-1][2] and outcomes[-1][4]["success"]
            assert all(outcome[1] == pytest.approx(1.0) for outcome in outcomes)
    assert len(rooms["train"]) > 15 and Grid.action_words == one.words


def test_what_is_no_walk_is_explained(file: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for row, text in [
        ({"steps": []}, "row 1: no walk with instruction"),
        ({"instruction": "x", "steps": []}, "a walk needs a step"),
        ({"instruction": "x", "steps": [{"image": "9.png", "action": "a"}]}, "step 1: there is no picture"),
        ({"instruction": "x", "steps": [{"image": "0.png", "action": 3}]}, "step 1: 3 is no action"),
    ]:
        bad.write_text(json.dumps(row))
        with pytest.raises(Misuse, match=text):
            opened_of_trajectories(train=str(bad))
    with pytest.raises(Misuse, match="eval is given without train"):
        opened_of_trajectories(eval=file)
