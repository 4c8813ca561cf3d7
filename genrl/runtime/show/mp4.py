"""mp4 files through PyAV, the extra `av`. Pictures are uint8 [T, H, W, 3] RGB."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl_rewards.extras import install

Pictures = NDArray[np.uint8]

CODEC, PIXELS = "h264", "yuv420p"
_QUALITY = "18"  # x264's constant rate factor: no difference to the eye


def import_av() -> Any:
    """PyAV. Raises ImportError with the command that installs it."""
    try:
        import av
    except ImportError as error:
        raise ImportError(f"mp4 files need PyAV: {install('av')}") from error
    return av


class Mp4:
    """A file that is being written: h264, yuv420p (lossy), one key frame in `key_interval`, frame i at i / fps.

    `frames` and `size` (bytes) say how much is in it. Raises ValueError for an odd height or width, which
    yuv420p cannot hold.
    """

    def __init__(self, path: Path, fps: int, height: int, width: int, *, key_interval: int) -> None:
        if height % 2 or width % 2:
            raise ValueError(f"{path}: an mp4 file needs an even height and width, got {height} x {width}")
        self._av = import_av()
        self._rate = Fraction(1, fps)
        self._container = self._av.open(str(path), "w", format="mp4")
        # Zero latency holds no frame back and reorders none: each is stored at its own time, from 0, and counted.
        options = {"crf": _QUALITY, "g": str(key_interval), "tune": "zerolatency"}
        self._stream = self._container.add_stream("libx264", rate=fps, options=options)
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, PIXELS
        self._stream.codec_context.time_base = self._rate
        self._stream.codec_context.thread_count = 1  # equal pictures give equal files
        self.frames = self.size = 0

    def add(self, pictures: Pictures) -> None:
        """Append pictures [T, H, W, 3] of the file's height and width."""
        for picture in pictures:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = self.frames, self._rate
            self._mux(self._stream.encode(frame))
            self.frames += 1

    def close(self) -> None:
        """Finish the file."""
        self._mux(self._stream.encode())
        self._container.close()

    def _mux(self, packets: Any) -> None:
        for packet in packets:
            self.size += packet.size
            self._container.mux(packet)


def read_mp4(path: Path, seconds: NDArray[np.float64], fps: float) -> Pictures:
    """The frames at some times, ascending [T]: uint8 [T, H, W, 3]. Decodes from the key frame before the first of them.

    Raises FileNotFoundError; ValueError where the file cannot be decoded, or has no frame within a quarter of 1 / fps
    of one of the times.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    av = import_av()
    times: list[float] = list(seconds)
    frames: list[Pictures] = []
    near = 0.25 / fps
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            container.seek(max(0, int((times[0] - near) / stream.time_base)), stream=stream)
            for frame in container.decode(stream):
                while len(frames) < len(times) and abs(frame.time - times[len(frames)]) <= near:
                    frames.append(frame.to_ndarray(format="rgb24"))
                if len(frames) == len(times) or frame.time > times[len(frames)] + near:
                    break
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} cannot be decoded as a video: {error}; fetch the file again") from error
    if len(frames) < len(times):
        raise ValueError(
            f"{path} has no frame at {times[len(frames)]:.4f} s, it is cut off or not of {fps} frames a second"
        )
    return np.stack(frames)
