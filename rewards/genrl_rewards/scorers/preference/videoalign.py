"""Reward: VideoAlign's VideoReward, a Qwen2-VL that reads a video and rates it in three ways (arXiv 2501.13918).

The head reads the hidden states at three tokens of the instruction. As in `reward_head`, positions are sequential. The
published file has the model with its LoRA beside it, which is merged here.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from PIL.Image import Image

from genrl_rewards.contract import Scored
from genrl_rewards.models.checkpoints import check_type, find, qwen_pictures, read_weights, torch_dtype
from genrl_rewards.models.qwen_video import LEAST_PIXELS, chosen, patches, tokens
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import shown
from genrl_rewards.scorers.preference.reward_head import PLACE, filled_backbone, tokens_of

logger = logging.getLogger(__name__)

TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
PARTS = {"VQ": "visual", "MQ": "motion", "TA": "text"}
"""The three ratings, in the order of TOKENS: their names in `model_config.json` and here."""
FILES = ("checkpoint-11352/model.pth", "model.pth", "model.safetensors")


def merged(weights: Mapping[str, torch.Tensor], lora: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Weights under a peft model's names as those of the model without adapters: W + s B A.

    lora: the checkpoint's `peft_lora_config`; s = alpha / r, with `use_rslora` alpha / sqrt(r).
    """
    plain = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
    state = {name.replace(".base_layer.", "."): value for name, value in plain.items() if ".lora_" not in name}
    for name, down in plain.items():
        if ".lora_A." in name:
            target, up = f"{name.partition('.lora_A.')[0]}.weight", plain[name.replace(".lora_A.", ".lora_B.")]
            rank = len(down)
            scale = lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank)
            # In float32 and rounded once: a product that is rounded by itself adds an error of its own.
            state[target] = (state[target].float() + scale * up.float() @ down.float()).to(state[target].dtype)
    return state


class VideoAlign:
    """A video's visual quality, motion and fit to the prompt: VideoAlign's VideoReward, a Qwen2-VL of 2 billion.

    (Liu et al. 2025, arXiv 2501.13918.)

    `instruction` the text that the checkpoint was trained with, which belongs to its authors:
                  `prompt_template.py:DETAILED_PROMPT_WITH_SPECIAL_TOKEN` of their repository (KwaiVGI/VideoAlign), or a
                  `file.txt` of it, with its placeholder `{text_prompt}` and its three tokens. Another wording gives
                  other scores
    `fps`         frames per second at which the videos are meant to be played (default 16, as Wan's)
    `part`        what is the score: `overall` (default), the sum of `visual`, `motion` and `text`, or one of them
    `model`       hub id or folder of the checkpoint (model_config.json and checkpoint-11352/model.pth)
    `base`        hub id or folder of the Qwen2-VL-2B-Instruct that it was made from; its weights are not needed
    `dtype`       `bfloat16` (default), `float32`, `float16`

    Each rating is normalised by the mean and deviation that the checkpoint names, so 0 is that of a usual video. How
    many frames are read, and how large, is the checkpoint's choice: two per second. Pictures are refused.
    """

    def __init__(
        self,
        instruction: str,
        fps: float = 16.0,
        part: str = "overall",
        model: str = "KwaiVGI/VideoReward",
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        if part not in ("overall", *PARTS.values()):
            raise ValueError(f"videoalign: part must be overall, {', '.join(PARTS.values())}; found {part!r}")
        if not fps > 0:
            raise ValueError(f"videoalign: fps must be above 0, found {fps}")
        self.instruction = judge.read(instruction, "videoalign", holding=PLACE)
        if missing := [token for token in TOKENS if self.instruction.count(token) != 1]:
            raise ValueError(f"videoalign: the text {instruction[:60]!r} does not have {missing[0]} just once")
        self.fps, self.part = fps, part
        check_type(base, ("qwen2_vl",), "videoalign")
        written = json.loads(find(model, ["model_config.json"], "videoalign").read_text(encoding="utf-8"))
        file = find(model, FILES, "videoalign")
        what = f"videoalign: {file}"
        weights = merged(read_weights(file), written.get("peft_lora_config", {}))
        if (head := weights.get("rm_head.weight")) is None or len(head) not in (1, len(TOKENS)):
            raise ValueError(f"{what} has no head rm_head.weight with one or three outputs")
        self.model = filled_backbone(base, weights, what, torch_dtype(dtype, "videoalign")).to(device)
        self.head = head.to(self.model.device, self.model.dtype)
        data, scales = written.get("data_config", {}), written.get("inference_config") or {}
        self.wanted = float(data.get("fps") or 2.0)
        self.mean = torch.tensor([scales.get(f"{name}_mean", 0.0) for name in PARTS])
        self.std = torch.tensor([scales.get(f"{name}_std", 1.0) for name in PARTS])
        self.tokenizer, self.ids = tokens_of(base, TOKENS, self.model, what)
        self.images = qwen_pictures(base, LEAST_PIXELS, int(data.get("max_frame_pixels", 256 * 28 * 28)))
        logger.info("videoalign: %s on %s", what, base)

    def to(self, device: str) -> None:
        """Move the model and its head."""
        self.model.to(device)
        self.head = self.head.to(device)

    @torch.no_grad()
    def __call__(self, pil_images: list[Any], prompts: list[str]) -> Scored:
        rows = [self._ratings(shown(video), prompt) for video, prompt in zip(pil_images, prompts, strict=True)]
        ratings = (torch.stack(rows) - self.mean) / self.std
        parts = {name: ratings[:, k].tolist() for k, name in enumerate(PARTS.values())}
        return (ratings.sum(1).tolist() if self.part == "overall" else parts[self.part]), parts

    def _ratings(self, video: list[Image], prompt: str) -> torch.Tensor:
        """The head's outputs at the three tokens, float32 [3] on the CPU."""
        pixels, grid = patches(self.images, [video[k] for k in chosen(len(video), self.fps, self.wanted, "videoalign")])
        text, device = judge.put(self.instruction, PLACE, prompt), self.model.device
        ids = tokens(self.tokenizer, text, int(grid.prod()) // self.images.merge_size**2, "videoalign").to(device)
        hidden = self.model(
            input_ids=ids,
            pixel_values_videos=pixels.to(device, self.model.dtype),
            video_grid_thw=grid.to(device),
            position_ids=torch.arange(ids.shape[1], device=device).expand(3, *ids.shape),
        ).last_hidden_state[0]
        at = torch.stack([hidden[ids[0] == token][0] for token in self.ids])
        logits = (at @ self.head.T).float().cpu()
        return logits.diagonal() if logits.shape[1] > 1 else logits[:, 0]
