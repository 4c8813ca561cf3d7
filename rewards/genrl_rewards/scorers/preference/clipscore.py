"""Reward: does the picture fit the prompt, by CLIP? (Hessel et al. 2021, arXiv 2104.08718.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from genrl_rewards.contract import check_choice, declare
from genrl_rewards.models.clip_model import load_clip
from genrl_rewards.scorers.pictures.grids import GridShape, parts_of

MODEL = "openai/clip-vit-large-patch14"

SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cosine": lambda cos: cos,
    "over_30": lambda cos: 100 * cos / 30,
    "hessel": lambda cos: 2.5 * cos.clamp_min(0),
    "torchmetrics": lambda cos: 100 * cos.clamp_min(0),
}


def clipscore(cos: torch.Tensor, scale: str = "cosine") -> torch.Tensor:
    """CLIPScore from the cosine of the embeddings of image and prompt, elementwise.

    `cosine` unchanged; `over_30` 100 cos / 30, as some trainers have it; `hessel` 2.5 max(cos, 0), equation 1 of the
    paper; `torchmetrics` 100 max(cos, 0). Within one group all give the same order.
    """
    return SCALES[scale](cos)


class ClipScore:
    """Cosine of CLIP's embeddings of picture and prompt, in [-1, 1], usually .1 to .4.

    `model`     hub id or folder of a CLIPModel, or `open_clip:MODEL`
    `processor` hub id or folder of its tokenizer and image processor; null: that of `model`
    `scale`     `cosine` (default), `over_30`, `hessel`, `torchmetrics`; see `clipscore`
    `dtype`     of the model: `float32` (default), `bfloat16`, `float16`

    A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(
        self,
        model: str = MODEL,
        processor: str | None = None,
        scale: str = "cosine",
        dtype: str = "float32",
        device: str = "cpu",
    ):
        check_choice("clipscore: unknown scale", scale, SCALES)
        self.scale = scale
        self.scorer = load_clip(model, processor, device, "clipscore", dtype)
        self.to = self.scorer.to

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return clipscore(self.scorer.cosines(images, prompts), self.scale)


class ClipGrid:
    """Does each cell of a grid show its own part of the prompt? CLIP's max(cos, 0), mean over the cells, in [0, 1].

    `grid`  `2x2` (rows x columns, the default), or the column of the prompt file that holds such a value
    `model`, `processor`, `dtype` as in `clipscore`; PaCo-GRPO's CLIP-T is that of the default model

    A part is the text after a label such as `[TOP-LEFT]:`, in the order of the cells. A prompt without labels has no
    score; one with another number of parts than cells is an error.
    """

    def __init__(
        self,
        grid: str = "2x2",
        model: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        processor: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
    ):
        self.shapes = GridShape(grid, "clip_grid")
        self.scorer = load_clip(model, processor, device, "clip_grid", dtype)
        self.to = self.scorer.to
        self.__signature__ = declare(["images", "prompts", *self.shapes.columns])

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], **grids: Sequence[str]
    ) -> list[torch.Tensor | None]:
        rows = zip(images, prompts, self.shapes(grids, len(prompts)), strict=True)
        return [self._score(image, prompt, *shape) for image, prompt, shape in rows]

    def _score(self, image: torch.Tensor, prompt: str, rows: int, columns: int) -> torch.Tensor | None:
        parts = parts_of(prompt)
        if not parts:
            return None
        if len(parts) != rows * columns:
            raise ValueError(f"clip_grid: {rows} x {columns} cells, and the prompt has {len(parts)} parts: {prompt!r}")
        height, width = image.shape[-2] // rows, image.shape[-1] // columns
        bands = [image[..., y * height : (y + 1) * height, :] for y in range(rows)]
        cells = [band[..., x * width : (x + 1) * width] for band in bands for x in range(columns)]
        return self.scorer.cosines(torch.stack(cells), parts).clamp_min(0).mean()
