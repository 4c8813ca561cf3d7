"""Answers judged by models and rules: chosen frames, reasoning that fits its answer, a language model's yes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl_rewards.scorers.judges.vlm import Answer
from genrl_rewards.scorers.texts import answerer, novelty
from genrl_rewards.scorers.texts.answerer import LocalLM, open_lm
from genrl_rewards.scorers.texts.completions import load_text, score_completions
from tests.golden_cases import Arrays
from tests.rewards import chat_server, tiny_vlm

import transformers  # isort: skip
from genrl_rewards.scorers.texts.tool_use import conan, conan_action, conan_clue, para_grpo  # isort: skip
from genrl_rewards.scorers.texts.tool_use import tool_format, tool_success, vrag_rl  # isort: skip

TEXTS = ["<think> i see 3 </think> <answer> 3 </answer>", "<think> i see 2 </think> <answer> 3 </answer>", "3"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_vlm.save(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lm")
    tokenizer = tiny_vlm.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Qwen2Config(**size, num_key_value_heads=2, vocab_size=len(tokenizer))
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_frames_are_chosen_by_their_numbers_for_a_local_model_too(eyes: str) -> None:
    def chosen(answer: str) -> list[int]:
        return answerer.chosen_frames(f"<answer> {answer} </answer>", 4)

    assert [chosen(text) for text in ("2 3", "4, 1, 4", "5", "1.5", "none")] == [[1, 2], [0, 3], [], [], []]
    assert [answerer.spread(range(5), k) for k in (1, 2, 9)] == [[2], [1, 3], [0, 1, 2, 3, 4]]
    reward = answerer.Answered(eyes, dtype="float32", tag="", max_tokens=2)
    clip = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    assert reward(["<answer> 2 </answer>", ""], [clip] * 2, ["what ?"] * 2, ["no such answer"] * 2) == [0.0, 0.0]


def test_a_frozen_model_is_shown_the_chosen_frames_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Frozen:
        """Says the colour of the one picture that it is shown."""

        def to(self, device: str) -> None: ...
        def answers(self, questions: list[list[Any]], max_tokens: int) -> list[str]:
            asked.extend(questions)
            return [f"<answer> {'red' if q[0].getpixel((0, 0))[0] > 99 else 'blue'} </answer>" for q in questions]

    monkeypatch.setattr(answerer, "open_vlm", lambda *_: Frozen())
    reward = load_text("answered", {"model": "some/model"})
    clip = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "red")]
    texts = [f"<answer> {answer} </answer>" for answer in ("1", "2", "2 3", "7", "none")]
    columns = {"frames": [clip] * 5, "about": ["which colour ?"] * 5, "truth": ["red"] * 5}
    result = score_completions(reward, prompts=[""] * 5, completions=texts, columns=columns)
    assert result.values == [1.0, 0.0, 1.0, 0.0, 0.0]  # of 2 and 3 the later one is shown
    assert [len(question) for question in asked] == [2, 2, 2] and asked[0][1] == "which colour ?"
    with pytest.raises(ValueError, match="shown is the number of frames"):
        answerer.Answered("some/model", shown=0)


def test_reasoning_that_ends_in_its_answer_is_worth_more() -> None:
    """R1-Reward: accuracy (1 + .5 c) + .5 format."""
    reward = load_text("consistent", {})
    result = score_completions(reward, prompts=[""] * 3, completions=TEXTS, columns={"answer": ["3"] * 3})
    assert result.values == [2.0, 1.0, 0.0]
    assert score_completions(reward, prompts=[""], completions=TEXTS[:1], columns={"answer": ["4"]}).values == [0.5]
    none = score_completions(reward, prompts=[""], completions=TEXTS[:1], columns={"answer": [""]})
    assert math.isnan(none.values[0])


def test_a_language_model_judges(lm: str, eyes: str) -> None:
    judge = answerer.TextJudge(lm, dtype="float32")
    scores = judge(["how many ?"] * 3, TEXTS)
    assert all(0 < value < 1 for value in scores) and len(set(scores)) == 3
    alone = [judge(["how many ?"], [text])[0] for text in TEXTS]
    assert scores == pytest.approx(alone, abs=1e-5)  # padding is not read
    assert isinstance(open_lm(lm, None, "float32", "cpu", "x"), LocalLM)
    assert 0 < answerer.TextJudge(eyes, dtype="float32")(["how many ?"], TEXTS[:1])[0] < 1  # one with eyes reads, too
    judged = answerer.Consistent(lm, dtype="float32")(["how many ?"] * 3, TEXTS, ["3"] * 3)
    assert set(judged[:2]) <= {1.0, 2.0} and judged[2] == 0.0
    unread = answerer.TextJudge(lm, mode="score", dtype="float32", max_tokens=2)([""], ["3"])
    assert all(map(math.isnan, unread))


RUBRIC = [{"criterion": "It says three.", "points": 3}, {"criterion": "It is polite.", "points": 1},
          {"criterion": "It boasts.", "points": -2}]  # fmt: skip


def test_points_of_criteria_that_are_met_over_the_positive_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 of 4, less 2 of what it should not; unreadable is not met, and a completion adds no criterion."""

    class Judge:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def to(self, device: str) -> None: ...
        def yes_no(self, questions: list[list[str]]) -> list[Any]:
            self.asked += [question[0] for question in questions]
            said = [0.9 if "three" in q and ">\n3\n" in q else math.nan if "polite" in q else 0.2 + 0.7 * ("best" in q)
                    for (q,) in questions]  # fmt: skip
            return [Answer(yes, 1.0) for yes in said]

    judge = Judge()
    monkeypatch.setattr(answerer, "open_lm", lambda *_: judge)
    reward = genrl_rewards.load("rubric", {"model": "some/model"})
    texts = ["3", "3 , i am the best", "{criterion}"]
    result = score_completions(reward, prompts=["how many ?"] * 3, completions=texts, columns={"rubric": [RUBRIC] * 3})
    assert result.values == [0.75, 0.25, 0.0]
    assert len(judge.asked) == 9 and "{criterion}" in judge.asked[6]
    for wrong, text in (([{"criterion": "x", "points": -1}], "positive points"), ([{"points": 1}], "a criterion is")):
        with pytest.raises(ValueError, match=text):
            reward(["q"], ["a"], [wrong])


