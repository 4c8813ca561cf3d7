"""Rules for the tunes of `genrl.playground.tasks.making`, which listen to them by Fourier transforms, without their
codes.

They replace MusicRL's models: how well the music fits the text (there the cosine of MuLan, mean of three segments of
10 s), and how good it sounds (there a predicted opinion of 1 to 5, mean of the first and last 20 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

NOTE_S = 0.1
BORDER_HZ = 415.0
"""The border between the low register and the high one."""
SEGMENTS = 3


class Heard(NamedTuple):
    """For each tenth of a second: the loudest frequency in Hz (NaN = silence), its share of the energy, both [N]."""

    pitch: np.ndarray
    purity: np.ndarray


def hear(sound: np.ndarray, rate: int) -> Heard:
    """The notes of a waveform [S] in [-1, 1] with `rate` samples per second. Pitches are accurate to about 5 Hz."""
    samples = round(NOTE_S * rate)
    notes = np.asarray(sound, dtype=np.float64)[: len(sound) // samples * samples].reshape(-1, samples)
    # A window, or a tone that does not end with its period leaks into all frequencies; padded to twice, for half the
    # grid.
    power = np.abs(np.fft.rfft(notes * np.hanning(samples), n=2 * samples)) ** 2
    total, loudest = power.sum(1), power.argmax(1)
    silent = (notes**2).mean(1) < 1e-4
    # The main lobe of the window: two bins on each side, four on the doubled grid.
    near = np.abs(np.arange(power.shape[1]) - loudest[:, None]) <= 4
    purity = np.where(silent, 0.0, (power * near).sum(1) / np.maximum(total, 1e-12))
    return Heard(np.where(silent, np.nan, loudest * rate / (2 * samples)), purity)


def text_fit(audio: Sequence[torch.Tensor], rate: Sequence[int], answer: Sequence[str]) -> list[float]:
    """How well tunes fit "low rising" (register and course), in [0, 1].

    The mean over three segments of the product of the share of steps in the right direction and the share of notes in
    the register. Silence counts as neither.
    """
    scores = []
    for sound, sample_rate, melody in zip(audio, rate, answer, strict=True):
        register, course = melody.split()
        pitch = hear(sound.numpy(), sample_rate).pitch
        inside = pitch < BORDER_HZ if register == "low" else pitch > BORDER_HZ
        # Silence is NaN, which no comparison holds for: it counts as wrong in both factors.
        change = np.diff(pitch)
        slack = 8.0  # Hz; a held note is not a step down
        ways = {"rising": change > -slack, "falling": change < slack, "steady": np.abs(change) < slack}
        parts = zip(np.array_split(ways[course], SEGMENTS), np.array_split(inside, SEGMENTS), strict=True)
        scores.append(float(np.mean([steps.mean() * notes.mean() for steps, notes in parts])))
    return scores


def sound_quality(audio: Sequence[torch.Tensor], rate: Sequence[int]) -> list[float]:
    """How pure tunes sound, in [0, 1]: each note's share of energy at its pitch, mean of the first and last third."""
    scores = []
    for sound, sample_rate in zip(audio, rate, strict=True):
        purity = hear(sound.numpy(), sample_rate).purity
        third = max(1, len(purity) // 3)
        scores.append(float((purity[:third].mean() + purity[-third:].mean()) / 2))
    return scores


def louder(audio: Sequence[torch.Tensor], rate: Sequence[int]) -> list[float]:
    """How steadily tunes get louder, in [-1, 1]: the correlation of each note's root mean square with its time. 0 where
    all are equally loud."""
    scores = []
    for sound, sample_rate in zip(audio, rate, strict=True):
        samples = round(NOTE_S * sample_rate)
        notes = sound.numpy().astype(np.float64)[: len(sound) // samples * samples].reshape(-1, samples)
        loud = np.sqrt((notes**2).mean(1))
        time = np.arange(len(loud)) - (len(loud) - 1) / 2
        loud = loud - loud.mean()
        scale = np.linalg.norm(loud) * np.linalg.norm(time)
        scores.append(float(loud @ time / scale) if scale > 1e-9 else 0.0)
    return scores
