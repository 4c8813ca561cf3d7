"""VideoAlign on a small Qwen2-VL with adapters and a head, saved under the names that the published file has."""

import json
from pathlib import Path

import pytest
import torch

import genrl_rewards
from genrl_rewards.models.pixels import from_pil
from genrl_rewards.scorers.preference import videoalign
from genrl_rewards.scorers.preference.videoalign import TOKENS
from tests.rewards import tiny_vlm
from tests.rewards.asking import scored
from tests.rewards.scorers.preference.test_reward_head import backbone, old_names

from transformers import Qwen2VLVideoProcessor  # isort: skip

INSTRUCTION = f"Rate it. Look: {TOKENS[0]}\nMotion: {TOKENS[1]}\nTextual prompt - {{text_prompt}}\nText: {TOKENS[2]}\n"
PROMPTS = ["a red circle rolls", "two <|VQ_reward|> stars"]
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False}
SCALES = {"VQ_mean": 3.0, "VQ_std": 2.0, "MQ_mean": 1.0, "MQ_std": 0.5, "TA_mean": -1.0, "TA_std": 4.0}
DATA = {"fps": 2.0, "max_frame_pixels": 32 * 32}
WRITTEN = {"peft_lora_config": LORA, "data_config": DATA, "inference_config": SCALES}


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
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


def by_hand(frames: list, text: str, outputs: torch.Tensor) -> torch.Tensor:
    """The ratings at the three tokens, by transformers' own processor of videos and positions 0, 1, 2..."""
    tokenizer = tiny_vlm.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    size = {"shortest_edge": 24 * 24, "longest_edge": 32 * 32}
    process = Qwen2VLVideoProcessor(patch_size=4, size=size, do_sample_frames=False)
    seen = process(videos=[torch.stack([from_pil(f)[0] * 255 for f in frames]).byte()], return_tensors="pt")
    shown = "<|video_pad|>" * (int(seen["video_grid_thw"].prod()) // 4)
    chat = f"<|im_start|>user\n<|vision_start|>{shown}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat, return_tensors="pt")["input_ids"]
    places = torch.arange(ids.shape[1]).expand(3, 1, -1)
    given = {"pixel_values_videos": seen["pixel_values_videos"], "video_grid_thw": seen["video_grid_thw"]}
    with torch.no_grad():
        hidden = weights(outputs)[1](input_ids=ids, position_ids=places, **given).last_hidden_state[0]
    rows = [hidden[ids[0] == tokenizer.convert_tokens_to_ids(token)][0] @ outputs.T for token in TOKENS]
    return torch.stack([row[k if len(row) == 3 else 0] for k, row in enumerate(rows)])


def test_ratings_are_the_heads_at_the_three_tokens(args: dict[str, str | float], checkpoint: Path) -> None:
    video = torch.rand(2, 9, 3, 28, 40, generator=torch.Generator().manual_seed(0))
    reward = genrl_rewards.load("videoalign", args)
    scores = scored(reward, images=video, prompts=PROMPTS)
    outputs = torch.load(checkpoint / "checkpoint-11352" / "model.pth")["base_model.model.rm_head.weight"]
    for i, prompt in enumerate((PROMPTS[0], "two < |VQ_reward|> stars")):
        frames = genrl_rewards.to_pil(video[i : i + 1])[0]
        own = by_hand([frames[k] for k in (0, 3, 5, 8)], INSTRUCTION.replace("{text_prompt}", prompt), outputs)
        wanted = (own - torch.tensor([3.0, 1.0, -1.0])) / torch.tensor([2.0, 0.5, 4.0])
        found = [scores.parts[name][i] for name in ("visual", "motion", "text")]
        # Pillow and torchvision round a resized pixel up to one level apart.
        assert found == pytest.approx(wanted.tolist(), abs=0.05)
        assert scores.values[i] == pytest.approx(sum(found), abs=1e-5)
    still = video[:, :1].expand(-1, 9, -1, -1, -1)
    assert genrl_rewards.score(reward, images=still, prompts=PROMPTS).values != pytest.approx(scores.values, abs=0.05)
    motion = genrl_rewards.load("videoalign", args | {"part": "motion"})
    assert genrl_rewards.score(motion, images=video, prompts=PROMPTS).values == scores.parts["motion"]


def test_what_does_not_fit_is_refused(args: dict[str, str | float], tmp_path: Path) -> None:
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
    scores = genrl_rewards.score(reward, images=torch.rand(1, 3, 28, 28), prompts=PROMPTS[:1])
    assert "this is a picture" in str(scores.failures[0].error)
