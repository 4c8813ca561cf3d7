"""Columns of episodes as features of a data set, as columns of its files, and their exact statistics.

The names of its files, which reading and writing share, are here too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from genrl.runtime.show import mp4

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


_HEIGHT_WIDTH = ["height", "width", "channels"]


def infer(episode: Episode, fps: int, names: Mapping[str, Sequence[str]], videos: bool) -> dict[str, dict[str, Any]]:
    """`features` of meta/info.json. Raises ValueError for a name or an array that the layout has no place for."""
    unknown = sorted(names.keys() - episode.columns.keys())
    if unknown:
        raise ValueError(f"names are given for {unknown}, the episodes have the columns {sorted(episode.columns)}")
    features: dict[str, dict[str, Any]] = {}
    for name, values in episode.columns.items():
        if name in INDICES or name == "task" or "/" in name:
            raise ValueError(f"a column cannot be called {name!r}: {sorted(INDICES)} are made, '/' is reserved")
        if values.ndim == 4 and values.dtype == np.uint8 and values.shape[-1] == 3:
            height, width = values.shape[1:3]
            feature: dict[str, Any] = {"dtype": "image", "shape": [height, width, 3], "names": _HEIGHT_WIDTH}
            if videos:
                feature |= {"dtype": "video", "info": _video_info(fps, height, width)}
        elif values.ndim == 2 and values.shape[1] and values.dtype.kind in "fiub":
            written_names = list(names[name]) if name in names else None
            if written_names is not None and len(written_names) != values.shape[1]:
                raise ValueError(f"{name} has {values.shape[1]} numbers, its names are {written_names}")
            feature = {"dtype": values.dtype.name, "shape": [values.shape[1]], "names": written_names}
        else:
            raise ValueError(
                f"{name} must be numbers [T, D] or pictures uint8 [T, H, W, 3], got {values.dtype} {list(values.shape)}"
            )
        features[name] = feature
    return features | {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in INDICES.items()}


def _video_info(fps: int, height: int, width: int) -> dict[str, Any]:
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": mp4.CODEC,
        "video.pix_fmt": mp4.PIXELS,
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def schema(features: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
    """Features of the data files, with the metadata by which `datasets` knows pictures and fixed lengths."""
    from datasets import Features, Image, List, Value

    kinds: dict[str, Any] = {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            kinds[name] = Image()
        elif feature["shape"] == [1]:
            kinds[name] = Value(feature["dtype"])
        elif feature["dtype"] != "video":
            kinds[name] = List(Value(feature["dtype"]), length=feature["shape"][0])
    return Features(kinds).arrow_schema


def cells(values: NDArray[Any], feature: Mapping[str, Any]) -> pa.Array:
    """The values [T, ...] of a feature as a column of T cells of `schema`'s type."""
    if feature["dtype"] == "image":
        pictures = pa.array([_png(picture) for picture in values], pa.binary())
        paths = pa.array([f"frame-{t:06d}.png" for t in range(len(values))], pa.string())
        return pa.StructArray.from_arrays([pictures, paths], names=["bytes", "path"])
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if feature["shape"] == [1] else pa.FixedSizeListArray.from_arrays(flat, feature["shape"][0])


def _png(picture: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def check(episode: Episode, features: Mapping[str, Mapping[str, Any]], number: int) -> None:
    """Raise ValueError where an episode is not as the first one."""
    length = len(episode.instructions)
    if not length:
        raise ValueError(f"episode {number} has no frame")
    empty = [t for t, text in enumerate(episode.instructions) if not text.strip()]
    if empty:
        raise ValueError(f"episode {number}, frame {empty[0]}: the instruction is empty")
    expected = [name for name in features if name not in INDICES]
    if set(episode.columns) != set(expected):
        raise ValueError(f"episode {number} has the columns {sorted(episode.columns)}, the first one {expected}")
    for name in expected:
        values, feature = episode.columns[name], features[name]
        dtype = "uint8" if feature["dtype"] in ("image", "video") else feature["dtype"]
        if values.dtype != dtype or list(values.shape) != [length, *feature["shape"]]:
            raise ValueError(
                f"episode {number}: {name} must be {dtype} {[length, *feature['shape']]} (a row per instruction, "
                f"the rest as in the first episode), got {values.dtype} {list(values.shape)}"
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            frame = int((~np.isfinite(values)).any(1).nonzero()[0][0])
            raise ValueError(f"episode {number}, frame {frame}: {name} is not finite: {values[frame].tolist()}")


def numeric_stats(values: NDArray[Any]) -> dict[str, list[Any]]:
    """min, max, mean, std (population), count and quantiles over the rows of [N, D], as `meta/stats.json` has them."""
    # Sums over all frames of a data set would lose digits in float32.
    numbers = values.astype(np.float64)
    stats = {
        "min": numbers.min(0),
        "max": numbers.max(0),
        "mean": numbers.mean(0),
        "std": numbers.std(0),
        "count": np.array([len(numbers)]),
    }
    stats |= {name: np.quantile(numbers, share, axis=0) for name, share in QUANTILES.items()}
    return {name: value.tolist() for name, value in stats.items()}


def picture_stats(histogram: NDArray[np.int64], count: int) -> dict[str, list[Any]]:
    """Exact statistics per channel of pictures in [0, 1], [3, 1, 1], from how often each value occurs [3, 256].

    count: number of pictures.
    """
    levels, total, below = np.arange(256) / 255.0, histogram[0].sum(), histogram.cumsum(1)

    def ranked(rank: int) -> NDArray[np.float64]:
        return np.array([levels[np.searchsorted(row, rank, side="right")] for row in below])

    mean = histogram @ levels / total
    stats = {
        "min": ranked(0),
        "max": ranked(total - 1),
        "mean": mean,
        "std": np.sqrt((histogram * (levels - mean[:, None]) ** 2).sum(1) / total),
    }
    for name, share in QUANTILES.items():
        place = share * (total - 1)
        low = int(place)
        stats[name] = ranked(low) + (place - low) * (ranked(min(low + 1, total - 1)) - ranked(low))
    return {name: value[:, None, None].tolist() for name, value in stats.items()} | {"count": [count]}