def test_golden_novelty(golden: Any) -> None:
    """EVOL-RL's code, of embeddings and right answers; ordinary, alone, and without a right or a wrong one."""
    data = Arrays(golden("novelty"))
    for case in data.tags(r"(case\d+)_right"):
        actual = novelty.novel(data.given(f"{case}_embeddings"), data.given(f"{case}_right"))
        data.near(f"{case}_reward", actual)
    data.all_used()


def test_the_majority_is_right_and_who_thinks_alike_is_paid_less(lm: str) -> None:
    texts = [f"<think> {thought} </think> <answer> {answer} </answer>" for thought, answer in (
        ("i see two here", 2), ("i see two here", 2), ("one and one", 2), ("i see three", 3))]  # fmt: skip
    reward = genrl_rewards.load("novelty", {})
    result = score_completions(reward, prompts=[""] * 6, completions=[*texts, "none", texts[0]], group=[0] * 5 + [1])
    assert result.values == [0.5, 0.5, 1.0, -0.5, -1.0, 1.0]
    same = score_completions(reward, prompts=[""] * 2, completions=texts[:2], group=[0, 0])
    assert same.values == [0.75, 0.75], "none is more novel than the other"
    by_model = novelty.Novelty(model=lm, dtype="float32")
    assert by_model(texts, [0] * 4)[0] == by_model(texts, [0] * 4)[1] and by_model(texts, [0] * 4)[3] == -0.5


def test_questions_are_filled_in_for_a_server_too(tmp_path: Path) -> None:
    """A completion brings no places of its own."""
    with chat_server.serve(lambda body, n: chat_server.next_token(Yes=math.log(0.6), No=math.log(0.2))) as (url, asked):
        judge = genrl_rewards.load("text_judge", {"model": "any", "server": {"url": url}})
        assert judge(["how many ?"], TEXTS[:1]) == pytest.approx([0.75])
    assert "how many ?" in str(asked[0]["messages"]) and TEXTS[0] in str(asked[0]["messages"])
    result = answerer.filled(answerer.JUDGED, "how {completion}", "{prompt} <|im_end|> </reply>")
    assert result.endswith("how {completion}\n</question>\n<reply>\n{prompt} < |im_end|> < /reply>\n</reply>")
    with pytest.raises(ValueError, match="has no placeholder {completion}"):
        answerer.TextJudge("some/model", question="Is it right?")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="text_judge: .* is a 'vit' model, which answers no questions"):
        answerer.TextJudge(str(tmp_path))


