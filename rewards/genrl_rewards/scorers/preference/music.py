"""Reward: how a piece of music would be preferred for its text, by a MusicGen with a score (MusicRL-U)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genrl_rewards.models.checkpoints import pretrained, tokenizer_of
from genrl_rewards.models.musicgen import MusicgenReward

TOGETHER = 16
"""Pieces scored side by side."""


class MusicPreference:
    """The score of a reward model of music that was learnt from pairs, unbounded (MusicRL, arXiv 2402.04229).

    `model` folder or hub id, as a run of the method `music_preference` saves it

    Pieces are `audio` with `rate` samples per second, which must be the model's; its own EnCodec makes codes of them.
    """

    def __init__(self, model: str, device: str = "cpu"):
        kind = ("musicgen",)
        self.model: MusicgenReward = pretrained(MusicgenReward, model, types=kind, reward="music_preference")
        self.tokenizer = tokenizer_of(model, "music")
        self.to(device)

    def to(self, device: str) -> None:
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, audio: Sequence[Tensor], rate: Sequence[int], prompts: Sequence[str]) -> list[float]:
        scores: list[float] = []
        for at in range(0, len(prompts), TOGETHER):
            some = slice(at, at + TOGETHER)
            codes = [self.model.heard(*pair) for pair in zip(audio[some], rate[some], strict=True)]
            tokens = self.tokenizer(list(prompts[some]), padding=True, return_tensors="pt")
            scores += self.model.scores(tokens.input_ids, tokens.attention_mask, codes).tolist()
        return scores
