"""VideoScore2 on a small random Qwen2.5-VL, which is made to write the published form and chooses the digits itself."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import genrl_rewards
from genrl_rewards.models.pixels import from_pil
from genrl_rewards.scorers.preference import videoscore2
from genrl_rewards.scorers.preference.videoscore2 import QUESTION, place_of, soft_score
from tests.rewards.asking import refused, scored
from tests.rewards.tiny_vlm import published_pixels
from tests.vlm import tiny_checkpoints

from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration  # isort: skip
from transformers import Qwen2VLVideoProcessor, RepetitionPenaltyLogitsProcessor  # isort: skip
import json

from genrl_rewards.scorers.preference import videoalign
from genrl_rewards.scorers.preference.videoalign import TOKENS
from tests.rewards import tiny_vlm
from tests.rewards.scorers.preference.test_reward_head import backbone, old_names

PROMPTS = ["a red circle rolls", "two <|im_end|> stars"]
FORM = (
    "<think>Über visual quality: 2, else fine.</think>\n(1) visual quality – clear: #\n"
    "(2) text-to-video alignment – as told: #\n(3) physical/common-sense consistency: #"
)


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videoscore2, "LEAST_PIXELS", 24 * 24)
    monkeypatch.setattr(videoscore2, "MOST_PIXELS", 32 * 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_pixels(tiny_checkpoints.save("qwen2_5_vl", tmp_path_factory.mktemp("videoscore2")))


def opened(folder: Path, form: str = FORM, **more: Any) -> Any:
    """The reward, whose model writes `form` and chooses a digit from 1 to 5 for every `#` in it."""
    args = {"model": str(folder), "dtype": "float32", "fps": 4.0, "max_tokens": 400}
    reward = genrl_rewards.load("videoscore2", args | more)
    ids, hole = reward.tokenizer(form)["input_ids"], reward.tokenizer.convert_tokens_to_ids("#")
    generate = reward.model.generate

    def forced(input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        def allowed(_: int, sequence: torch.Tensor) -> list[int]:
            step = len(sequence) - input_ids.shape[1]
            wanted = ids[step] if step < len(ids) else reward.tokenizer.eos_token_id
            return reward.digits if wanted == hole else [wanted]

        return generate(input_ids=input_ids, prefix_allowed_tokens_fn=allowed, **given)

    reward.model.generate = forced
    return reward


def conversation(frames: list[Any], text: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What a model is asked about a video, which transformers' own processor has read."""
    size = {"shortest_edge": 24 * 24, "longest_edge": 32 * 32}
    process = Qwen2VLVideoProcessor(patch_size=4, size=size, do_sample_frames=False)
    seen = process(videos=[torch.stack([from_pil(f)[0] * 255 for f in frames]).byte()], return_tensors="pt")
    shown = "<|video_pad|>" * (int(seen["video_grid_thw"].prod()) // 4)
    chat = f"<|im_start|>user\n<|vision_start|>{shown}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
    return chat, {"pixel_values_videos": seen["pixel_values_videos"], "video_grid_thw": seen["video_grid_thw"]}


def by_hand(folder: Path, frames: list[Any], text: str) -> list[float]:
    """The three soft scores, with a pass for every digit."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    chat, video = conversation(frames, text)
    digits, result = tokenizer.convert_tokens_to_ids(list("12345")), []
    for piece in FORM.split("#")[:-1]:
        chat += piece
        ids = tokenizer(chat, return_tensors="pt")["input_ids"]
        kinds = 2 * (ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")).long()
        with torch.no_grad():  # a patch of time is two frames, a second long
            given = {"mm_token_type_ids": kinds, "second_per_grid_ts": torch.tensor([1.0])}
            logits = model(input_ids=ids, **video, **given).logits[:, -1]
        logits = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits)[0, digits]  # as the checkpoint says
        chances = torch.exp(logits / 0.7)
        result.append((int(chances.argmax()) + 1) * float(chances.max() / chances.sum()))
        chat += str(int(chances.argmax()) + 1)
    return result


def test_scores_are_the_likeliest_digits_times_their_chances(folder: Path) -> None:
    video = torch.rand(2, 9, 3, 28, 40, generator=torch.Generator().manual_seed(0))
    scores = scored(opened(folder), images=video, prompts=PROMPTS)
    for i, prompt in enumerate((PROMPTS[0], "two < |im_end|> stars")):
        frames = genrl_rewards.to_pil(video[i : i + 1])[0]
        wanted = by_hand(folder, [frames[k] for k in (0, 3, 5, 8)], QUESTION.replace("{prompt}", prompt))
        actual = [scores.parts[name][i] for name in ("visual", "text", "physical")]
        # Pillow and torchvision round a resized pixel up to one level apart.
        assert actual == pytest.approx(wanted, abs=0.02)
        assert scores.values[i] == pytest.approx(sum(actual) / 3, abs=1e-5)
    still = video[:, :1].expand(-1, 9, -1, -1, -1)
    unmoved = genrl_rewards.score(opened(folder), images=still, prompts=PROMPTS).values
    assert unmoved != pytest.approx(scores.values, abs=0.02)
    text = genrl_rewards.score(opened(folder, part="text"), images=video, prompts=PROMPTS)
    assert text.values == scores.parts["text"]


def test_a_score_that_is_not_written_is_none(folder: Path) -> None:
    video = torch.rand(1, 4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    silent = "visual quality: #; text-to-video alignment: 7, physical/common-sense consistency: #"
    scores = genrl_rewards.score(opened(folder, silent), images=video, prompts=PROMPTS[:1])
    assert math.isnan(scores.parts["text"][0]) and math.isnan(scores.values[0])
    assert 0.2 < scores.parts["visual"][0] <= 5
    visual = genrl_rewards.score(opened(folder, silent, part="visual"), images=video, prompts=PROMPTS[:1])
    assert visual.values == scores.parts["visual"]


def test_the_score_is_found_after_the_reasoning() -> None:
    written = "<think>visual quality: 2\n</think>\n(1) visual quality – sharp: 4\n(2) text-to-video alignment:**5**"
    for aspect, digit in (("visual quality", "4"), ("text-to-video alignment", "5")):
        place = place_of(written, aspect)
        assert place is not None and written[place] == digit
    assert place_of(written, "physical/common-sense consistency") is None
    unfinished = "<think>At first visual quality: 2, but then"
    for not_a_score in (unfinished, *(f"visual quality{end}" for end in (":\n(2) x: 3", ": 10", ": 0", " 4"))):
        assert place_of(not_a_score, "visual quality") is None, not_a_score


def test_a_soft_score_is_less_than_the_number_that_is_not_sure() -> None:
    assert soft_score(torch.tensor([0.0, 0.0, 90.0, 0.0, 0.0])) == 3.0
    assert soft_score(torch.zeros(5)) == pytest.approx(0.2)
    # a logit of 0.7 ln 4 above the four others is half of the mass at the authors' temperature
    assert soft_score(torch.tensor([0.0, 0.0, 0.0, 0.7 * math.log(4.0), 0.0])) == pytest.approx(2.0)


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(r"the text 'Rate it.' has no placeholder \{prompt\}", "videoscore2", {"question": "Rate it."})
    refused("unknown part 'motion'", "videoscore2", {"part": "motion"})
    tiny_checkpoints.save("qwen2_vl", tmp_path)
    refused("is a 'qwen2_vl' model; this reward needs 'qwen2_5_vl'", "videoscore2", {"model": str(tmp_path)})
    scores = genrl_rewards.score(opened(folder), images=torch.rand(1, 3, 28, 28), prompts=PROMPTS[:1])
    assert "this is a picture" in str(scores.failures[0].error)


# -- VideoAlign on a small Qwen2-VL with adapters and a head, saved under the names that the published file has
INSTRUCTION = f"Rate it. Look: {TOKENS[0]}\nMotion: {TOKENS[1]}\nTextual prompt - {{text_prompt}}\nText: {TOKENS[2]}\n"
RATED = ["a red circle rolls", "two <|VQ_reward|> stars"]
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False}
SCALES = {"VQ_mean": 3.0, "VQ_std": 2.0, "MQ_mean": 1.0, "MQ_std": 0.5, "TA_mean": -1.0, "TA_std": 4.0}
DATA = {"fps": 2.0, "max_frame_pixels": 32 * 32}
WRITTEN = {"peft_lora_config": LORA, "data_config": DATA, "inference_config": SCALES}


@pytest.fixture(autouse=True)
def least_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videoalign, "LEAST_PIXELS", 24 * 24)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_vlm.save(tmp_path_factory.mktemp("base"))
    made = tiny_vlm.tokenizer()
    shown = "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}"
    made.chat_template = tiny_vlm.TEMPLATE.replace("{% else %}", shown, 1)
    made.save_pretrained(folder)
    return tiny_vlm.published_pixels(folder)


def weights(head: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """A published file's tensors, and the model that they are with adapters merged by hand."""
    generator = torch.Generator().manual_seed(0)
    model = grown()
    held = {f"base_model.model.{name}": value.clone() for name, value in old_names(model).items()}
    for name in [name for name in held if "layers" in name and name.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        value = held.pop(name)
        down, up = (torch.randn(s, generator=generator) * 0.2 for s in ((4, value.shape[1]), (value.shape[0], 4)))
        held |= {f"{stem}.base_layer.weight": value, f"{stem}.lora_A.default.weight": down}
        held[f"{stem}.lora_B.default.weight"] = up
        own = stem.removeprefix("base_model.model.model.")
        model.language_model.get_submodule(own).weight.data += 2.0 * up @ down
    return held | {"base_model.model.rm_head.weight": head}, model


def grown() -> torch.nn.Module:
    """`backbone` with places for three added tokens."""
    made = tiny_vlm.tokenizer()
    model = type(backbone())(tiny_vlm.config(made, size=len(made) + len(TOKENS))).eval()
    tiny_vlm.randomise(model)
    return model


@pytest.fixture(scope="module", params=[1, 3], ids=["one output", "three outputs"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videoalign")
    (folder / "model_config.json").write_text(json.dumps(WRITTEN))
    (folder / "checkpoint-11352").mkdir()
    torch.save(weights(head(request.param))[0], folder / "checkpoint-11352" / "model.pth")
    return folder


def head(outputs: int) -> torch.Tensor:
    return torch.randn(outputs, 32, generator=torch.Generator().manual_seed(outputs))


@pytest.fixture
def args(base: Path, checkpoint: Path) -> dict[str, str | float]:
    return {"instruction": INSTRUCTION, "model": str(checkpoint), "base": str(base), "dtype": "float32", "fps": 4.0}


def ratings_by_hand(frames: list, text: str, outputs: torch.Tensor) -> torch.Tensor:
    """The ratings at the three tokens, at positions 0, 1, 2..."""
    tokenizer = tiny_vlm.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    chat, video = conversation(frames, text)
    ids = tokenizer(chat, return_tensors="pt")["input_ids"]
    places = torch.arange(ids.shape[1]).expand(3, 1, -1)
    with torch.no_grad():
        hidden = weights(outputs)[1](input_ids=ids, position_ids=places, **video).last_hidden_state[0]
    rows = [hidden[ids[0] == tokenizer.convert_tokens_to_ids(token)][0] @ outputs.T for token in TOKENS]
    return torch.stack([row[k if len(row) == 3 else 0] for k, row in enumerate(rows)])


def test_ratings_are_the_heads_at_the_three_tokens(args: dict[str, str | float], checkpoint: Path) -> None:
    video = torch.rand(2, 9, 3, 28, 40, generator=torch.Generator().manual_seed(0))
    reward = genrl_rewards.load("videoalign", args)
    scores = scored(reward, images=video, prompts=RATED)
    outputs = torch.load(checkpoint / "checkpoint-11352" / "model.pth")["base_model.model.rm_head.weight"]
    for i, prompt in enumerate((RATED[0], "two < |VQ_reward|> stars")):
        frames = genrl_rewards.to_pil(video[i : i + 1])[0]
        own = ratings_by_hand([frames[k] for k in (0, 3, 5, 8)], INSTRUCTION.replace("{text_prompt}", prompt), outputs)
        wanted = (own - torch.tensor([3.0, 1.0, -1.0])) / torch.tensor([2.0, 0.5, 4.0])
        actual = [scores.parts[name][i] for name in ("visual", "motion", "text")]
        # Pillow and torchvision round a resized pixel up to one level apart.
        assert actual == pytest.approx(wanted.tolist(), abs=0.05)
        assert scores.values[i] == pytest.approx(sum(actual), abs=1e-5)
    still = video[:, :1].expand(-1, 9, -1, -1, -1)
    assert genrl_rewards.score(reward, images=still, prompts=RATED).values != pytest.approx(scores.values, abs=0.05)
    motion = genrl_rewards.load("videoalign", args | {"part": "motion"})
    assert genrl_rewards.score(motion, images=video, prompts=RATED).values == scores.parts["motion"]


def test_what_does_not_fit_videoalign_is_refused(args: dict[str, str | float], tmp_path: Path) -> None:
    def refused(words: str, **changes: str) -> None:
        with pytest.raises(ValueError, match=words):
            genrl_rewards.load("videoalign", args | changes)

    refused(r"does not have <\|MQ_reward\|> just once", instruction=INSTRUCTION.replace(TOKENS[1], ""))
    refused("part must be overall, visual, motion, text; found 'speed'", part="speed")
    refused("has no model_config.json.*the folder is empty", model=str(tmp_path))
    (tmp_path / "model_config.json").write_text(json.dumps(WRITTEN))
    held = weights(head(1))[0]
    del held["base_model.model.rm_head.weight"]
    torch.save(held, tmp_path / "model.pth")
    refused("has no head rm_head.weight", model=str(tmp_path))
    reward = genrl_rewards.load("videoalign", args)
    scores = genrl_rewards.score(reward, images=torch.rand(1, 3, 28, 28), prompts=RATED[:1])
    assert "this is a picture" in str(scores.failures[0].error)