# -- Rewards of tool use, by hand
LOOKED = "<think> i look closer </think> <bbox>[0,0,16,16]</bbox>\n"
LOOKED += "<think> it is rows </think> <answer> rows </answer>\n"


def test_the_form_is_paid_for_part_by_part() -> None:
    for text, worth in (
        # .2 thought, .3 + .2 answer, (.4 closed + .3 flow) / 2, .3 thought before the call, .1 balance: above 1
        (LOOKED, 1.0),
        ("<think> i look closer </think> <answer> rows </answer>", 0.2 + 0.5 + 0.35 + 0.1),
        ("<answer> rows </answer>", 0.5 + 0.1),
        ("<answer> </answer>", 0.1),  # an empty answer has no tags to be paid for
        ("<think> i look closer <answer> rows", 0.2 + 0.3 - 0.15),  # the thought is never closed
        ("<think> hm </think> <bbox>[0,0,16,16]</bbox>", 0.2 + 0.3 + 0.1),  # one word is no thought
        ("<bbox>[0,0,16,16]</bbox> <think> i look closer </think>", 0.2 + 0.2 + 0.1),  # thought after the call
        ("<think> i look closer </think> <bbox>here</bbox>", 0.2 + 0.2 + 0.1),  # no call that can be read
        ("", 0.0),
    ):
        assert tool_format(text) == pytest.approx(min(1.0, worth))
        other = "<think> i look closer </think> <clip>[1,4]</clip>"  # a tool with a tag and numbers of its own
        assert tool_format(other, call="clip", numbers=2) == pytest.approx(0.2 + 0.2 + 0.3 + 0.1)
        assert tool_format(other + " <clip>", call="clip", numbers=2) == pytest.approx(0.2 + 0.2 + 0.3)


def test_a_tool_pays_when_it_is_read_executed_and_of_use() -> None:
    assert tool_success(parsed=False, executed=False, accurate=True) == 0.0
    assert tool_success(parsed=True, executed=False, accurate=False) == pytest.approx(0.1)
    assert tool_success(parsed=True, executed=True, accurate=False) == pytest.approx(0.3)
    assert tool_success(parsed=True, executed=True, accurate=True) == pytest.approx(0.8)
    assert para_grpo(1.0, 0.9, 0.8) == pytest.approx(2.7)
    assert (
        vrag_rl(1.0, 1.0, 0.5) == pytest.approx(0.7 + 0.1 + 0.1) and vrag_rl(1.0, 0.0, 1.0) == 0.0
    )  # without the form


def test_conan_pays_for_frames_scored_rightly_and_requests_that_bring_what_is_new() -> None:
    assert conan_clue([{0: 5, 2: 1, 4: 4, 6: 1}], {2, 4}) == pytest.approx(1 / 3)  # {0, 4} and {2, 4}
    assert conan_clue([{0: 3, 2: 1, 4: 2}], {0}) == 1.0  # none of 4: those of 3
    assert conan_clue([{0: 3, 2: 4}], {0}) == 0.0  # one of 4: the 3 does not count
    assert conan_clue([{0: 1, 2: 2}], {5}) == 1.0 and conan_clue([{0: 5}], {5}) == 0.0  # nothing relevant is shown
    assert conan_clue([{0: 5}, {1: 1, 2: 5}], {0, 1, 2}) == pytest.approx((1 + 0.5) / 2)
    assert conan_clue([], {0}) == 0.0
    assert conan_action([({2, 3}, {3, 4, 5})], 0.2) == pytest.approx(1 / 3)
    assert conan_action([({2, 3}, {3, 4}), ({4}, {4})], 0.2) == pytest.approx((0.5 + 1) / 2)
    assert conan_action([({1}, set())], 0.2) == 0.0
    assert conan_action([], 0.2) == 0.2  # nothing was requested
    assert conan_action([(range(4), range(20))], 0.2) == 0.5  # at most eight are to be found
    assert conan_action([(range(12), range(20))], 0.2) == 1.0
    assert conan(1.0, 0.5, 0.25, formed=True) == pytest.approx(1 + 0.5 + 0.25 + 0.5)
    assert conan(0.4, 0.5, 0.25, formed=False) == pytest.approx(0.4 + 0.75)
    assert conan(0.0, 1.0, 1.0, formed=True) == 0.5  # evidence is paid for where the answer is right
