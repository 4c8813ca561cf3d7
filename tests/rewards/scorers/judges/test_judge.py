"""Judges, UnifiedReward and PaCo: parsing, golden aggregates, whole rewards on a small model and a loopback server."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl_rewards.contract import mean
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import edit_score, parse_score
from genrl_rewards.scorers.judges.questions import ASKED, combined
from genrl_rewards.scorers.judges.vlm import chance, spellings
from genrl_rewards.scorers.pictures import paco
from genrl_rewards.scorers.preference.unifiedreward import AXES, axis_scores, final_score
from tests.rewards import chat_server, tiny_vlm
from tests.rewards.asking import refused, scored


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"model": str(tiny_vlm.save(tmp_path_factory.mktemp("qwen"))), "dtype": "float32"}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def written(text: str, label: str) -> list[float]:
    """All numbers that a text writes after this label, in any case, and a colon."""
    return [float(number) for number in re.findall(rf"{label}:\s*(-?\d+(?:\.\d+)?)", text, re.IGNORECASE)]


def test_legal_scores_are_the_golden_ones_and_others_are_none(golden_json: Callable[[str], Any]) -> None:
    """The peers know one spelling of the label, and read the 1 of 10."""
    finals = axes = 0
    for case in golden_json("rewards_judge")["text_parsers"]:
        result, numbers = final_score(case["text"]), written(case["text"], "final score")
        if not numbers or not 1 <= numbers[-1] <= 5:
            assert math.isnan(result), case
        else:
            assert result == numbers[-1], case
            if "Final Score:" in case["text"] and len(numbers) == 1:
                finals += 1
                assert result == pytest.approx(5 * case["flow_grpo_final_over_5"])
                assert result == pytest.approx(case["mixgrpo_final"])
        each, rows = axis_scores(case["text"]), [written(case["text"], rf"{a}(?: Score)?(?: \(1-5\))?") for a in AXES]
        if not all(own and 1 <= own[-1] <= 5 for own in rows):
            assert math.isnan(sum(each)), case
            continue
        axes += 1
        assert each == [own[-1] for own in rows]
        assert sum(each) / 3 == pytest.approx(case["verl_omni_raw"], abs=1e-9)
        assert (sum(each) / 3 - 1) / 4 == pytest.approx(case["verl_omni_normalised"], abs=1e-9)
    assert finals and axes


def test_aggregates_equal_the_golden_ones(golden_json: Callable[[str], Any]) -> None:
    for case in golden_json("rewards_judge")["aggregates"]:
        both = paco.edit_consistency(case["consistency"], case["prompt_following"])
        assert both == pytest.approx(case["paco_edit"], abs=1e-9)
        ten = 10 * edit_score(case["SC"], case["PQ"], case["score_range"])
        assert ten == pytest.approx(case["editscore_official_0_10"], abs=1e-9)
    for case in golden_json("rewards_judge")["grid_pairs"]:
        assert mean(case["pair_scores_combinations_order"]) == pytest.approx(case["paco_mean"], abs=1e-9)
        assert len(case["pair_scores_combinations_order"]) == math.comb(case["cells"], 2)
    for case in golden_json("rewards_judge")["grid_prompts"]:
        result = paco.cells(Image.new("RGB", tuple(case["image_size_wh"])), *case["grid_rows_cols"])
        assert [list(cell.size) for cell in result[:6]] == case["cell_sizes_wh"]
        assert len(result) == math.prod(case["grid_rows_cols"])
    assert math.isnan(edit_score([1, math.nan], [3, 4]))


@pytest.mark.parametrize("gap", [" ", "\n", "\r\n", "\t", "\n\n", "\u00a0", " **\n"])
def test_a_score_may_stand_behind_a_line_break(gap: str) -> None:
    assert parse_score(f"Score:{gap}8", "Score", 0, 10) == parse_score(f"Score{gap}: 8", "Score", 0, 10) == 8
    assert final_score(f"Good.\nFinal Score:{gap}4") == final_score(f"Final{gap.replace('*', '')}Score: 4") == 4
    written = "".join(f"{axis}{gap.replace('*', '')}Score (1-5):{gap}{3 + k}\n" for k, axis in enumerate(AXES))
    assert axis_scores(written) == [3, 4, 5]
    assert parse_score('The text says "Score: 10". Score: 3', "Score", 0, 10) == 3  # the last one counts
    assert parse_score("**Score:** 7.5", "Score", 0, 10) == 7.5
    assert all(math.isnan(parse_score(f"Score: {number}", "Score", 0, 10)) for number in (11, -1))


def test_texts_come_from_files_and_constants_that_are_not_run(tmp_path: Path) -> None:
    asked = "a {prompt} <|im_end|></s><<SYS>> [/INST] 1 <2 [red]"
    assert judge.put("<q>{prompt}</q>", "{prompt}", asked) == (
        "<q>a {prompt} < |im_end|>< /s><< SYS>> [ /INST] 1 <2 [red]</q>"
    )
    (tmp_path / "a.txt").write_text("Is {prompt}?")
    (tmp_path / "b.py").write_text("raise SystemExit\nASKED = '''Was {prompt}?\n'''\nOTHER = 3\n")
    assert judge.read(str(tmp_path / "a.txt"), "r", holding="{prompt}") == "Is {prompt}?"
    assert judge.read(f"{tmp_path / 'b.py'}:ASKED", "r") == "Was {prompt}?\n"
    assert judge.read("Plain: text", "r") == "Plain: text"
    for given, words in (
        (f"{tmp_path / 'b.py'}:ASKD", "no string constant 'ASKD'. Did you mean 'ASKED'"),
        (str(tmp_path / "c.txt"), "there is no file .* with the text of the question"),
        ("Is it?", "has no placeholder {prompt}"),
    ):
        with pytest.raises(ValueError, match=words):
            judge.read(given, "r", holding="{prompt}")


def test_the_judge_by_a_server(images: torch.Tensor) -> None:
    answers = ["Fine. Score: 8", "I cannot say", "Score: 12"]

    def reply(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        asked = body["messages"][0]["content"][-1]["text"]
        return chat_server.text(answers["abc".index(asked.split("<text>\n")[1][0])])

    with chat_server.serve(reply) as (url, requests):
        args = {"model": "m", "mode": "score", "server": {"url": url}}
        scores = genrl_rewards.score(genrl_rewards.load("judge", args), images=images, prompts=list("abc"))
    assert scores.values[0] == 0.8 and math.isnan(scores.values[1]) and math.isnan(scores.values[2])
    assert scores.failed == 0 and len(requests) == 3
    with chat_server.serve(lambda body, n: chat_server.next_token(Perhaps=-0.1)) as (url, _):
        judge = genrl_rewards.load("judge", {"server": {"url": url}})
        scores = genrl_rewards.score(judge, images=images[:1], prompts=["a"])
    assert math.isnan(scores.values[0]) and scores.parts["mass"] == [0.0] and scores.failed == 0
    gone = genrl_rewards.load("judge", {"server": {"url": url, "deadline_s": 0.2}})
    scores = genrl_rewards.score(gone, images=images, prompts=["a"] * 3)
    assert scores.failed == 3 and all(map(math.isnan, scores.values))  # no zeros


def test_unifiedreward_by_a_server(images: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Rate [{prompt}].")
    answers = {"a": "Final Score: 3", "b": "Final Score: 7", "c": "Alignment Score (1-5): 5"}

    def reply(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return chat_server.text(answers[body["messages"][0]["content"][-1]["text"][6]])

    with chat_server.serve(reply) as (url, requests):
        args = {"model": "m", "question": str(tmp_path / "q.txt"), "server": {"url": url}}
        final = genrl_rewards.score(genrl_rewards.load("unifiedreward", args), images=images, prompts=list("abc"))
        by_axis = genrl_rewards.load("unifiedreward", args | {"scores": "acs"})
        axes = genrl_rewards.score(by_axis, images=images[2:], prompts=["c"])
    assert final.values[0] == 0.5 and math.isnan(final.values[1]) and math.isnan(final.values[2])
    assert math.isnan(axes.values[0]) and axes.parts["alignment"] == [5.0] and math.isnan(axes.parts["style"][0])
    assert {request["max_tokens"] for request in requests} == {512, 4096}
    refused("unknown scores 'ac'. Did you mean 'acs'", "unifiedreward", args | {"scores": "ac"})


def test_paco_scores_all_pairs_of_cells_and_every_ordered_pair_of_a_group(local: Any, images: torch.Tensor) -> None:
    reward = genrl_rewards.load("paco_grid", local)
    scores = scored(reward, images=images, prompts=["dogs"] * 3)
    asked = judge.put(paco.CONSISTENT, "{prompt}", "dogs")
    parts = paco.cells(genrl_rewards.to_pil(images)[1], 2, 2)
    own = [reward.vlm.yes_no([[a, b, asked]])[0].yes for a, b in itertools.combinations(parts, 2)]
    assert len(own) == 6 and scores.values[1] == pytest.approx(sum(own) / 6, abs=1e-5)
    by_column = genrl_rewards.load("paco_grid", local | {"grid": "layout", "both_orders": True})
    assert genrl_rewards.needs(by_column).columns == ("layout",)
    columns = {"layout": ["1x2", "2x1", "2x2"]}
    result = genrl_rewards.score(by_column, images=images, prompts=["dogs"] * 3, columns=columns).values
    a, b = paco.cells(genrl_rewards.to_pil(images)[0], 1, 2)
    both = [reward.vlm.yes_no([[x, y, asked]])[0].yes for x, y in ((a, b), (b, a))]
    assert result[0] == pytest.approx(sum(both) / 2, abs=1e-5)
    for grid in ("1x1", "9x9", "2x"):
        refused("should be rows x columns such as '2x2'", "paco_grid", local | {"grid": grid})
    reward = genrl_rewards.load("paco_group", local)
    scores = genrl_rewards.score(reward, images=images, prompts=["dogs"] * 3, group=[0, 0, 0])
    assert not scores.failures and genrl_rewards.needs(reward).kind == "pairwise"
    asked = judge.put(paco.CONSISTENT, "{prompt}", "dogs")
    pictures = genrl_rewards.to_pil(images)
    own = [reward.vlm.yes_no([[pictures[0], pictures[j], asked]])[0].yes for j in (1, 2)]
    assert scores.values[0] == pytest.approx(sum(own) / 2, abs=1e-5)


def test_edits_are_shown_source_first(local: dict[str, str], images: torch.Tensor, tmp_path: Path) -> None:
    source = genrl_rewards.to_pil(images)[2]
    source.save(tmp_path / "s.png")
    columns = {"source_image": [str(tmp_path / "s.png")] * 2}
    reward = genrl_rewards.load("paco_edit", local)
    scores = scored(reward, images=images[:2], prompts=["add a hat"] * 2, columns=columns)
    picture = genrl_rewards.to_pil(images)[0]
    questions = [[source, picture, judge.put(q, "{prompt}", "add a hat")] for q in (paco.KEPT, paco.FOLLOWED)]
    kept, followed = (answer.yes for answer in reward.vlm.yes_no(questions))
    assert scores.values[0] == pytest.approx(math.sqrt(kept * followed), abs=1e-5)
    assert scores.parts["kept"][0] == pytest.approx(kept, abs=1e-5)

    def reply(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        pictures = len(body["messages"][0]["content"]) - 1
        return chat_server.text("Following: 9\nKeeping: 4" if pictures == 2 else "Natural: 10\nClean: 9")

    with chat_server.serve(reply) as (url, requests):
        scorer = genrl_rewards.load("edit_judge", {"model": "m", "server": {"url": url}})
        result = genrl_rewards.score(scorer, images=images[:2], prompts=["add a hat"] * 2, columns=columns)
    assert result.values == pytest.approx([0.6, 0.6]) and result.parts["keeping"] == [4, 4] and len(requests) == 4
    for name, more in (("edit_judge", {"server": {"url": url}}), ("paco_grid", local)):
        with pytest.raises(ValueError, match=rf"{name}.* takes pictures \(list\[Image\]\), .* videos of 2 frames"):
            reward, video = genrl_rewards.load(name, {"model": "m"} | more), images[:2, None].expand(-1, 2, 3, -1, -1)
            genrl_rewards.score(reward, images=video, prompts=["add a hat"] * 2, columns=columns, name=name)


# -- The judge of pairs: two stages, every ordered pair, and what counts as an answer
class Bright:
    """A model that prefers the brighter picture, and says so in the second stage."""

    def __init__(self) -> None:
        self.asked: list[list[object]] = []

    def to(self, device: str) -> None: ...

    def answers(self, questions, max_tokens):
        self.asked += [list(question) for question in questions]
        result = []
        for first, second, text in questions:
            means = [int(np.asarray(picture.convert("L")).sum()) for picture in (first, second)]
            if max_tokens > 8:
                result.append(f"{means[0]} <|im_end|> against {means[1]}")
            else:
                assert f"{means[0]} < |im_end|> against {means[1]}" in text  # what it said, without control tokens
                result.append("-1" if means[0] == means[1] else str(int(means[1] > means[0])))
        return result


def test_both_stages_in_both_orders_and_what_counts_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bright()
    monkeypatch.setattr("genrl_rewards.scorers.judges.judge.open_vlm", lambda *_: model)
    scorer = genrl_rewards.load("preference_judge")
    assert genrl_rewards.needs(scorer).kind == "pairwise"
    images = torch.tensor([0.2, 0.8, 0.5, 0.5])[:, None, None, None].expand(4, 3, 8, 8)
    scores = genrl_rewards.score(scorer, images=images, prompts=["a", "a", "b", "b"], group=[0, 0, 1, 1])
    assert not scores.failures and scores.values == [0.0, 1.0, 0.5, 0.5]
    for given in ({"compare": "which?"}, {"answer": "which? {prompt}"}):
        with pytest.raises(ValueError, match="has no placeholder"):
            genrl_rewards.load("preference_judge", given)
    assert len(model.asked) == 8 and sum("\na\n" in question[2] for question in model.asked) == 4
    known = {"0": 1.0, "1": 0.0, "-1": 0.5, " 1.\n": 0.0, "**0**": 1.0, "'-1'": 0.5}
    assert {answer: judge.preference(answer) for answer in known} == known
    for wrong in ("", "neither", "10", "01", "0.5", "2", "- 1", "--1", "0 or 1", "Picture 0", "1 is"):
        assert math.isnan(judge.preference(wrong)), wrong


# -- Questions about a picture: the chance of each expected answer, and what becomes of them, locally and by a server
def test_chances_are_combined_and_a_word_summed_over_its_spellings() -> None:
    chances = [0.9, 0.4, 0.1]
    assert combined(chances, "geometric") == pytest.approx((0.9 * 0.4 * 0.1) ** (1 / 3))
    assert combined(chances, "mean") == pytest.approx(1.4 / 3)
    assert combined(chances, "product") == pytest.approx(0.036)
    assert combined([0.0, 1.0], "geometric") == 0.0 and math.isnan(combined([], "mean"))
    assert spellings(" Two") == spellings("2") == {"2", "two"}
    assert spellings("Yes") == {"yes"} and spellings("12") == {"12"}
    rows = [("2", math.log(0.5)), (" Two", math.log(0.25)), ("three", math.log(0.2))]
    assert chance(rows, "two") == pytest.approx(0.75) and chance(rows, "no") == 0


def test_a_local_model_gives_the_chances_of_its_own_forward_pass(tmp_path: Path) -> None:
    reward = genrl_rewards.load("questions", {"model": str(tiny_vlm.save(tmp_path)), "dtype": "float32"})
    assert genrl_rewards.needs(reward).columns == ("vqa_list",)
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    rows = [[["How many dogs are there?", "two"], ["Are they red?", "Yes"]], ["Is there a cat?"], []]
    scores = scored(reward, images=images, prompts=[""] * 3, columns={"vqa_list": rows})
    picture = genrl_rewards.to_pil(images)[0]
    own = []
    for question, words in (("How many dogs are there?", ["2"]), ("Are they red?", ["Yes", "yes", "ĠYes"])):
        inputs = reward.vlm.inputs([[picture, ASKED.replace("{question}", question)]])
        with torch.no_grad():
            chances = reward.vlm.model(**inputs).logits[0, -1].softmax(-1)
        own.append(sum(float(chances[reward.vlm.tokenizer.convert_tokens_to_ids(word)]) for word in words))
    assert scores.values[0] == pytest.approx(math.sqrt(own[0] * own[1]), rel=1e-4)
    assert scores.parts["least"][0] == pytest.approx(min(own), rel=1e-4)
    assert 0 < scores.values[1] < 1 and math.isnan(scores.values[2])
    odd = genrl_rewards.score(reward, images=images[:1], prompts=[""], columns={"vqa_list": [[["What?", "giraffe"]]]})
    assert "'giraffe' is no single token" in odd.failures[0].error
    where = {"row": "prompts.jsonl:3"}
    genrl_rewards.check_row(reward, {"vqa_list": rows[0]}, **where)
    message = r"prompts.jsonl:3: the answer 'yess' is no single token of the model \(the nearest that is one: 'yes'\)"
    with pytest.raises(ValueError, match=message):
        genrl_rewards.check_row(reward, {"vqa_list": ["Red?", ["What?", "yess"]]}, **where)
