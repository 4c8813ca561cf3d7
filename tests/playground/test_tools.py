"""Environments with a tool: what a tool brings, what an episode is worth, what cannot be done is explained."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from genrl.playground import crop, watch
from genrl.playground.crop import Crop, Index
from genrl.playground.watch import Watch
from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.contract import Question
from genrl.vlm.environments.hosts import open_environment


def opened(name: str, seed: int = 3, split: Any = "train", **options: Any) -> Any:
    one: Any = open_environment(Environment(name=name, options=options))
    one.start = one.reset(seed, split)
    return one


def corners(thing: crop.Thing) -> str:
    """A call for the cell of a thing."""
    left, top = 16 * (thing.cell % 3), 16 * (thing.cell // 3)
    return f"<bbox>[{left},{top},{left + 16},{top + 16}]</bbox>"


def pictures(seen: Any) -> list[bytes]:
    return [part.tobytes() for part in seen if isinstance(part, Image.Image)]


@pytest.mark.parametrize("name", ["crop", "search", "watch"])
def test_held_out_episodes_show_what_training_does_not(name: str) -> None:
    for seed in range(12):
        for split in ("train", "eval"):
            one = opened(name, seed=seed, split=split)
            if isinstance(one, Watch):
                first = min(one.relevant)
                shown = np.asarray(one.frames[first])
                colour = next(c for c in watch.COLOURS if (shown == crop.PALETTE[c]).all(2).any())
                assert watch.held_out(colour, first) == (split == "eval")
            else:
                assert one.thing.held_out == (split == "eval")


@pytest.mark.parametrize(("name", "turns"), [("crop", 3), ("search", 4), ("watch", 3)])
def test_what_cannot_be_done_is_explained_until_the_last_turn(name: str, turns: int) -> None:
    wrong = ["<bbox>[0,0,4,4]</bbox>", "<clip>[9,12]</clip>", "hello", "<search> of nothing </search>"]
    one = opened(name)
    for k, text in enumerate(wrong[:turns]):
        seen, reward, ended, cut, info = one.step(text)
        assert isinstance(seen[0], str) and "<answer> </answer>" in seen[0]
        assert (info["valid"], ended, cut) == (False, False, k == turns - 1)
        assert reward == 0.0 or cut


class TestCrop:
    def test_the_mark_is_only_in_the_large_picture(self) -> None:
        thing = crop.Thing(4, "red", "star", "blue")
        assert not (np.asarray(crop.shown(thing)) == crop.PALETTE["blue"]).all(2).any()
        part = np.asarray(crop.cut_out(crop.draw(thing), (48, 48, 96, 96)))
        assert (part[16:32, 16:32] == crop.PALETTE["blue"]).all()
        others = [crop.shown(thing._replace(inside=colour)).tobytes() for colour in ("green", "yellow")]
        assert {crop.shown(thing).tobytes(), *others} == {others[0]}

    def test_parts_are_cut_from_the_large_picture_and_come_together(self) -> None:
        one = opened("crop")
        assert isinstance(one, Crop)
        text = "<think> look </think> <bbox> [ 16 , 0 , 32 , 16 ] </bbox> <bbox>[0,0,48,48]</bbox> <bbox>[1,2]</bbox>"
        seen, _, ended, _, info = one.step(text)
        assert one.crops == [(48, 0, 96, 48), (0, 0, 144, 144)] and info["valid"] and not ended
        wanted = [one.large.crop((48, 0, 96, 48)), one.large.resize((48, 48), Image.Resampling.BOX)]
        assert pictures(seen) == [part.tobytes() for part in wanted] and seen[1::2] == ("larger", "larger")
        seen, *_ = one.step("<bbox>[0,0,16,16]</bbox>" * 6)
        assert len(pictures(seen)) == crop.TOGETHER

    @pytest.mark.parametrize(("rule", "worth"), [("accuracy", 1.0), ("para_grpo", 1 + 1 + 0.8)])
    def test_a_right_answer_after_a_look_is_worth_all(self, rule: str, worth: float) -> None:
        one = opened("crop", rule=rule)
        one.step(f"<think> i look closer </think> {corners(one.thing)}")
        _, reward, ended, _, info = one.step(f"<think> it is it </think> <answer> {one.answer} </answer>")
        assert ended and info["success"] and reward == pytest.approx(worth) and info["parts"]["looked"] == 1

    def test_an_answer_without_a_look_earns_nothing_for_the_tool(self) -> None:
        one = opened("crop")
        _, reward, _, _, info = one.step(f"<think> it is it </think> <answer> {one.answer} </answer>")
        assert reward == pytest.approx(1 + 1) and info["parts"]["tool"] == 0 == info["parts"]["looked"]
        one = opened("crop")
        one.step("<think> it is it </think> <bbox>[0,0,1,1]</bbox>")  # read, not executed
        _, _, _, _, info = one.step("<think> it is it </think> <answer> nothing </answer>")
        assert info["parts"]["tool"] == pytest.approx(0.1)


class TestSearch:
    def test_texts_are_ranked_by_the_words_they_share_and_rare_ones_count_more(self) -> None:
        index = Index(["red circle", "red star", "Red circle, red square", "blue star"])
        assert index.ranked("blue circle") == [3, 0, 2]
        assert index.ranked("a RED square") == [2, 0, 1]
        assert index.ranked("green") == [] == index.ranked("")

    def test_pages_come_one_after_the_other_and_never_twice(self) -> None:
        one = opened("search", pages=3, turns=9)
        assert pictures(one.start) == []
        texts = " ".join(f"{thing.colour} {thing.shape}" for thing in one.things)
        for _ in range(3):  # of a turn the first action counts
            seen, _, ended, *_ = one.step(f"<search> {texts} </search> <answer> {one.answer} </answer>")
            assert pictures(seen) == [crop.shown(one.things[one.fetched[-1]]).tobytes()] and not ended
        assert sorted(one.fetched) == [0, 1, 2]
        seen, *_, info = one.step(f"<search> {texts} </search>")
        assert "no other page" in seen[0] and not info["valid"] and len(one.fetched) == 3

    def test_a_part_is_of_the_last_page_in_the_coordinates_of_what_is_shown(self) -> None:
        one = opened("search")
        seen, *_, info = one.step(corners(one.thing))
        assert "no page" in seen[0] and not info["valid"]
        one.step(f"<search> {one.thing.colour} {one.thing.shape} </search>")
        assert one.fetched == [one.gold]
        seen, *_ = one.step(corners(one.thing))
        assert (np.asarray(seen[0])[16:32, 16:32] == crop.PALETTE[one.answer]).all() and one.looked

    def test_the_reward_is_the_mixture_of_answer_rule_and_gain(self) -> None:
        one = opened("search")
        query = f"<search> {one.thing.colour} {one.thing.shape} </search>"
        one.step(query)
        _, reward, ended, _, info = one.step(f"<answer> {one.answer} </answer>")
        assert ended and reward == pytest.approx(1.0) and info["parts"]["ndcg"] == 1
        one = opened("search")
        gold = one.thing
        wrong = next(thing for thing in one.things if thing.colour != gold.colour and thing.shape != gold.shape)
        one.step(f"<search> {wrong.colour} {wrong.shape} </search>")
        one.step(query)
        result = one.fetched.index(one.gold)
        _, reward, *_ = one.step("<answer> grey </answer>")
        assert result == 1 and reward == pytest.approx(0.1 + 0.2 / np.log2(3))
        one = opened("search")
        one.step("hello")
        assert one.step(f"<answer> {one.answer} </answer>")[1] == 0.0  # the rule is broken


class TestWatch:
    def test_a_budget_of_evenly_spaced_frames_is_drawn_for_each_seed(self) -> None:
        sizes = set()
        for seed in range(20):
            one = opened("watch", seed=seed, budgets=[2, 4, 8])
            assert len(pictures(one.start)) == len(one.shown)
            assert one.shown in ([2, 6], [1, 3, 5, 7], list(range(8)))
            assert f"frames {' '.join(str(k + 1) for k in one.shown)} " in one.start[-2]
            sizes.add(len(one.shown))
        assert sizes == {2, 4, 8}

    def test_clips_are_shown_together_and_four_frames_at_most(self) -> None:
        one = opened("watch", turns=5)
        seen, *_ = one.step("<clip>[1,2]</clip> <clip> [ 8 , 9 ] </clip>")
        assert pictures(seen) == [one.frames[k].tobytes() for k in (0, 1, 7)] and seen[-1] == "frames 1 2 8 . "
        assert len(pictures(one.step("<clip>[1,99999999999]</clip>")[0])) == watch.TOGETHER

    def test_conan_is_paid_for_scores_requests_and_form(self) -> None:
        one = opened("watch", rule="conan")
        scores = "<score> " + " ".join(str(1 + 4 * (k in one.relevant)) for k in one.shown) + " </score> "
        right = f"<answer> {one.answer} </answer>"
        one.relevant, one.shown, one.seen = frozenset({2, 3}), [1, 3, 5, 7], {1, 3, 5, 7}
        one.step("<score> 5 5 1 1 </score> <think> so </think> <clip>[1,3]</clip>")  # IoU 1/2; the third frame is new
        _, reward, ended, _, info = one.step(f"<score> 1 1 4 </score> {right}")  # IoU 1
        assert ended and info["parts"]["clue"] == pytest.approx(0.75) and info["parts"]["action"] == 1
        assert reward == pytest.approx(1 + 0.75 + 1 + 0.5)
        for text, worth in (
            (scores + right, 1 + 1 + 1 + 0.5),  # the action is worth the clue
            (scores + "<clip>[1,2]</clip>" + right, 1 + 1 + 1),  # not of the form
            (scores + "<answer> no </answer>", 0.5),
        ):
            assert opened("watch", rule="conan").step(text)[1] == pytest.approx(worth)


class TestSubAgents:
    def test_each_part_is_a_question_about_it_alone(self) -> None:
        one, plain = opened("crop", agents=True), opened("crop")
        call = "<bbox>[0,0,16,16]</bbox>" * 6
        observation, _, ended, cut, info = one.step(call)
        questions = [part for part in observation if isinstance(part, Question)]
        assert len(questions) == crop.TOGETHER and info["valid"] and not (ended or cut)
        assert [pictures(each.parts) for each in questions] == [[part] for part in pictures(plain.step(call)[0])]
        assert {each.parts[1] for each in questions} == {"what is this ?"} and not pictures(observation)
        assert not one.step("hello")[-1]["valid"]

    def test_each_clip_is_a_question_about_its_frames(self) -> None:
        one = opened("watch", rule="para_grpo", agents=True)
        reply, _, _, _, info = one.step("<clip>[1,2]</clip> <clip>[2,8]</clip> <clip>[9,9]</clip>")
        first, second = (part for part in reply if isinstance(part, Question))
        assert [part for part in reply if isinstance(part, str)] == ["frames 1 2 : ", " . ", "frames 2 3 4 5 : ", " . "]
        assert pictures(first.parts) == [frame.tobytes() for frame in one.frames[:2]]
        assert pictures(second.parts) == [frame.tobytes() for frame in one.frames[1:5]]
        assert info["valid"] and one.asked[0][0] == frozenset(range(5)) and len(one.asked) == 1


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("crop", {"rule": "best"}, "rule is accuracy"),
        ("search", {"pages": 0}, "must be 1 or more"),
        ("watch", {"rule": "vrag_rl"}, "rule is accuracy, para_grpo or conan"),
        ("watch", {"budgets": [9]}, "from 1 to 8"),
        ("watch", {"agents": True}, "agents goes with para_grpo or accuracy"),
        ("watch", {"frames": 9}, "frames"),
    ],
)
def test_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        opened(name, **options)
