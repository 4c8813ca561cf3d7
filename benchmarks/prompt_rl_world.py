"""Prompts and watched rewards of benchmarks/prompt_rl.py: captions that the flow model knows, and paraphrases of them
that only the language model does. A caption's column `caption` is the caption itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from genrl_rewards.scorers.objects.shapes import Shapes

if TYPE_CHECKING:
    import torch

ASSETS = Path("assets/prompts")


def mixed(split: str, out: Path) -> Path:
    """Write the prompts of a split: every other one as the caption that it stands for."""
    rows = [json.loads(line) for line in (ASSETS / f"paraphrases_{split}.jsonl").read_text().splitlines()]
    both = [row | {"prompt": row["caption"]} if k % 2 else row for k, row in enumerate(rows)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in both))
    return out


class OnCaptions(Shapes):
    """`shapes` of the samples whose prompt is a caption; others have no score."""

    plain = True

    def __call__(
        self, images: torch.Tensor, prompts: list[str], caption: list[str]
    ) -> tuple[list[float], dict[str, list[float]]]:
        scores, parts = super().__call__(images, caption)
        kept = [(text == told) is self.plain for text, told in zip(prompts, caption, strict=True)]
        return [value if keep else math.nan for value, keep in zip(scores, kept, strict=True)], {
            name: [value if keep else math.nan for value, keep in zip(row, kept, strict=True)]
            for name, row in parts.items()
        }


class OnParaphrases(OnCaptions):
    """`shapes` of the samples whose prompt is a paraphrase."""

    plain = False
