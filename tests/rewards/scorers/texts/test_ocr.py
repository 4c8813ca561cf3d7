"""The OCR reward: text scores against golden numbers, reading drawn words, the dense score, the traps."""

import importlib.machinery
import importlib.util
import math
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import genrl_rewards
from genrl.playground import shapes as world
from genrl_rewards.rows import survey
from genrl_rewards.scorers.texts import ocr

pytest.importorskip("rapidocr", reason="the extra is not installed: pip install 'genrl-diffusion[ocr]'")

CAPITALS = string.ascii_uppercase


@pytest.fixture(scope="module")
def detecting() -> ocr.Ocr:
    return genrl_rewards.load("ocr")


@pytest.fixture(scope="module")
def quick() -> ocr.Ocr:
    return genrl_rewards.load("ocr", {"crop": "ink", "alphabet": CAPITALS})


def written(text: str, size: int = 64, y: float = 0.3, width: float = 0.8) -> Image.Image:
    """Dark text on a light ground, in Pillow's own font, so wide."""
    picture = Image.new("RGB", (4 * size, 4 * size), (235, 230, 220))
    font = ImageFont.load_default(100)
    font = ImageFont.load_default(100 * width * 4 * size / font.getlength(text))
    ImageDraw.Draw(picture).text((0.08 * 4 * size, y * 4 * size), text, font=font, fill=(20, 30, 60))
    return picture.resize((size, size), Image.Resampling.BOX)


def tensor(*pictures: Image.Image | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).movedim(-1, 1) / 255


def signs(count: int, seed: int = 0) -> tuple[torch.Tensor, list[str]]:
    rng = np.random.default_rng(seed)
    scenes = [world.sample_scene(rng, "word", ("train", "eval")[i % 2]) for i in range(count)]
    return tensor(*map(world.draw, scenes)), [world.caption(scene) for scene in scenes]


def test_text_scores_and_targets_equal_the_golden_columns(golden_json: Callable[[str], Any]) -> None:
    """Flow-GRPO's score is 1 exactly where the target occurs: below that at least one letter is wrong."""
    for case in golden_json("rewards_ocr_text")["cases"]:
        for variant in ("ned_max", "exact", "ned_partial", "flow_grpo"):
            score = ocr.VARIANTS[variant](case["lines"], case["target"], "case_space")
            assert score == pytest.approx(case[variant], abs=1e-12), case
        score = ocr.contains(case["lines"], case["target"])
        assert score == (None if case["flow_grpo"] is None else float(case["flow_grpo"] == 1.0)), case
    for case in golden_json("rewards_ocr_text")["prompt_targets"]:
        assert ocr.quoted(case["prompt"]) == case["flow_grpo_target"], case


def test_folds_lose_just_the_named_differences() -> None:
    for fold, equal in (
        ("case_space", ["OPEN late", "open late", "OPENLATE", "openlate"]),
        ("case", ["OPEN late", "open late"]),
        ("space", ["OPEN late", "OPENlate"]),
        ("none", ["OPEN late"]),
    ):
        texts = ["OPEN late", "open late", "OPENLATE", "openlate", "OPENlate"]
        for text in texts:
            lines = text.split(" ", 1)  # a new line counts as a space
            assert (ocr.exact(lines, "OPEN late", fold) == 1.0) == (text in equal or (fold == "case_space"))
            assert ocr.contains([f"x{text}x"], "OPEN late", fold) == ocr.exact([text], "OPEN late", fold)


def test_quotes_of_all_kinds_and_marks_of_inches() -> None:
    targets = {
        "a sign that says “OPEN”": "OPEN",
        "ein Schild „Zu“ hier": "Zu",
        "une affiche « Bonjour »": " Bonjour ",
        "看板「営業中」": "営業中",
        'a 12" record with the title "HELLO"': "HELLO",
        'a sign "ROUTE 66" here': "ROUTE 66",
        'a 12" by 5" plate with "HI"': "HI",
        'a sign "7" and "8"': "7",
        "no quotes": None,
        'open "to the end': "to the end",
        "it’s a dog’s": None,
    }
    assert {prompt: ocr.quoted(prompt) for prompt in targets} == targets


