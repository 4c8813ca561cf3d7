"""Watched rewards of the runs `prompt_rl` in benchmarks/claims.yaml. Their prompts are captions that the flow model
knows, and paraphrases that only the language model does; the column `caption` is the caption."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from genrl_rewards.scorers.objects.shapes import Shapes

if TYPE_CHECKING:
    import torch


class OnCaptions(Shapes):
    """`shapes` of the samples whose prompt is a caption; others have no score."""

    plain = True

    def __call__(
        self, images: torch.Tensor, prompts: list[str], caption: list[str]
    ) -> tuple[list[float], dict[str, list[float]]]:
        scores, parts = super().__call__(images, caption)
        kept = [(text == original) is self.plain for text, original in zip(prompts, caption, strict=True)]
        return [value if keep else math.nan for value, keep in zip(scores, kept, strict=True)], {
            name: [value if keep else math.nan for value, keep in zip(row, kept, strict=True)]
            for name, row in parts.items()
        }


class OnParaphrases(OnCaptions):
    """`shapes` of the samples whose prompt is a paraphrase."""

    plain = False
