"""Rewards for the tests of serving: what they do is plain, what goes wrong is asked for by the prompt."""

import os
import time
from typing import Any

import torch


def mean(images: torch.Tensor, prompts: list[str]) -> Any:
    """Arithmetic whose last bits depend on every pixel."""
    values = (images.flatten(1).double() ** 3).mean(1).sqrt() / 3 + torch.tensor([len(p) for p in prompts]) * 0.1
    return values, {"red": images[..., 0, :, :].flatten(1).mean(1), "length": [len(p) for p in prompts]}


def eight_bit(pil_images: Any) -> list[float]:
    """Sum of the pictures' bytes over a prime; a video sums its frames."""
    rows = [row if isinstance(row, list) else [row] for row in pil_images]
    return [sum(sum(frame.tobytes()) for frame in row) / 7919 for row in rows]


def like(images: torch.Tensor, reference_images: Any, style: list[str], more: Any = ()) -> list[float]:
    return [
        float(image.mean()) + reference.getpixel((0, 0))[0] / 3 + len(s) + m
        for image, reference, s, m in zip(images, reference_images, style, more or [0] * len(style), strict=True)
    ]


def wins(images: torch.Tensor, pairs: list[tuple[int, int]]) -> list[float]:
    means = images.flatten(1).mean(1)
    return [float(means[i] > means[j]) for i, j in pairs]


def spread(images: torch.Tensor, group: list[int]) -> list[float]:
    means = images.flatten(1).mean(1).double()
    numbers = torch.tensor(group)
    return [float(means[k] - means[numbers == g].mean()) for k, g in enumerate(group)]


class Moody:
    """Does what the first prompt says: "raise", "nan", "short", "text", "sleep", "exit", "die"."""

    def __init__(self, bonus: float = 0.0, log: str = ""):
        self.bonus, self.log = bonus, log

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> Any:
        if self.log:
            with open(self.log, "a") as stream:
                stream.write(f"{os.getpid()} {prompts[0]}\n")
        mood, number = prompts[0], len(prompts)
        if mood == "raise":
            raise KeyError("/secret/path")
        if mood == "sleep":
            time.sleep(1.5)
        if mood == "exit":
            raise SystemExit(3)
        if mood == "die":
            os._exit(9)
        returned = {"nan": [float("nan")] * number, "short": [1.0], "text": ["high"] * number}
        return returned.get(mood, images.flatten(1).mean(1) + self.bonus)