def test_rows_are_read_before_a_run() -> None:
    prompts = ['a sign "HI"', "no quotes", '"" and', 'a "HI']
    named = [(f"p.txt:{k}", {"prompts": prompt}) for k, prompt in enumerate(prompts, 1)]
    reader = object.__new__(ocr.Ocr)
    reader.target = "quotes"
    result = survey("ocr", reader, named)
    assert result is not None and result.kinds == {"text": 1, "nothing": 2, "text of a quote that is not closed": 1}
    assert "2 rows have no score: p.txt:2, p.txt:3" in result.lines()[1]


def test_drawn_signs_are_read(quick: ocr.Ocr, detecting: ocr.Ocr, monkeypatch: pytest.MonkeyPatch) -> None:
    images, prompts = signs(40)
    scores = genrl_rewards.score(quick, images=images, prompts=prompts)
    assert np.mean(scores.parts["exact"]) > 0.97 and scores.values == scores.parts["ned_max"]
    wrong = genrl_rewards.score(quick, images=images.roll(1, 0), prompts=prompts)
    assert np.mean(wrong.values) < 0.25 and np.mean(wrong.parts["ctc"]) < 0.25
    result = genrl_rewards.score(detecting, images=images[:10], prompts=prompts[:10])
    assert np.mean(result.parts["exact"]) >= 0.9
    for variant in (*ocr.VARIANTS, "ctc"):
        monkeypatch.setattr(quick, "variant", variant)
        result = genrl_rewards.score(quick, images=images[:3], prompts=prompts[:3])
        assert result.values == pytest.approx([1] * 3, abs=0.05)


def test_prompts_columns_and_frames(quick: ocr.Ocr) -> None:
    """A prompt without a text has no score, a column may have the text, a video counts with all its frames."""
    images, prompts = signs(3)
    some = ["two red circles", 'a sign that says ""', 'a sign "OPEN"']
    scores = genrl_rewards.score(quick, images=images, prompts=some)
    assert [math.isnan(value) for value in scores.values] == [True, True, False]
    assert [math.isnan(value) for value in scores.parts["ctc"]] == [True, True, False]
    assert scores.unscored == 2 and scores.failed == 0
    reward = genrl_rewards.load("ocr", {"crop": "ink", "alphabet": CAPITALS, "target": "text"})
    assert genrl_rewards.needs(reward) == genrl_rewards.Needs(("images", "text"))
    texts = [ocr.quoted(prompt) for prompt in prompts]
    scores = genrl_rewards.score(reward, images=images, prompts=["a sign"] * 3, columns={"text": texts})
    assert scores.parts["exact"] == [1.0] * 3
    video = torch.stack([torch.stack([images[0]] * 2), torch.stack([images[1], torch.full((3, 64, 64), 0.8)])])
    assert genrl_rewards.score(quick, images=video, prompts=prompts[:2]).values == [1.0, 0.5]


@pytest.mark.parametrize(("text", "size"), [("hello", 64), ("Moon", 160), ("OPEN", 64), ("route66", 160)])
def test_text_in_either_case_is_read_anywhere(detecting: ocr.Ocr, text: str, size: int) -> None:
    image = np.asarray(written(text, size, y=0.05))
    assert [line.text for line in detecting.read(image)] == [text.lower()]


def test_several_lines_are_read_from_top_to_bottom(detecting: ocr.Ocr) -> None:
    picture = Image.new("RGB", (128, 160), (235, 230, 220))
    picture.paste(written("FRESH", 128).crop((0, 20, 128, 90)), (0, 85))
    picture.paste(written("BREAD", 128).crop((0, 20, 128, 90)), (0, 5))
    scores = genrl_rewards.score(detecting, images=tensor(picture), prompts=['"bread fresh"'])
    assert scores.parts["exact"] == [1.0] and scores.parts["ctc"][0] > 0.8
    image = np.asarray(written("HEY!", 128))
    (line,) = detecting.read(image)
    assert line.text.startswith("hey") and set(line.text) <= set(string.ascii_lowercase)
    assert [line.text for line in detecting.read(image, target="wow!")] == ["hey!"]
    digits = genrl_rewards.load("ocr", {"crop": "ink", "alphabet": "0123456789"})
    assert all(set(line.text) <= set("0123456789") for line in digits.read(image))


