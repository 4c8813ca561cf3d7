"""The page on which people judge two models blind, and the key that says which side was which.

The page holds no name, no score and nothing that depends on which model made a picture: every pair has an opaque token,
its order and its sides come from the operating system's randomness. The key, a file of its own, resolves the tokens. So
reading the source of the page does not help a judge, and nobody can compute the sides from `--seed`.

Samples as files that a browser shows: .png, .mp4, .wav. Pictures and sounds are exact, videos nearly.
"""

from __future__ import annotations

import base64
import io
import json
import secrets
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor

from genrl.runtime.folder.run import write_atomic
from genrl.runtime.show.mp4 import Mp4
from genrl.runtime.show.pages import render
from genrl.runtime.show.pictures import to_pil

Kind = Literal["image", "video", "audio"]
MIME = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
SUFFIX = {"image": ".png", "video": ".mp4", "audio": ".wav"}


@dataclass(frozen=True)
class Media:
    """One sample: a complete file."""

    kind: Kind
    data: bytes
    width: int = 0
    """In pixels; 0 for a sound."""
    height: int = 0


def encode(sample: Tensor | Image, *, fps: int = 16, rate: int | None = None) -> Media:
    """The file of a picture (PIL, or float [3, H, W] in [0, 1]), a video [F, 3, H, W], or a sound [S] or [channels, S]
    in [-1, 1].

    fps: frames per second of a video; rate: samples per second of a sound. Raises ValueError for another shape, a sound
    without a rate, and a video where PyAV is not installed or that has an odd height or width.
    """
    if isinstance(sample, Image) or (sample.ndim == 3 and sample.shape[0] == 3):
        picture, stream = to_pil(sample), io.BytesIO()
        picture.save(stream, "PNG")
        return Media("image", stream.getvalue(), picture.width, picture.height)
    if sample.ndim == 4 and sample.shape[1] == 3:
        return Media("video", _mp4(sample, fps), sample.shape[3], sample.shape[2])
    if sample.ndim in (1, 2):
        if rate is None:
            raise ValueError("a sound needs its rate, samples per second, and this model does not say it")
        return Media("audio", as_wav(sample, rate))
    raise ValueError(f"a sample of shape {tuple(sample.shape)} is no picture, video or sound that a page can show")


def as_wav(sound: Tensor, rate: int) -> bytes:
    """A waveform [S] or [channels, S] in [-1, 1], `rate` samples per second, as a .wav file of 16 bits."""
    channels = sound[None] if sound.ndim == 1 else sound
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setparams((len(channels), 2, rate, channels.shape[1], "NONE", "not compressed"))
        file.writeframes((channels.float().clamp(-1, 1) * 32767).round().short().T.contiguous().numpy().tobytes())
    return stream.getvalue()


