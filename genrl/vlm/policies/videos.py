"""Clips, and the processors that make videos of them, as Qwen2-VL, 2.5-VL and 3-VL and InternVL take them.

Qwen's make tokens of pairs of frames, and the model is told the time: Qwen2.5-VL by positions, Qwen3-VL by words before
each pair. InternVL has every frame as one tile, with its number before it. Other families are shown the frames as
pictures: LLaVA-OneVision's videos of one batch must have equally many frames, GLM's tokens of a video are those of a
picture, so that a batch cannot have both, and SmolVLM's pixels of a video cannot stand beside those of pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.video_utils import VideoMetadata

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl")
"""Model types that are given clips as videos."""


@dataclass(frozen=True)
class Clip:
    """Frames of a video in their order, PIL or a file's path.

    numbers: which frames of the video they are, from 0; total: how many it has; fps: its frames in a second.
    """

    frames: tuple[Image.Image | Path, ...]
    numbers: tuple[int, ...]
    total: int
    fps: float


class Qwen3Videos(transformers.Qwen3VLProcessor):
    """Qwen3-VL's processor, with marks around the frames of each moment alone.

    Chat templates write marks around the whole video, too. Those are taken away, as the processor did that the models
    were published with (transformers 4.57); that of transformers 5.23 leaves them.
    """

    def get_text_with_replacements(
        self,
        text: list[str],
        images_replacements: list[str] = [],  # noqa: B006, as transformers has them
        videos_replacements: list[str] = [],  # noqa: B006
        audio_replacements: list[str] = [],  # noqa: B006
    ) -> Any:
        """Call transformers' processor with the text without these marks."""
        marked = f"{self.vision_start_token}{self.video_token}{self.vision_end_token}"
        bare = [text_of.replace(marked, self.video_token) for text_of in text]
        return super().get_text_with_replacements(bare, images_replacements, videos_replacements, audio_replacements)


def qwen_with_videos(path: str, kind: str, images: Any, tokenizer: Any, template: str | None) -> Any:
    """The processor of a Qwen with its video half, which resizes by torchvision; None where that is not installed, or
    the checkpoint says nothing of videos."""
    newer = kind in ("qwen3_vl", "qwen3_vl_moe")
    processors: dict[str, Any] = {
        "qwen2_vl": transformers.Qwen2VLProcessor,
        "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
    }
    half: Any = transformers.Qwen3VLVideoProcessor if newer else transformers.Qwen2VLVideoProcessor
    try:
        videos = half.from_pretrained(path)
    except (OSError, ImportError):
        return None
    processor = processors.get(kind, Qwen3Videos)(images, tokenizer, videos, chat_template=template)
    processor.vision_start_token, processor.vision_end_token = (
        "<|vision_start|>",
        "<|vision_end|>",
    )  # not all have them by name
    return processor


def gone_on(positions: Tensor, kinds: Tensor) -> Tensor:
    """Positions int64 [3, P] in which what follows a picture or a video begins after the largest position in it.

    Qwen2-VL and 2.5-VL were published so (transformers 4.57). That of transformers 5.23 goes on after the rows or
    columns, also where the time of a video has larger positions. kinds [P]: the same number within one run.
    """
    shifted, start = positions.clone(), 0
    for part in torch.tensor_split(torch.arange(len(kinds)), (kinds.diff().nonzero()[:, 0] + 1).tolist()):
        shifted[:, part] = positions[:, part] - positions[:, part[:1]] + start
        start = int(shifted[:, part].max()) + 1
    return shifted


def video_arguments(clips: list[Clip], frames: list[list[Image.Image]], processor: Any, where: str) -> dict[str, Any]:
    """Arguments of a processor's call for these clips, whose frames have been opened; none without clips.

    The processor takes all frames, as they were chosen before. Qwen's keep to the most pixels of a clip that
    qwen-vl-utils has. Raises ValueError without torchvision, and for frames of different sizes.
    """
    if not clips:
        return {}
    if getattr(processor, "video_processor", None) is None:
        raise ValueError(f"{where}: this model is given clips as videos, which are resized by torchvision: install it")
    for one in frames:
        if len({frame.size for frame in one}) > 1:
            raise ValueError(f"{where}: the frames of a clip have different sizes; make them one size")
    metadata = [VideoMetadata(clip.total, clip.fps, frames_indices=list(clip.numbers)) for clip in clips]
    how: dict[str, Any] = {"video_metadata": metadata, "do_sample_frames": False}
    if "cap_pixels_per_frame" in processor.video_processor.valid_kwargs.__annotations__:
        how["cap_pixels_per_frame"] = True
    return {"videos": frames, "videos_kwargs": how}
