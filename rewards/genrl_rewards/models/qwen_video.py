"""A video as Qwen's vision-language models read it: which of its frames, their patches, and their places in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image

LEAST_PIXELS, MOST_PIXELS = 128 * 28 * 28, 768 * 28 * 28
"""Of a frame: others are resized, as Qwen's own reader of videos does."""
FEWEST = 4
"""Frames that are read of a video that has them."""
PAD = "<|video_pad|>"


def chosen(count: int, rate: float, wanted: float, reward: str, *, down: bool = False) -> list[int]:
    """Which frames of `count` at `rate` per second are read for `wanted` per second: an even number of them, FEWEST or
    more where there are so many, evenly spread from the first to the last. Raises ValueError for fewer than two.

    down: an odd number is rounded down, as Qwen's reader does today; else to the nearest even one, as it did before.
    """
    if count < 2:
        raise ValueError(f"{reward} reads videos of two frames or more; this is a picture")
    pairs = min(max(count / rate * wanted, FEWEST), count // 2 * 2) / 2
    number = 2 * (int(pairs) if down else round(pairs))
    return torch.linspace(0, count - 1, number).round().long().tolist()


def patches(images: Any, frames: Sequence[Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [P, 3 x 2 x p x p], each of two frames that follow one another, and their grid [1, 3].

    images: a `Qwen2VLImageProcessorPil`. It makes a patch of one frame twice; here its second half is that of the next.
    """
    processed = images(images=list(frames), return_tensors="pt")
    pairs = processed["pixel_values"].view(len(frames) // 2, 2, -1, 3, 2, images.patch_size**2)
    pixels = torch.stack([pairs[:, 0, :, :, 0], pairs[:, 1, :, :, 1]], 3).flatten(0, 1).flatten(1)
    _, height, width = processed["image_grid_thw"][0].tolist()
    return pixels, torch.tensor([[len(pairs), height, width]])


def tokens(tokenizer: Any, text: str, places: int, reward: str) -> torch.Tensor:
    """One user turn of a video, which has so many places, and a text after it: int64 [1, L].

    Raises ValueError for a chat template without one place for the video, or a text with that token.
    """
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
    asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if asked.count(PAD) != 1:
        raise ValueError(f"{reward}: the chat template has {asked.count(PAD)} places {PAD} for a video")
    ids: torch.Tensor = tokenizer(asked.replace(PAD, PAD * places), return_tensors="pt")["input_ids"]
    return ids
