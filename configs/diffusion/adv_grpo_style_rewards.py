"""The judge of configs/diffusion/adv_grpo_style.yaml: what the prompt asks for, drawn in the references' one shape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from genrl_rewards.scorers.objects.shapes import SHAPES, Shapes

if TYPE_CHECKING:
    import torch

    from genrl_rewards.contract import Scored

ANY_SHAPE = re.compile("|".join(SHAPES))


class OneShape(Shapes):
    """`shapes`, of the caption with every shape replaced by `shape`.

    Its part `shape` is the style, `count` and `colour` are the content. A caption whose two groups become the same
    ("a red star and a red square") has no score.
    """

    def __init__(self, shape: str = "circle") -> None:
        super().__init__()
        self.shape = shape

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> Scored:
        return super().__call__(images, [ANY_SHAPE.sub(self.shape, prompt) for prompt in prompts])
