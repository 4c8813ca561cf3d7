"""Reward: VideoScore2, a Qwen2.5-VL that reasons about a video, then writes three scores (arXiv 2509.22799).

A score is soft: the likeliest number from 1 to 5 where the digit was written, times its probability among the five.
"""

from __future__ import annotations

import bisect
import logging
import math
import re
from typing import Any, cast

import torch
from PIL.Image import Image

from genrl_rewards.contract import Scored, check_choice
from genrl_rewards.models.checkpoints import pretrained, qwen_pictures, tokenizer_of, torch_dtype, transformers
from genrl_rewards.models.qwen_video import LEAST_PIXELS, MOST_PIXELS, PAD, chosen, patches, tokens
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import shown

logger = logging.getLogger(__name__)

LABELS = {
    "visual": "visual quality",
    "text": "text-to-video alignment",
    "physical": "physical/common-sense consistency",
}
"""The three scores by their names here: what the model writes before each."""
DIGITS = ("1", "2", "3", "4", "5")
WANTED = 2.0
"""Frames per second that the model was trained to read."""
TEMPERATURE = 0.7
"""Of the published scores: at it the authors draw answers, and read probabilities off."""

QUESTION = """Judge this generated video. It was made from the text between the markers.
<text>
{prompt}
</text>
First reason. Then give a whole number from 1 (bad) to 5 (perfect) for each of the following, on a line of its own:
(1) visual quality: X
(2) text-to-video alignment: X
(3) physical/common-sense consistency: X"""


def place_of(answer: str, label: str) -> int | None:
    """Position in an answer of the digit from 1 to 5 that is the score of `label`; None if there is none.

    The last after the reasoning, which must have come to its end: after the label, whatever describes it on the same
    line, and a colon.
    """
    ended = answer.rfind("</think>")
    if ended < 0 and "<think>" in answer:
        return None
    words = rf"{re.escape(label)}[^:\d\n]*:[\s*]*([1-5])(?!\d)"
    matches = list(re.finditer(words, answer[ended + 1 :], re.IGNORECASE))
    return matches[-1].start(1) + ended + 1 if matches else None


def soft_score(logits: torch.Tensor) -> float:
    """`n P(n)` of the likeliest n, P of 1 to 5 among themselves at TEMPERATURE, 0.2 to 5. logits: theirs, [5]."""
    likeliest, at = (logits.float() / TEMPERATURE).softmax(-1).max(-1)
    return (int(at) + 1) * float(likeliest)


class Digits:
    """A processor of logits that changes none, and keeps those of some tokens at every step: [n] each."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.kept = ids, list[torch.Tensor]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.kept.append(scores[0, self.ids])
        return scores


class VideoScore2:
    """A video's visual quality, fit to the prompt and physical sense: three written scores of a Qwen2.5-VL.

    (He et al. 2025, arXiv 2509.22799.)

    `question`   what is asked, with a placeholder `{prompt}`: the text itself, `file.txt` or `file.py:CONSTANT`. The
                 default is a text of ours; the one that the checkpoint was trained with belongs to its authors
                 (`vs2_inference.py` of TIGER-AI-Lab/VideoScore2), and scores differ by the wording
    `fps`        frames per second at which the videos are meant to be played (default 16, as Wan's)
    `part`       what is the score: `overall` (default), the mean of `visual`, `text` and `physical`, or one of them
    `model`      hub id or folder of the checkpoint
    `dtype`      `bfloat16` (default), `float32`, `float16`
    `max_tokens` of the reasoning and the scores (default 1024, as the authors')

    Answers are greedy, so that a score is a function of the video; the authors draw them. Two frames per second are
    read, at least four. No score where one of those that count is not written. Pictures are refused.
    """

    def __init__(
        self,
        question: str = QUESTION,
        fps: float = 16.0,
        part: str = "overall",
        model: str = "TIGER-Lab/VideoScore2",
        dtype: str = "bfloat16",
        max_tokens: int = 1024,
        device: str = "cpu",
    ):
        check_choice("videoscore2: unknown part", part, ("overall", *LABELS))
        if not fps > 0:
            raise ValueError(f"videoscore2: fps must be above 0, found {fps}")
        self.question = judge.read(question, "videoscore2", holding="{prompt}")
        self.fps, self.part, self.max_tokens = fps, part, max_tokens
        architecture, precision = transformers.Qwen2_5_VLForConditionalGeneration, torch_dtype(dtype, "videoscore2")
        loaded = pretrained(architecture, model, types=("qwen2_5_vl",), reward="videoscore2", dtype=precision)
        self.model = loaded.to(device)
        self.to = self.model.to
        self.tokenizer: Any = tokenizer_of(model, "videoscore2")
        self.digits = cast("list[int]", self.tokenizer.convert_tokens_to_ids(list(DIGITS)))
        if len(set(self.digits)) < len(DIGITS):
            raise ValueError(f"videoscore2: {model!r} has no tokens of their own for the digits 1 to 5")
        self.images = qwen_pictures(model, LEAST_PIXELS, MOST_PIXELS)
        logger.info("videoscore2: %s (%s)", model, dtype)

    def __call__(self, pil_images: list[Any], prompts: list[str]) -> Scored:
        rows = [self._scores(shown(video), prompt) for video, prompt in zip(pil_images, prompts, strict=True)]
        parts = {name: [row[k] for row in rows] for k, name in enumerate(LABELS)}
        return ([sum(row) / len(row) for row in rows] if self.part == "overall" else parts[self.part]), parts

    @torch.no_grad()
    def _scores(self, video: list[Image], prompt: str) -> list[float]:
        """The soft scores in the order of LABELS, NaN for one that is not written."""
        frames = [video[k] for k in chosen(len(video), self.fps, WANTED, "videoscore2", down=True)]
        pixels, grid = patches(self.images, frames)
        text, device = judge.put(self.question, "{prompt}", prompt), self.model.device
        ids = tokens(self.tokenizer, text, int(grid.prod()) // self.images.merge_size**2, "videoscore2").to(device)
        digits = Digits(self.digits)
        written = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=2 * (ids == self.tokenizer.convert_tokens_to_ids(PAD)).long(),
            pixel_values_videos=pixels.to(device, self.model.dtype),
            video_grid_thw=grid.to(device),
            second_per_grid_ts=torch.tensor([self.images.temporal_patch_size / WANTED], device=device),
            max_new_tokens=self.max_tokens,
            do_sample=False,
            logits_processor=[digits],
        )[0, ids.shape[1] :].tolist()
        places = [place_of(self._text(written), label) for label in LABELS.values()]
        return [math.nan if at is None else soft_score(digits.kept[self._step(written, at)]) for at in places]

    def _text(self, written: list[int]) -> str:
        text: str = self.tokenizer.decode(written, clean_up_tokenization_spaces=False)
        return text

    def _step(self, written: list[int], at: int) -> int:
        """Which token of an answer ends with the character at this place."""
        # By decoding beginnings: tokens of one character may be several, and of several characters one, so lengths do
        # not add up.
        return bisect.bisect_right(range(len(written)), at, key=lambda k: len(self._text(written[: k + 1])))
