"""Questions about a picture: the chance of each expected answer, and what becomes of them, locally and by a server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import genrl_rewards
from genrl_rewards.scorers.judges.questions import ASKED, combined
from genrl_rewards.scorers.judges.vlm import chance, spellings
from tests.rewards import chat_server, tiny_vlm
from tests.rewards.asking import refused, scored


def test_chances_are_combined_as_the_papers_have_it() -> None:
    chances = [0.9, 0.4, 0.1]
    assert combined(chances, "geometric") == pytest.approx((0.9 * 0.4 * 0.1) ** (1 / 3))
    assert combined(chances, "mean") == pytest.approx(1.4 / 3)
    assert combined(chances, "product") == pytest.approx(0.036)
    assert combined([0.0, 1.0], "geometric") == 0.0 and math.isnan(combined([], "mean"))


def test_a_word_is_summed_over_its_spellings() -> None:
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
    told = r"prompts.jsonl:3: the answer 'yess' is no single token of the model \(the nearest that is one: 'yes'\)"
    with pytest.raises(ValueError, match=told):
        genrl_rewards.check_row(reward, {"vqa_list": ["Red?", ["What?", "yess"]]}, **where)


def test_by_a_server(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        asked = body["messages"][0]["content"][-1]["text"]
        return chat_server.next_token(**({"3": math.log(0.8)} if "many" in asked else {"No": math.log(0.9)}))

    with chat_server.serve(reply) as (url, requests):
        args = {"server": {"url": url}, "questions": "asked", "combine": "mean"}
        rows = [[["How many?", "three"], ["Red?", "no"], ["Blue?", "yes"]]]
        images = torch.rand(1, 3, 8, 8)
        scores = genrl_rewards.score(
            genrl_rewards.load("questions", args), images=images, prompts=[""], columns={"asked": rows}
        )
    assert scores.values[0] == pytest.approx((0.8 + 0.9 + 0) / 3) and scores.parts["least"] == [0.0]
    assert len(requests) == 3
    refused("unknown combine 'meen'. Did you mean 'mean'", "questions", args | {"combine": "meen"})