def _mp4(frames: Tensor, fps: int) -> bytes:
    """Frames [F, 3, H, W] in [0, 1]."""
    pixels = (frames.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        try:
            file = Mp4(path, fps, frames.shape[2], frames.shape[3], key_interval=fps)
        except ImportError as error:
            raise ValueError(str(error)) from error
        file.add(pixels.permute(0, 2, 3, 1).contiguous().numpy())
        file.close()
        return path.read_bytes()


KEY_FORMAT, VOTES_FORMAT = "genrl-compare-key-1", "genrl-compare-votes-1"
LARGEST_PAGE = 200_000_000
"""Bytes of a page with its pictures inside; browsers become slow above."""
MOST_PAIRS = 2_000
"""Of one page: about three hours of judging, at six seconds a pair."""
SECONDS_PER_PAIR = 6


@dataclass(frozen=True)
class Pair:
    """Samples of both models for one prompt, from the same noise."""

    prompt: str
    a: Media
    b: Media
    category: str | None = None
    """What the results are also listed by."""
    source: Media | None = None
    """The picture that both were given, of an editing model."""


def key_path(out: Path) -> Path:
    """File to which the key of a page is written: compare.key.json beside compare.html."""
    return out.with_name(f"{out.stem}.key.json")


def media_folder(out: Path) -> Path:
    """Folder of the pictures of a page, if they are not in it: compare_media beside compare.html."""
    return out.with_name(f"{out.stem}_media")


def check_new(out: Path) -> None:
    """Raise ValueError where there is a page already, whose votes could not be read without its key."""
    for path in (out, key_path(out), media_folder(out)):
        if path.exists():
            raise ValueError(
                f"{path} exists; votes on that page need its key. Give another --out, or delete {out.name}, "
                f"{key_path(out).name} and {media_folder(out).name}"
            )


def check_pairs(count: int) -> None:
    """Raise ValueError where nobody would judge so many pairs."""
    if count > MOST_PAIRS:
        hours = count * SECONDS_PER_PAIR / 3600
        raise ValueError(
            f"{count:,} pairs are about {hours:.0f} hours of judging at {SECONDS_PER_PAIR} seconds each; a page holds "
            f"at most {MOST_PAIRS:,}. Give --num-prompts 200, which takes that many evenly spread over the file"
        )


def estimated_bytes(first: Media, pairs: int, *, beside: bool) -> int:
    """Bytes of all samples of a page, if they are all like the first; inside the page they are written in base64."""
    size = 2 * pairs * len(first.data)
    return size if beside else size * 4 // 3


def check_size(first: Media, pairs: int, *, beside: bool) -> None:
    """Raise ValueError where the page would be too large for a browser."""
    size = estimated_bytes(first, pairs, beside=beside)
    if not beside and size > LARGEST_PAGE:
        fitting = max(1, pairs * LARGEST_PAGE // size)
        raise ValueError(
            f"the page would have about {size / 1e6:,.0f} MB: {pairs:,} pairs, of which the first sample has "
            f"{len(first.data) / 1e6:.2f} MB; a page has at most {LARGEST_PAGE // 10**6} MB. Give --num-prompts or "
            f"--per-prompt for at most {fitting:,} pairs, or --beside, which writes the samples into a folder beside "
            "the page"
        )


class Page:
    """A page in the making: `add` pairs, then `write`.

    beside: samples go into a folder beside the page, at once, instead of into the page.
    """

    def __init__(self, out: Path, *, question: str, beside: bool = False) -> None:
        """Raises ValueError where there is a page already."""
        check_new(out)
        self.out, self.question, self.beside = out, question, beside
        self.identical = 0
        """Pairs that are not shown, because both samples are the same to the byte."""
        # Of no seed, by which somebody could tell the sides.
        self._random = SystemRandom()
        self._shown: list[dict[str, Any]] = []
        self._keys: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def add(self, pair: Pair) -> str | None:
        """Put a pair into the page, its sides at random; returns its token, None for one that is not shown because
        both samples are the same. Raises ValueError where the two give themselves away by their kind or size."""
        forms = [(m.kind, m.width, m.height) for m in (pair.a, pair.b)]
        if forms[0] != forms[1]:
            kinds = [f"{kind}s" + (f" of {width} x {height} pixels" if width else "") for kind, width, height in forms]
            raise ValueError(
                f"A makes {kinds[0]}, B {kinds[1]}: everybody would see which is which, and the noise is not the same. "
                "Give --height and --width"
            )
        if pair.a.data == pair.b.data:
            self.identical += 1
            return None
        token = secrets.token_hex(8)
        left = self._random.choice("ab")
        sides = (pair.a, pair.b) if left == "a" else (pair.b, pair.a)
        entry: dict[str, Any] = {"token": token, "prompt": pair.prompt}
        for name, media in zip(("left", "right", "source"), (*sides, pair.source), strict=True):
            if media is not None:
                shape = {"kind": media.kind, "width": media.width, "height": media.height}
                entry[name] = shape | {"url": self._url(media)}
        self._shown.append(entry)
        self._keys[token] = {"prompt": pair.prompt, "category": pair.category, "left": left, "rewards": {}}
        return token

    def add_scores(self, token: str, label: str, a: float | None, b: float | None) -> None:
        """Put a reward's scores of both samples of a pair into the key; None = no score."""
        self._keys[token]["rewards"][label] = [a, b]

    def write(self, models: Mapping[str, Any]) -> tuple[Path, Path]:
        """Write the page and its key, whose paths are returned. models: what the key says of both of them.

        Raises ValueError where there is nothing to judge.
        """
        if not self._shown:
            raise ValueError(
                f"A and B made the same samples, to the byte, for all {self.identical} prompts: there is nothing to "
                "judge. Is one of them the other's copy, or not trained yet?"
            )
        self._random.shuffle(self._shown)
        page = secrets.token_hex(8)
        data = {"page": page, "format": VOTES_FORMAT, "pairs": self._shown}
        tokens = sorted(self._keys)  # not in the order of the prompts
        key = {"format": KEY_FORMAT, "page": page, **models, "identical": self.identical}
        write_atomic(self.out, render("compare.html", {"question": self.question, "data": data}))
        write_atomic(key_path(self.out), json.dumps(key | {"pairs": {t: self._keys[t] for t in tokens}}, indent=1))
        return self.out, key_path(self.out)

    def _url(self, media: Media) -> str:
        if not self.beside:
            return f"data:{MIME[media.kind]};base64,{base64.b64encode(media.data).decode()}"
        folder = media_folder(self.out)
        name = f"{secrets.token_hex(8)}{SUFFIX[media.kind]}"
        write_atomic(folder / name, media.data)
        return f"{folder.name}/{name}"
