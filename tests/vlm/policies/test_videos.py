"""Clips as videos: tokens, times and positions of each family, and the equalities that pictures have."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.vlm.collect import _asked
from genrl.vlm.policies.pictures import black, masked, with_pictures
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import Prompt, Turn, without_clips
from genrl.vlm.policies.videos import Clip
from genrl.vlm.tasks import Row
from tests.vlm import tiny_checkpoints, vlm_runs
from tests.vlm.by_hand import naive_log_probs
from tests.vlm.policies.test_token_policy import ROUNDING, N, picture, sample

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")


def clip(seed: int, numbers: tuple[int, ...], total: int = 20, fps: float = 4.0) -> Clip:
    return Clip(tuple(picture(seed + k, 32, 24) for k in range(len(numbers))), numbers, total, fps)


def questions() -> list[Prompt]:
    """A clip of an odd number of frames; a picture and a shorter clip; a clip of an earlier turn; a picture; a text."""
    long, short = clip(0, (0, 5, 10, 14, 19)), clip(50, (0, 4))
    return [
        Prompt(("In ", long, " what ?")),
        Prompt((picture(9, 24, 40), "in", short, " ?"), system="Be brief"),
        Prompt(("And then ?",), before=(Turn("user", (short, "What ?")), Turn("assistant", ("a dot",)))),
        Prompt((picture(8, 36, 36), "?")),
        Prompt(("No picture.",)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_shared_prompts_and_rows_equal_one_by_one(load: Callable[[str], Policy], family: str) -> None:
    policy = load(family)
    assert policy.videos
    prompts = [policy.encode(prompt) for prompt in questions()]
    written = sample(policy, prompts)
    assert not torch.isin(written.tokens, policy.forbidden).any()
    with torch.no_grad():
        # at the positions of the policy: after a clip transformers' own are others (`videos.gone_on`)
        own = naive_log_probs(policy, [prompts[k] for k in written.group], written.tokens, written.mask)
        want = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        arguments = (prompts, written.tokens, written.mask)
        shared = policy.log_probs(*arguments, group=written.group)
        plain = policy.log_probs(*arguments, group=written.group, share_prefix=False)
    assert len(written.group) == N * len(prompts)
    for got in (written.log_prob, shared.log_prob, plain.log_prob):
        assert (got - want).abs().max() < ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_videos_cannot_be_sampled_and_the_clip_counts(load: Callable[[str], Policy], family: str) -> None:
    policy, prompt = load(family), questions()[0]
    tokens, mask = torch.full((1, 4), 65), torch.ones(1, 4)
    encoded = policy.encode(prompt)
    text = policy.tokenizer.decode(encoded.tokens.ids)
    special = [token for token in ("<|video_pad|>", "<|vision_start|>", "<IMG_CONTEXT>", "<img>") if token in text]
    assert special and set(policy.tokenizer.convert_tokens_to_ids(special)) <= set(policy.forbidden.tolist())
    dark = policy.encode(with_pictures(prompt, black, np.random.default_rng(0)))
    assert torch.equal(encoded.tokens.ids, dark.tokens.ids)
    with torch.no_grad():
        options = {"group": torch.tensor([0])}
        seen, unseen = (policy.log_probs([one], tokens, mask, **options).log_prob for one in (encoded, dark))
    assert (seen - unseen).abs().max() > 100 * ROUNDING


def test_the_positions_of_qwen2_5_follow_the_clock(load: Callable[[str], Policy]) -> None:
    """Arithmetic of its paper (arXiv 2502.13923, 2.1.2): a pair of frames is later by its seconds, in steps of the
    model's tokens a second; rows and columns count from where the video begins, and text goes on after the largest."""
    policy = load("qwen2_5_vl")
    result = policy.encode(questions()[0])
    time, height, width = result.tokens.pixels["video_grid_thw"][0].tolist()
    assert (time, result.tokens.pixels["second_per_grid_ts"].tolist()) == (3, [2 / (5 / 20 * 4.0)])
    at = (result.tokens.ids == policy.tokenizer.convert_tokens_to_ids("<|video_pad|>")).nonzero()[:, 0]
    first, step = int(at[0]), 2.0 * policy.model.config.vision_config.tokens_per_second
    places = np.stack(np.meshgrid(np.arange(3) * step, np.arange(height // 2), np.arange(width // 2), indexing="ij"))
    want = first + places.reshape(3, -1)
    assert result.positions[:, at].tolist() == want.tolist()
    after = result.positions[:, int(at[-1]) + 1 :]
    assert after.tolist() == [(int(want.max()) + 1 + np.arange(after.shape[1])).tolist()] * 3


def test_moments_of_qwen3_are_written_before_their_frames(load: Callable[[str], Policy]) -> None:
    """Mean times of the pairs of frames 0 and 5, 10 and 14, and 19 twice, at 4 a second, and no marks beside theirs."""
    policy = load("qwen3_vl")
    text = policy.tokenizer.decode(policy.encode(questions()[0]).tokens.ids).replace("<|video_pad|>", "")
    moments = "".join(f"<{seconds} seconds><|vision_start|><|vision_end|>" for seconds in (0.6, 3.0, 4.8))
    assert f"In {moments} what ?" in text


def test_frames_of_internvl_are_one_tile_each(load: Callable[[str], Policy]) -> None:
    policy, prompt = load("internvl"), questions()[0]
    result = policy.encode(prompt).tokens
    assert result.pixels["pixel_values"].shape[0] == 5
    assert policy.tokenizer.decode(result.ids).count("Frame") == 5
    assert policy.encode(without_clips(prompt)).tokens.pixels["pixel_values"].shape[0] > 5


@pytest.mark.parametrize("family", ["llava_onevision", "smolvlm", "glm4v"])
def test_others_see_the_frames_as_pictures(load: Callable[[str], Policy], family: str) -> None:
    policy, prompt = load(family), questions()[0]
    assert not policy.videos
    one, other = policy.encode(prompt).tokens, policy.encode(without_clips(prompt)).tokens
    assert torch.equal(one.ids, other.ids)
    assert all(torch.equal(value, other.pixels[name]) for name, value in one.pixels.items())


def test_with_vllm_the_frames_are_pictures(tmp_path: Path) -> None:
    model = str(tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model"))
    for vllm, native in ((None, True), ({}, False)):
        config = vlm_runs.config(tmp_path, vlm={"path": model}, generation={"vllm": vllm})
        assert Policy.open(config, "cpu", model).videos is native


def test_all_frames_of_a_clip_are_changed_alike() -> None:
    white = Clip((Image.new("RGB", (32, 24), "white"),) * 3, (0, 1, 2), 3, 1.0)
    result = with_pictures(Prompt((white, "?")), masked(0.5, 8), np.random.default_rng(0)).parts[0]
    assert isinstance(result, Clip) and result.numbers == white.numbers
    first, *others = [np.array(frame) for frame in result.frames]
    assert 0 < first.mean() < 255 and all(np.array_equal(first, other) for other in others)


def test_what_cannot_be_is_said(load: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy, good = load("qwen2_5_vl"), clip(0, (0, 1))
    uneven = replace(good, frames=(good.frames[0], picture(1, 20, 20)))
    with pytest.raises(ValueError, match="a:1: the frames of a clip have different sizes"):
        policy.encode(Prompt((uneven, "?"), where="a:1"))
    with pytest.raises(ValueError, match="a:1: a clip cannot be collected"):
        _asked(Row("a:1", Prompt((good, "?")), {}), tmp_path, 0)
    monkeypatch.setattr("genrl.vlm.policies.processor.qwen_with_videos", lambda *_: None)  # as without torchvision
    bare = Policy(str(tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model")))
    with pytest.raises(ValueError, match="a:1: this model is given clips as videos, which are resized by torchvision"):
        bare.encode(Prompt((good, "?"), where="a:1"))
