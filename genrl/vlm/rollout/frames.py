"""Clips of some moments: of a video file, or of frames that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from genrl.vlm.policies.videos import Clip
from genrl_rewards.extras import install


def spread(number: int, wanted: int) -> list[int]:
    """Of `number` frames the numbers of `wanted`, evenly from the first to the last; all where there are no more."""
    if number <= wanted:
        return list(range(number))
    return [round(k * (number - 1) / max(1, wanted - 1)) for k in range(wanted)]


def clip_of(clip: Path | Sequence[Any], fps: float, most: int, where: str) -> Clip:
    """Frames of a video file, `fps` a second and `most` at most, evenly over it; of a list of frames, `fps` a
    second, `most` of them.

    Raises ValueError, naming the row, for a file that is missing or no video, and where PyAV is not installed.
    """
    if not isinstance(clip, Path):
        numbers = spread(len(clip), most)
        return Clip(tuple(clip[number] for number in numbers), tuple(numbers), len(clip), fps)
    try:
        import av
    except ImportError as error:
        raise ValueError(f"{where}: video files are read by PyAV: {install('av')}") from error
    try:
        container: Any
        with av.open(str(clip)) as container:
            stream = container.streams.video[0]
            # counted by decoding: what a file says of its own length is often wrong
            times = [float(frame.time or 0.0) for frame in container.decode(stream)]
            step = times[-1] / max(1, len(times) - 1)
            chosen = spread(len(times), min(most, max(1, round(len(times) * step * fps))))
            container.seek(0)
            found: list[Image.Image] = [
                frame.to_image() for number, frame in enumerate(container.decode(stream)) if number in set(chosen)
            ]
    except (OSError, IndexError, ValueError) as error:  # av's errors are these, too
        raise ValueError(f"{where}: the video {clip} cannot be read: {error}") from error
    return Clip(tuple(found), tuple(chosen), len(times), 1 / step if step > 0 else fps)
