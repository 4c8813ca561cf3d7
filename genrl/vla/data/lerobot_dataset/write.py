"""Writing a LeRobotDataset: episode after episode, so that only numbers (never pictures) stay in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from genrl.runtime.show import mp4
from genrl.vla.data.lerobot_dataset import features
from genrl.vla.data.lerobot_dataset.features import Episode, Limits, numeric_stats, picture_stats
from genrl.vla.data.lerobot_dataset.read import Dataset, open_dataset

_MB = 2**20
_META_ROWS = 1000  # episodes per row group of meta/episodes


def write_dataset(
    folder: Path,
    episodes: Iterable[Episode],
    *,
    fps: int,
    names: Mapping[str, Sequence[str]] | None = None,
    robot_type: str | None = None,
    videos: bool = False,
    limits: Limits = Limits(),
) -> Dataset:
    """Write all episodes into a new folder, which appears when it is complete, and open it.

    Features are those of the first episode. names: what the numbers of a column are called. videos: pictures as mp4
    files (lossy) instead of PNG inside the data. Statistics are exact (of pictures: per channel, in [0, 1]).

    Raises FileExistsError for a folder that is there, ValueError for no episode, and for an episode that is empty, not
    finite, without an instruction, or with other columns, types or shapes than the first.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists: remove it, or write to another folder")
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    writer = _Writer(partial, fps, dict(names or {}), videos, limits)
    try:
        for episode in episodes:
            writer.add(episode)
        writer.finish(robot_type)
    except BaseException:
        writer.abandon()
        raise
    partial.rename(folder)
    return open_dataset(folder)


class _Shard:
    """The file that is being written: its place in the layout, and how full it is."""

    def __init__(self, limit: float, chunks_size: int) -> None:
        self.limit, self.chunks_size = limit, chunks_size
        self.chunk_index = self.file_index = self.frames = 0

    @property
    def place(self) -> dict[str, int]:
        return {"chunk_index": self.chunk_index, "file_index": self.file_index}

    def is_full(self, size: int, frames: int) -> bool:
        """Whether `frames` more of the mean size until now would pass the limit. size: bytes."""
        return self.frames > 0 and size * (1 + frames / self.frames) >= self.limit * _MB

    def advance(self) -> None:
        self.file_index, self.frames = self.file_index + 1, 0
        if self.file_index == self.chunks_size:
            self.chunk_index, self.file_index = self.chunk_index + 1, 0


