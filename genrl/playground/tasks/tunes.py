"""Tunes to be played, for MusicRL: nine notes that rise, fall or stay, in a low or a high register.

A code is a note: a pitch of a scale of twelve, played purely or with noise, or silence. Held out are the tunes that
fall in the low register, and those that rise in the high one.
"""

from __future__ import annotations

import numpy as np

from genrl.vlm.tasks import Question, Split

RATE, SAMPLES = 8000, 800  # a note lasts a tenth of a second
PITCHES, NOTES = 12, 9
NOISE = 0.6
COURSES, REGISTERS = ("rising", "falling", "steady"), ("low", "high")


def frequency(pitch: int) -> float:
    """Hertz of a pitch; 0 to 5 are the low register."""
    return float(220 * 2 ** (pitch / 6))


def frames() -> np.ndarray:
    """The codes' sounds, float32 [25, 800] in [-1, 1]: silence, then by pitch the pure note and the noisy one."""
    time, rng = np.arange(SAMPLES) / RATE, np.random.default_rng(0)
    fade = np.minimum(1, np.minimum(np.arange(SAMPLES), np.arange(SAMPLES)[::-1]) / 40)
    frames_so_far = [np.zeros(SAMPLES)]
    for pitch in range(PITCHES):
        pure = 0.5 * np.sin(2 * np.pi * frequency(pitch) * time)
        frames_so_far += [pure * fade, (pure + NOISE * rng.uniform(-0.5, 0.5, SAMPLES)) * fade]
    return np.stack(frames_so_far).astype(np.float32)


def pitches(rng: np.random.Generator, course: str, register: str) -> list[int]:
    """A tune of this kind."""
    low = 0 if register == "low" else PITCHES // 2
    notes = sorted(int(p) for p in rng.integers(low, low + PITCHES // 2, size=NOTES))
    if course == "steady":
        return [notes[0]] * NOTES
    return notes if course == "rising" else notes[::-1]


def held_out(course: str, register: str) -> bool:
    """Whether it is for evaluation only."""
    return (course, register) in (("falling", "low"), ("rising", "high"))


def text(rng: np.random.Generator, split: Split) -> Question:
    """What is to be played."""
    while True:
        course, register = COURSES[rng.integers(len(COURSES))], REGISTERS[rng.integers(len(REGISTERS))]
        if held_out(course, register) == (split == "eval"):
            return Question((f"a {register} {course} tune",), f"{register} {course}", 1)
