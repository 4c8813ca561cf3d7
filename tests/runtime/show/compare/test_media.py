"""Samples as files: pictures and sounds exactly, videos with their frames and rate."""

import io
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.runtime.show.compare.media import encode


def test_pictures_are_exact() -> None:
    sample = torch.randint(0, 256, (3, 6, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = encode(sample.float() / 255)
    assert (found.kind, found.width, found.height) == ("image", 4, 6)
    pixels = np.asarray(Image.open(io.BytesIO(found.data)))
    assert np.array_equal(pixels, sample.permute(1, 2, 0).numpy())
    assert encode(Image.fromarray(pixels)) == found


def test_sounds_are_exact_in_16_bits() -> None:
    sound = torch.stack([torch.linspace(-1, 1, 80), torch.linspace(2, -2, 80)])
    found = encode(sound, rate=8000)
    with wave.open(io.BytesIO(found.data)) as file:
        assert file.getparams()[:4] == (2, 2, 8000, 80)
        values = np.frombuffer(file.readframes(80), np.int16).reshape(80, 2) / 32767
    assert found.kind == "audio" and np.abs(values.T - sound.clamp(-1, 1).numpy()).max() < 1 / 32767
    assert encode(sound[0], rate=8000).data == encode(sound[:1], rate=8000).data


def test_videos_keep_frames_and_rate(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="videos need PyAV: pip install 'genrl-diffusion[av]'")
    frames = torch.linspace(0, 1, 5)[:, None, None, None].expand(5, 3, 16, 32)
    found = encode(frames, fps=8)
    assert (found.kind, found.width, found.height) == ("video", 32, 16)
    with av.open(io.BytesIO(found.data)) as container:
        assert container.streams.video[0].average_rate == 8
        grey = [frame.to_ndarray(format="rgb24").mean() / 255 for frame in container.decode(video=0)]
    assert grey == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.02)


def test_what_cannot_be_shown() -> None:
    said = {(2, 80): "needs its rate", (4, 6, 4): "is no picture, video or sound", (2, 3, 5, 4): "got 5 x 4"}
    for shape, says in said.items():
        with pytest.raises(ValueError, match=says):
            encode(torch.zeros(shape))
