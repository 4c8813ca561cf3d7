"""The judge of pairs: two stages, every ordered pair, and what counts as an answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import genrl_rewards
from genrl_rewards.scorers.judges import preference_judge


def test_what_counts_as_an_answer() -> None:
    known = {"0": 1.0, "1": 0.0, "-1": 0.5, " 1.\n": 0.0, "**0**": 1.0, "'-1'": 0.5}
    assert {answer: preference_judge.preference(answer) for answer in known} == known
    for wrong in ("", "neither", "10", "01", "0.5", "2", "- 1", "--1", "0 or 1", "Picture 0", "1 is"):
        assert math.isnan(preference_judge.preference(wrong)), wrong


class Bright:
    """A model that prefers the brighter picture, and says so in the second stage."""

    def __init__(self) -> None:
        self.asked: list[list[object]] = []

    def to(self, device: str) -> None: ...

    def answers(self, questions, max_tokens):
        self.asked += [list(question) for question in questions]
        found = []
        for first, second, text in questions:
            means = [int(np.asarray(picture.convert("L")).sum()) for picture in (first, second)]
            if max_tokens > 8:
                found.append(f"{means[0]} <|im_end|> against {means[1]}")
            else:
                assert f"{means[0]} < |im_end|> against {means[1]}" in text  # what it said, without control tokens
                found.append("-1" if means[0] == means[1] else str(int(means[1] > means[0])))
        return found


def test_both_stages_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bright()
    monkeypatch.setattr("genrl_rewards.scorers.judges.judge.open_vlm", lambda *_: model)
    judge = genrl_rewards.load("preference_judge")
    assert genrl_rewards.needs(judge).kind == "pairwise"
    images = torch.tensor([0.2, 0.8, 0.5, 0.5])[:, None, None, None].expand(4, 3, 8, 8)
    scores = genrl_rewards.score(judge, images=images, prompts=["a", "a", "b", "b"], group=[0, 0, 1, 1])
    assert not scores.failures and scores.values == [0.0, 1.0, 0.5, 0.5]
    for given in ({"compare": "which?"}, {"answer": "which? {prompt}"}):
        with pytest.raises(ValueError, match="has no placeholder"):
            genrl_rewards.load("preference_judge", given)
    assert len(model.asked) == 8 and sum("\na\n" in question[2] for question in model.asked) == 4
