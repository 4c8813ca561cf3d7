"""Samples as files that a browser shows: .png, .mp4, .wav. Pictures and sounds are exact, videos nearly."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from PIL.Image import Image
from torch import Tensor

from genrl.runtime.show.mp4 import Mp4
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
        file.writeframes((channels.float().clamp(-1, 1) * 32767).short().T.contiguous().numpy().tobytes())
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
