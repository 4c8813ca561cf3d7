"""Places for pictures and clips, chat rows, frames of clips and limits of pixels."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Pixels, Prompt, check_pixels, without_clips
from genrl.vlm.policies.videos import Clip
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.turns import clip_of, spread
from tests.vlm import tiny_checkpoints, vlm_runs


def shades(folder: Path, number: int) -> list[str]:
    """Files of grey pictures, each of its own shade."""
    for k in range(number):
        Image.new("RGB", (16, 16), (20 * k, 20 * k, 20 * k)).save(folder / f"{k}.png")
    return [f"{k}.png" for k in range(number)]


def asked(folder: Path, row: dict[str, Any], run: dict[str, Any] | None = None, **task: Any) -> Prompt:
    """The question of a row of a .jsonl file."""
    (folder / "a.jsonl").write_text(json.dumps(row))
    config = vlm_runs.config(folder, **(run or {}), task={"name": None, "train": str(folder / "a.jsonl"), **task})
    return Questions(config, "train")[0].prompt


def seen(prompt: Prompt) -> list[tuple[str, list[str]]]:
    """Roles, texts and names of pictures, and of frames of clips, of all turns."""
    turns = without_clips(prompt).turns
    return [(role, [part if isinstance(part, str) else part.name for part in parts]) for role, parts in turns]


def test_pictures_go_to_their_places(tmp_path: Path) -> None:
    files = shades(tmp_path, 2)
    text = "Is <image> darker than <image> ?"
    result = asked(tmp_path, {"prompt": text, "images": files}, image="images")
    assert seen(result) == [("user", ["Is ", "0.png", " darker than ", "1.png", " ?"])]
    without = asked(tmp_path, {"prompt": "Which is darker ?", "images": files}, image="images")
    assert seen(without) == [("user", ["0.png", "1.png", "Which is darker ?"])]
    alone = asked(tmp_path, {"prompt": "How much is 1 + 1 ?", "image": None})
    assert seen(alone) == [("user", ["How much is 1 + 1 ?"])]


def test_what_does_not_fit_names_the_row_before_anything_is_trained(tmp_path) -> None:
    for row, text in (
        ({"prompt": "<image> and <image> ?", "image": ["0.png"]}, "a.jsonl:1: the question has 2 places <image>, and"),
        ({"prompt": "<image> ?", "image": None}, "has 1 places <image>, and the row 0"),
        ({"prompt": "<video> ?", "image": None}, "has 1 places <video>, and the row 0"),
        ({"prompt": [{"role": "user", "content": 3}], "image": None}, "a.jsonl:1: a message is {role: system"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "image": None}, "messages are by user and assistant"),
        ({"prompt": [{"role": "user", "content": [{"type": "sound"}]}], "image": None}, "a part is {type: text | im"),
        ({"prompt": [], "image": None}, "messages are by user and assistant in turn"),
    ):
        shades(tmp_path, 1)
        with pytest.raises(ValueError, match=text.replace("|", r"\|").replace("{", r"\{").replace("<", "<")):
            asked(tmp_path, row)


def test_chat_rows(tmp_path: Path) -> None:
    shades(tmp_path, 3)
    parts = [{"type": "image"}, {"type": "text", "text": "Darker ?"}, {"type": "image", "image": "2.png"}]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "See <image>."},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "no"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat, "images": ["0.png", "1.png"]}))
    columns = {"prompt": "messages", "image": "images", "system": "Long."}
    task = {"name": None, "train": str(tmp_path / "a.jsonl"), **columns}
    row = Questions(vlm_runs.config(tmp_path, task=task), "train")[0]
    assert row.prompt.system == "Be brief." and row.columns == {"answer": "no"}
    assert seen(row.prompt) == [
        ("user", ["See ", "0.png", "."]),
        ("assistant", ["I see."]),
        ("user", ["1.png", "Darker ?", "2.png"]),
    ]
    assert [part.name for part in row.prompt.pieces if isinstance(part, Path)] == ["0.png", "1.png", "2.png"]


def test_a_model_that_does_not_look_is_asked_by_messages_and_never_without_a_rows_picture(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Two ?"}]
    blind = {"vlm": {"path": "assets/tiny-dllm", "output": "masked_text", "lora": None}}
    shades(tmp_path, 1)
    result = asked(tmp_path, {"prompt": chat}, blind)
    assert (result.system, result.parts) == ("Short.", ("Two ?",))
    with pytest.raises(ValueError, match=r"a.jsonl:1: .*output: masked_text looks at nothing.*task.image: null"):
        asked(tmp_path, {"prompt": chat, "image": "0.png"}, blind)


def test_chat_rows_of_a_data_set(tmp_path: Path) -> None:
    part = {"type": datasets.Value("string"), "text": datasets.Value("string")}
    kinds = {"messages": [{"role": datasets.Value("string"), "content": [part]}], "image": datasets.Image()}
    said = [{"type": "image"}, {"type": "text", "text": "how many shapes are there ?"}]
    asked = {"messages": [{"role": "user", "content": said}], "image": Image.new("RGB", (64, 64))}
    made = [asked | {"answer": str(k)} for k in range(4)]
    features = datasets.Features(kinds | {"answer": datasets.Value("string")})
    datasets.Dataset.from_list(made, features=features).to_parquet(tmp_path / "train.parquet")
    task = {"name": None, "train": f"{tmp_path}:train", "prompt": "messages"}
    picture, text = Questions(vlm_runs.config(tmp_path, task=task), "train")[1].prompt.parts
    assert picture.size == (64, 64) and text == said[1]["text"]


def test_frames_are_taken_evenly() -> None:
    assert spread(3, 8) == [0, 1, 2] and spread(9, 3) == [0, 4, 8] and spread(5, 1) == [0]


def test_frames_of_a_video_file(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for k in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 6 * k, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())

    def levels(fps: float, most: int) -> list[float]:
        return [float(np.array(frame).mean()) for frame in clip_of(tmp_path / "a.mp4", fps, most, "here").frames]

    two_a_second = levels(2.0, 99)  # 4 seconds
    assert len(two_a_second) == 8 and two_a_second == sorted(two_a_second)
    few = levels(10.0, 3)
    assert len(few) == 3 and few[0] < 10 and few[2] > 220
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"here: the video .*b\.mp4 cannot be read"):
        clip_of(tmp_path / "b.mp4", 2.0, 4, "here")
    prompt = asked(tmp_path, {"prompt": "In <video>, what ?", "video": "a.mp4"}, image=None, video="video", frames=2)
    before, clip, after = prompt.parts
    assert (before, after) == ("In ", ", what ?") and [frame.size for frame in clip.frames] == [(32, 32)] * 2
    assert clip.numbers == (0, 39) and clip.total == 40 and clip.fps == pytest.approx(10.0)


def test_clips_as_lists_of_frames(tmp_path: Path) -> None:
    files = shades(tmp_path, 9)
    own = {"image": None, "video": "clip", "frames": 3}
    one = asked(tmp_path, {"prompt": "What ?", "clip": files}, **own)
    assert seen(one) == [("user", ["0.png", "4.png", "8.png", "What ?"])]
    clip = one.parts[0]
    assert isinstance(clip, Clip) and (clip.numbers, clip.total, clip.fps) == ((0, 4, 8), 9, 2.0)
    two = asked(tmp_path, {"prompt": "<video> or <video> ?", "clip": [files[:2], files[5:7]]}, **own)
    assert seen(two) == [("user", ["0.png", "1.png", " or ", "5.png", "6.png", " ?"])]


def test_pictures_are_kept_within_the_limits_in_their_proportions() -> None:
    tall = Image.new("RGB", (30, 120))
    less, more = Pixels(most=900).fitted(tall), Pixels(least=14400).fitted(tall)
    assert less.size == (15, 60) and more.size == (60, 240) and Pixels(1, 3600).fitted(tall) is tall
    odd = Pixels(most=100).fitted(Image.new("RGB", (31, 7)))
    assert odd.size[0] * odd.size[1] <= 100 and Pixels(most=4).fitted(Image.new("RGB", (400, 1))).size[1] == 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "llava_next"])
def test_limits_reach_every_family(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoints.save(family, tmp_path / "model")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))
    config: VLMConfig = vlm_runs.config(tmp_path, vlm={"path": str(path)}, task={"max_pixels": 256})
    policies = Policy(str(path)), Policy.open(config, "cpu", str(path))
    tokens = [policy.encode(Prompt((picture, "?"))).tokens for policy in policies]
    assert tokens[0].pictures[0].size == (32, 32) and tokens[1].pictures[0].size == (16, 16)
    by_hand = Policy(str(path)).encode(Prompt((picture.resize((16, 16), Image.Resampling.BICUBIC), "?"))).tokens
    assert all(torch.equal(value, tokens[1].pixels[name]) for name, value in by_hand.pixels.items())
    if family == "qwen2_5_vl":
        assert len(tokens[1].ids) < len(tokens[0].ids)
        with pytest.raises(ValueError, match=r"task\.max_pixels: 2,000 is outside of .* 256 to 1,024"):
            check_pixels(Pixels(most=2000), Policy(str(path)).processor)
