"""Vision-language models as judges: the local model on a small Qwen2-VL in the true format, and its inputs."""

import base64
import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing

from genrl_rewards.scorers.judges.chat import ChatServer, Server, ServerFailed
from genrl_rewards.scorers.judges.vlm import LocalVLM, QwenInputs, pictures_of, yes_or_no
from tests.rewards import chat_server, tiny_vlm
from tests.vlm import tiny_checkpoints

from transformers import Qwen2VLForConditionalGeneration  # isort: skip
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # isort: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm.save(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def vlm(folder: Path) -> LocalVLM:
    return LocalVLM(str(folder), "float32")


def picture(seed: int, size: tuple[int, int] = (30, 40)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def test_spellings_and_sizes_of_pictures_equal_the_golden_ones(golden_json: Any, golden: Callable[[str], Any]) -> None:
    for case in golden_json("rewards_judge")["yes_no"]:
        answer = yes_or_no([(token, value) for token, value in case["top_logprobs"]])
        assert answer.mass == pytest.approx(case["answer_mass"], abs=1e-9)
        if case["recommended"] is None:
            assert math.isnan(answer.yes)
        else:
            assert answer.yes == pytest.approx(case["recommended"], abs=1e-9)
    data = golden("rewards_preprocess")
    for row in json.loads(str(data["geometry_json"])):
        for factor, column in ((28, "qwen2vl_256x28x28"), (32, "factor32_256x32x32")):
            pixels = 256 * factor * factor
            sides = smart_resize(row["height"], row["width"], factor, pixels, pixels)
            assert list(sides) == row[column]
        assert row["qwen2vl_256x28x28"][0] * row["qwen2vl_256x28x28"][1] // 28**2 == row["tokens_after_merge"]


def test_answers_are_those_of_the_models_own_forward(vlm: LocalVLM, folder: Path) -> None:
    """The question is put together by hand here: one placeholder per merged patch, no padding."""
    first, second, text = picture(0), picture(1, (24, 24)), "Same?"
    (answer,) = vlm.yes_no([[first, second, text]])
    tokenizer = tiny_vlm.tokenizer()
    processor = vlm.inputs.image_processor
    seen = processor(images=[first, second], return_tensors="pt")
    places = [int(grid.prod()) // 4 for grid in seen["image_grid_thw"]]
    shown = "".join(f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in places)
    chat = f"<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat, return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[0, -1]
    probability = logits.softmax(-1)
    words = tokenizer.convert_tokens_to_ids(["Yes", "yes", "ĠYes", "No", "no"])
    yes, both = probability[words[:3]].sum().item(), probability[words].sum().item()
    assert answer.yes == pytest.approx(yes / both, abs=1e-5) and answer.mass == pytest.approx(both, abs=1e-6)
    other = vlm.yes_no([[second, first, text]])[0]
    assert abs(other.yes - answer.yes) > 1e-3, "the order of pictures counts"


def test_answers_do_not_depend_on_the_batch(vlm: LocalVLM) -> None:
    questions = [[picture(i, (20 + 8 * i, 30)), "?" * (i + 1)] for i in range(5)] + [["no picture at all"]]
    together = vlm.yes_no(questions)
    alone = [vlm.yes_no([question])[0] for question in questions]
    assert [a.yes for a in together] == pytest.approx([a.yes for a in alone], abs=1e-5)
    written = vlm.answers(questions, 3)
    assert written == [vlm.answers([question], 3)[0] for question in questions] and len(written) == 6
    assert len(pictures_of(questions)) == 5


def test_what_answers_no_questions_is_refused(vlm: LocalVLM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 pictures has 2 places <\|image_pad\|> for them"):
        vlm.yes_no([[picture(0), "<|image_pad|>"]])
    with pytest.raises(ValueError, match="the folder is empty"):
        LocalVLM(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="vlm: .* is a 'bert' model, which answers no questions about pictures"):
        LocalVLM(str(tmp_path))
    with pytest.raises(ValueError, match="unknown dtype 'fp8'"):
        LocalVLM(str(folder), "fp8")
    made = tiny_vlm.tokenizer()
    made.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        QwenInputs(made, None)


def test_a_model_that_is_not_qwens_is_asked_through_its_own_processor(tmp_path: Path) -> None:
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration

    folder = tiny_checkpoints.idefics("idefics3", tmp_path, tiny_vlm.WORDS)
    vlm = LocalVLM(str(folder), "float32")
    questions = [[picture(0), "Same?"], [picture(1), picture(2), "Or other?"]]
    together = vlm.yes_no(questions)
    assert [a.yes for a in together] == pytest.approx([vlm.yes_no([q])[0].yes for q in questions], abs=1e-5)
    processor = AutoProcessor.from_pretrained(folder)
    chat = "<|im_start|>user\n<image>Same?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=[chat], images=[[picture(0)]], return_tensors="pt")
    with torch.no_grad():
        logits = Idefics3ForConditionalGeneration.from_pretrained(folder).eval()(**inputs).logits[0, -1]
    own = yes_or_no([(token, logits.log_softmax(-1)[i].item()) for i, token in vlm.spelled.items()])
    assert together[0].yes == pytest.approx(own.yes, abs=1e-5)
    assert vlm.answers(questions, 2) == [vlm.answers([q], 2)[0] for q in questions]
    assert 0 < vlm.yes_no([["no picture at all"]])[0].yes < 1
    # A tokenizer that adds the token by which the template begins, as Gemma's: it stands there once.
    begin = vlm.tokenizer.bos_token = "<|im_start|>"
    added = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, processor.tokenizer.vocab[begin])])
    vlm.tokenizer.backend_tokenizer.post_processor = added
    assert vlm.tokenizer.decode(vlm.inputs([["Hi"]])["input_ids"][0]).count(begin) == 2