def test_the_recogniser_gets_blue_first(quick: ocr.Ocr, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Spy:
        def run(self, names: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            given.extend(feed.values())
            return [np.zeros((1, 4, 18710), np.float32)]

    monkeypatch.setattr(quick._reader, "_session", Spy())
    quick.read(np.asarray(written("OPEN")))
    blue, green, red = given[0][0].max((1, 2))
    assert [blue, green, red] == pytest.approx([level / 127.5 - 1 for level in (220, 230, 235)])  # the ground's


def test_pictures_without_text_score_zero(quick: ocr.Ocr, detecting: ocr.Ocr) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    images = tensor(np.full((64, 64, 3), 200, np.uint8), noise)
    for reward in (quick, detecting):
        scores = genrl_rewards.score(reward, images=images, prompts=['"OPEN"'] * 2)
        assert scores.values == [0.0, 0.0] and scores.failed == 0
        assert max(scores.parts["ctc"]) < 0.1


def test_the_dense_score_sums_over_alignments() -> None:
    """Two columns, one letter: P(a) = 1 - P(blank blank), worked by hand."""
    table = np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]], np.float32)
    line = ocr.Line("a", 0.7, ("a", "b"), table)
    assert ocr.ctc([line], "A") == pytest.approx(0.6 * 0.7 + 0.3 * 0.2 + 0.3 * 0.7, abs=1e-6)
    assert ocr.ctc([line], "ab") == pytest.approx(math.sqrt(0.3 * 0.1), abs=1e-6)
    assert ocr.ctc([line], "aa") == 0.0, "two equal letters need a blank between, so three columns"
    assert ocr.ctc([line], "c") == 0.0 and ocr.ctc([], "a") == 0.0


def test_wrong_arguments_and_missing_engines_are_refused(monkeypatch: Any) -> None:
    result, hidden = importlib.util.find_spec, ("pytesseract", "paddleocr")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else result(name))
    for args, words in (
        ({"variant": "ned"}, "ocr: unknown variant 'ned'. Did you mean 'ned_max'"),
        ({"crop": "whole"}, "ocr: unknown crop 'whole'. Known: detect, ink"),
        ({"alphabets": "ABC"}, "Did you mean 'alphabet'"),
        ({"fold": "cases"}, "ocr: unknown fold 'cases'. Did you mean 'case'"),
        ({"engine": "tesserakt"}, "ocr: unknown engine 'tesserakt'. Did you mean 'tesseract'"),
        ({"engine": "tesseract", "variant": "ctc"}, "variant 'ctc' needs the probabilities that only 'rapidocr' gives"),
        ({"engine": "tesseract"}, r"needs 'pytesseract'.*pip install 'pytesseract"),
        ({"engine": "paddleocr"}, r"needs 'paddleocr'.*pip install 'paddleocr"),
    ):
        with pytest.raises(ValueError, match=words):
            genrl_rewards.load("ocr", args)


def test_case_and_spaces_are_read_where_they_count() -> None:
    picture = tensor(written("Open LATE", 160, y=0.3))
    scores = {}
    for fold in ("case_space", "case", "space", "none"):
        reward = genrl_rewards.load("ocr", {"fold": fold, "variant": "exact"})
        prompts = ['"Open LATE"', '"open late"', '"OpenLATE"']
        scores[fold] = genrl_rewards.score(reward, images=picture.repeat(3, 1, 1, 1), prompts=prompts).values
    assert scores["case_space"] == [1, 1, 1] and scores["case"] == [1, 1, 0]
    assert scores["space"] == [1, 0, 1] and scores["none"] == [1, 0, 0]
