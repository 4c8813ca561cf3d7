"""Reward: does the sound fit the prompt, by CLAP? (Wu et al. 2023, arXiv 2211.06687.)

MusicRL asks MuLan, which is not public: the mean over three segments of ten seconds of the cosine with the text (arXiv
2402.04229). CLAP, too, was trained on ten seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from genrl_rewards.models.checkpoints import pretrained, tokenizer_of, torch_dtype, transformers

SEGMENTS = 3
TOGETHER = 16
"""Segments embedded side by side."""


def resampled(sound: Tensor, rate: int, wanted: int) -> Tensor:
    """A waveform [S] at another rate, [round(S wanted / rate)], by its Fourier series: what is above half the lower
    rate is left out."""
    if rate == wanted:
        return sound
    number = round(len(sound) * wanted / rate)
    # The inverse divides by the new length, the forward transform was of the old one: the factor keeps the amplitude.
    sound_out: Tensor = torch.fft.irfft(torch.fft.rfft(sound.double()), n=number) * (number / len(sound))
    return sound_out.float()


def segments(sound: Tensor, length: int) -> list[Tensor]:
    """Three of `length` samples, spread evenly over a longer waveform; a shorter one is one segment."""
    if len(sound) <= length:
        return [sound]
    return [sound[int(at) : int(at) + length] for at in np.linspace(0, len(sound) - length, SEGMENTS)]


class ClapScore:
    """Cosine of CLAP's embeddings of sound and prompt, in [-1, 1]; of a long sound the mean of three segments.

    `model` hub id or folder of a ClapModel with its processor
    `dtype` of the model: `float32` (default), `bfloat16`, `float16`

    Stereo is heard as the mean of its channels, and sounds are resampled to the model's rate.
    """

    def __init__(self, model: str = "laion/larger_clap_music", dtype: str = "float32", device: str = "cpu"):
        held = pretrained(transformers.ClapModel, model, types=("clap",), reward="clap")
        self.model = held.to(device, torch_dtype(dtype, "clap"))
        self.to = self.model.to
        self.features = transformers.ClapFeatureExtractor.from_pretrained(model)
        self.tokenizer = tokenizer_of(model, "clap")

    def _heard(self, sounds: Sequence[Tensor]) -> Tensor:
        """Unit embeddings [N, D] of segments at the model's rate."""
        rate = self.features.sampling_rate
        inputs = self.features([sound.numpy() for sound in sounds], sampling_rate=rate, return_tensors="pt")
        is_longer = torch.zeros(
            len(sounds), 1, dtype=torch.bool
        )  # none is cut; the extractor would choose one at random
        features = inputs.input_features.to(self.model.device, self.model.dtype)
        embeddings: Tensor = self.model.get_audio_features(features, is_longer=is_longer).pooler_output
        return embeddings.float().cpu()

    @torch.no_grad()
    def __call__(self, audio: Sequence[Tensor], rate: Sequence[int], prompts: Sequence[str]) -> list[float]:
        rate_wanted, length = self.features.sampling_rate, self.features.nb_max_samples
        mono = [(sound.mean(0) if sound.ndim == 2 else sound).float().cpu() for sound in audio]
        pieces = [segments(resampled(sound, hz, rate_wanted), length) for sound, hz in zip(mono, rate, strict=True)]
        flat = [segment for piece in pieces for segment in piece]
        heard = torch.cat([self._heard(flat[at : at + TOGETHER]) for at in range(0, len(flat), TOGETHER)])
        tokens = self.tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt").to(self.model.device)
        words = self.model.get_text_features(**tokens).pooler_output.float().cpu()
        text_features = words.repeat_interleave(torch.tensor([len(piece) for piece in pieces]), 0)
        cosines = torch.nn.functional.cosine_similarity(heard, text_features, dim=-1)
        return [float(part.mean()) for part in cosines.split([len(piece) for piece in pieces])]