# -- The client of OpenAI-compatible judges, against a real server on loopback
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))


def client(url: str, timeout_s: float = 60.0, deadline_s: float = 60.0, key_env: str = "") -> ChatServer:
    return ChatServer("judge-7b", Server(url, key_env, timeout_s, deadline_s))


def test_a_question_is_sent_with_the_very_pixels_and_yes_is_of_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with chat_server.serve(lambda body, n: chat_server.text("fine")) as (url, requests):
        assert client(url, key_env="MY_KEY").answers([[PICTURE, "How?"]], 7) == ["fine"]
    (request,) = requests
    assert request["path"] == "/v1/chat/completions" and request["headers"]["Authorization"] == "Bearer secret"
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge-7b", 0, 7)
    shown, asked = request["messages"][0]["content"]
    assert asked == {"type": "text", "text": "How?"}
    kind, _, coded = shown["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert np.array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(coded)))), np.array(PICTURE))
    with chat_server.serve(lambda body, n: chat_server.next_token(Yes=-0.5, No=-1.5, Well=-3.0)) as (url, requests):
        (answer,) = client(url).yes_no([[PICTURE, "?"]])
    assert answer.yes == pytest.approx(1 / (1 + math.exp(-1)))
    assert answer.mass == pytest.approx(math.exp(-0.5) + math.exp(-1.5))
    assert (requests[0]["max_tokens"], requests[0]["logprobs"], requests[0]["top_logprobs"]) == (1, True, 20)


def test_answers_keep_their_order_and_a_busy_or_broken_reply_is_asked_for_again() -> None:
    def slow_first(body: dict, number: int) -> tuple[int, bytes]:
        asked = body["messages"][0]["content"][0]["text"]
        time.sleep(0.02 * (9 - int(asked)))
        return chat_server.text(asked)

    with chat_server.serve(slow_first) as (url, _):
        judge = client(url)
        for _ in range(2):  # a client that is tied to its first call would fail at the second
            assert judge.answers([[str(i)] for i in range(10)], 1) == [str(i) for i in range(10)]
    broken = [b'{"choices": [', b'{"choices": []}', b'{"choices": [{"message": {"content": [1]}}]}', b"[" * 100_000]
    replies = [(503, b"busy"), (302, b""), *((200, body) for body in broken), chat_server.text("at last")]
    with chat_server.serve(lambda body, n: replies[n]) as (url, requests):
        assert client(url).answers([["?"]], 1) == ["at last"]
    assert len(requests) == 7


def test_a_refusal_is_not_asked_again() -> None:
    for reply, ask, words in (
        ((404, b"no such model"), "answers", "refuses: status 404, no such model"),
        (chat_server.text("Yes"), "yes_no", "gives no log-probabilities"),
    ):
        with chat_server.serve(lambda body, n, reply=reply: reply) as (url, requests):
            with pytest.raises(ServerFailed, match=words):
                getattr(client(url), ask)([["?"]], *([1] if ask == "answers" else []))
            assert len(requests) == 1
        with chat_server.serve(lambda body, n: (200, b'{"choices": [{"message": {"content": null}}]}')) as (url, _):
            assert client(url).answers([["?"]], 1) == [""]  # cut before its first word


def test_a_server_that_stays_away_raises_at_the_deadline_and_gives_no_score() -> None:
    with chat_server.serve(lambda body, n: (503, b"")) as (url, _):
        with pytest.raises(ServerFailed, match="does not answer: (status 503|no reply)"):
            client(url, deadline_s=0.6).answers([["?"]], 1)
    with pytest.raises(ServerFailed, match="does not answer"):
        client(url, deadline_s=0.3).yes_no([["?"]])


def test_wrong_settings_are_refused() -> None:
    for given, words in (
        ({}, "judge: server needs a url. It takes: url, key_env"),
        ({"url": "http://x/v1", "timeout": 3}, "has no 'timeout'. Did you mean 'timeout_s'"),
        ({"url": "127.0.0.1:8000"}, "should look like http://127.0.0.1:8000/v1"),
        ({"url": "http://x/v1", "key_env": "NOT_SET_HERE"}, "the environment has no NOT_SET_HERE"),
    ):
        with pytest.raises(ValueError, match=words):
            Server.of(given, "judge")
