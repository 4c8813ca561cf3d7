"""Names that reading and writing share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

INDICES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The columns that every data set has, which writing makes: seconds and frames since the episode's start, the number of
the episode, of the frame in the data set, and of its instruction."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


class Limits(NamedTuple):
    """A file of data or of a video ends at the episode that would make it larger than so many MB, a chunk of the layout
    after chunks_size files."""

    chunks_size: int = 1000
    data_mb: float = 100
    video_mb: float = 200


class Episode(NamedTuple):
    """T frames: an instruction for each, and columns by LeRobot's names.

    A column is [T, D] (D = 1 for one number a frame), or pictures uint8 [T, H, W, 3]. Row t holds what was observed at
    frame t, the action taken there, and what came of it (`next.reward`, `next.done`, `next.success`).
    """

    instructions: Sequence[str]
    columns: Mapping[str, NDArray[Any]]