class _Writer:
    def __init__(self, folder: Path, fps: int, names: dict[str, Sequence[str]], videos: bool, limits: Limits) -> None:
        if fps < 1 or limits.chunks_size < 1 or min(limits) <= 0:
            raise ValueError(f"fps, chunks_size and file sizes must be positive: got {fps} and {tuple(limits)}")
        self.folder, self.fps, self.names, self.videos = folder, fps, names, videos
        self.limits = limits
        self.features: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, int] = {}
        self.rows: list[dict[str, Any]] = []
        self.frames = 0
        self.values: dict[str, list[NDArray[Any]]] = {}
        self.histograms: dict[str, NDArray[np.int64]] = {}
        self.data = _Shard(limits.data_mb, limits.chunks_size)
        self.data_file: pq.ParquetWriter | None = None
        self.video: dict[str, _Shard] = {}
        self.video_file: dict[str, mp4.Mp4] = {}

    def add(self, episode: Episode) -> None:
        number, length = len(self.rows), len(episode.instructions)
        if not self.features:
            self.features = features.infer(episode, self.fps, self.names, self.videos)
            self.schema = features.schema(self.features)
            self.video = {name: _Shard(self.limits.video_mb, self.limits.chunks_size) for name in self._of("video")}
        features.check(episode, self.features, number)
        indices = {
            "timestamp": np.arange(length) / self.fps,
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": self.frames + np.arange(length),
            "task_index": np.array([self.tasks.setdefault(text, len(self.tasks)) for text in episode.instructions]),
        }
        columns = dict(episode.columns) | {
            name: values.astype(features.INDICES[name])[:, None] for name, values in indices.items()
        }
        row: dict[str, Any] = {
            "episode_index": number,
            "tasks": list(dict.fromkeys(episode.instructions)),
            "length": length,
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + length,
        }
        row |= {f"data/{name}": value for name, value in self._add_rows(columns, length).items()}
        for name in self.video:
            row |= {f"videos/{name}/{key}": value for key, value in self._add_video(name, columns[name]).items()}
        for name in self.features:
            row |= {f"stats/{name}/{key}": value for key, value in self._count(name, columns[name]).items()}
        self.rows.append(row)
        self.frames += length

    def finish(self, robot_type: str | None) -> None:
        if not self.rows:
            raise ValueError("a data set needs an episode, there was none")
        self._close()
        self._write_episodes()
        self._write_tasks()
        stats = {name: numeric_stats(np.concatenate(values)) for name, values in self.values.items()}
        stats |= {name: picture_stats(values, self.frames) for name, values in self.histograms.items()}
        self._write_json(features.STATS, {name: stats[name] for name in self.features})
        info = {
            "codebase_version": features.VERSION,
            "robot_type": robot_type,
            "total_episodes": len(self.rows),
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": self.limits.chunks_size,
            "data_files_size_in_mb": self.limits.data_mb,
            "video_files_size_in_mb": self.limits.video_mb,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self.rows)}"},
            "data_path": features.DATA,
            "video_path": features.VIDEO if self.video else None,
            "features": self.features,
        }
        self._write_json(features.INFO, info)

    def abandon(self) -> None:
        self._close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _of(self, dtype: str) -> list[str]:
        return [name for name, feature in self.features.items() if feature["dtype"] == dtype]

    def _close(self) -> None:
        if self.data_file is not None:
            self.data_file.close()
        for file in self.video_file.values():
            file.close()
        self.data_file, self.video_file = None, {}

    def _path(self, template: str, **place: Any) -> Path:
        path = self.folder / template.format(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _add_rows(self, columns: Mapping[str, NDArray[Any]], length: int) -> dict[str, int]:
        """One row group per episode, so that one can be read without the others."""
        cells = [features.cells(columns[field.name], self.features[field.name]) for field in self.schema]
        if self.data_file is not None:
            size = self._path(features.DATA, **self.data.place).stat().st_size
            if self.data.is_full(size, length):
                self.data_file.close()
                self.data_file = None
                self.data.advance()
        if self.data_file is None:
            self.data_file = pq.ParquetWriter(self._path(features.DATA, **self.data.place), self.schema)
        self.data_file.write_table(pa.Table.from_arrays(cells, schema=self.schema))
        self.data.frames += length
        return self.data.place

    def _add_video(self, name: str, pictures: NDArray[np.uint8]) -> dict[str, Any]:
        shard, file = self.video[name], self.video_file.get(name)
        if file is not None and shard.is_full(file.size, len(pictures)):
            file.close()
            shard.advance()
            file = None
        if file is None:
            path = self._path(features.VIDEO, video_key=name, **shard.place)
            # A key frame every other frame, as LeRobot writes them: training asks for single frames.
            file = mp4.Mp4(path, self.fps, *pictures.shape[1:3], key_interval=2)
            self.video_file[name] = file
        start = file.frames
        file.add(pictures)
        shard.frames = file.frames
        return shard.place | {"from_timestamp": start / self.fps, "to_timestamp": file.frames / self.fps}

    def _count(self, name: str, values: NDArray[Any]) -> dict[str, list[Any]]:
        """The statistics of an episode's column, which also goes into those of all."""
        if self.features[name]["dtype"] not in ("image", "video"):
            self.values.setdefault(name, []).append(values)
            return numeric_stats(values)
        histogram = np.stack([np.bincount(values[..., c].ravel(), minlength=256) for c in range(3)])
        self.histograms[name] = self.histograms.get(name, 0) + histogram
        return picture_stats(histogram, len(values))

    def _write_episodes(self) -> None:
        """Writes `_META_ROWS` rows at a time, into a new file wherever the last one is full."""
        shard = _Shard(self.limits.data_mb, self.limits.chunks_size)
        writer, path = None, self._path(features.EPISODES, **shard.place)
        for start in range(0, len(self.rows), _META_ROWS):
            rows = self.rows[start : start + _META_ROWS]
            if writer is not None and shard.is_full(path.stat().st_size, len(rows)):
                writer.close()
                shard.advance()
                writer, path = None, self._path(features.EPISODES, **shard.place)
            placed = {f"meta/episodes/{name}": value for name, value in shard.place.items()}
            table = pa.Table.from_pylist([row | placed for row in rows])
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            shard.frames += len(rows)
        assert writer is not None
        writer.close()

    def _write_tasks(self) -> None:
        """A pandas frame whose index is the instruction."""
        import pandas

        index = pandas.Index(list(self.tasks), name="task")
        pandas.DataFrame({"task_index": list(self.tasks.values())}, index=index).to_parquet(self._path(features.TASKS))

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        self._path(name).write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")
