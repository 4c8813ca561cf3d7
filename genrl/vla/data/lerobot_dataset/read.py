"""Reading a LeRobotDataset: the index at once, frames episode by episode."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from genrl.runtime.show.mp4 import read_mp4
from genrl.vla.data.lerobot_dataset import features
from genrl.vla.data.lerobot_dataset.features import Episode
from genrl.vla.policies.policy import Statistics
from genrl_rewards.pictures import open_picture

_CONVERT = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=<its repository>"


@dataclass(frozen=True)
class Dataset:
    """A data set in a folder: its index. `read` yields the frames.

    features: name -> "dtype" (numpy's name, or "image", "video"), "shape" of a frame, "names". tasks: the instructions
    by number. index: the row of every episode in meta/episodes, without statistics.
    """

    folder: Path
    fps: int
    features: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[int, str]
    index: Sequence[Mapping[str, Any]]
    data_path: str
    video_path: str | None

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.index)

    @property
    def cameras(self) -> list[str]:
        """The features that are pictures."""
        return [name for name, feature in self.features.items() if feature["dtype"] in ("image", "video")]

    @property
    def stats(self) -> Statistics:
        """meta/stats.json: for every feature min, max, mean, std, count and what quantiles it has, float32 [D].

        Pictures have [3], of values in [0, 1]. Raises FileNotFoundError where the data set has none.
        """
        content = _json(self.folder / features.STATS)
        return {
            feature: {name: torch.tensor(value, dtype=torch.float32).reshape(-1) for name, value in stats.items()}
            for feature, stats in content.items()
        }

    def read(self, columns: Sequence[str] | None = None, episodes: Iterable[int] | None = None) -> Iterator[Episode]:
        """The episodes (all of them, or those of some numbers) with some columns (all but the indices): see `Episode`.

        At most one data file and the pictures of one episode are in memory. Columns come as [T, *shape] in the
        feature's dtype. Raises KeyError for a column, IndexError for an episode that is not there, FileNotFoundError
        for a file, and ValueError for a file that is broken or not as the index says.
        """
        chosen = (
            list(columns) if columns is not None else [name for name in self.features if name not in features.INDICES]
        )
        for name in chosen:
            if name not in self.features:
                near = difflib.get_close_matches(name, self.features, n=1)
                raise KeyError(
                    f"{self.folder} has no column {name!r}"
                    + (f", did you mean {near[0]!r}?" if near else f", only {sorted(self.features)}")
                )
        numbers = list(episodes) if episodes is not None else list(range(len(self)))
        beyond = [number for number in numbers if not 0 <= number < len(self)]
        if beyond:
            raise IndexError(f"{self.folder} has the episodes 0 to {len(self) - 1}, not {beyond}")
        return self._episodes(chosen, numbers)

    def _episodes(self, columns: list[str], numbers: list[int]) -> Iterator[Episode]:
        in_data = [name for name in columns if self.features[name]["dtype"] != "video"]
        # A file holds many episodes: it is read once for those that stand together, and only one is in memory.
        for file, run in groupby(numbers, key=lambda number: self._file(self.data_path, self.index[number], "data")):
            these = list(run)
            table = _data_rows(file, [*dict.fromkeys([*in_data, *features.INDICES])], these)
            owner = table.column("episode_index").to_numpy()
            for number in these:
                rows = table.filter(pa.array(owner == number))
                yield self._episode(file, rows, number, columns)

    def _episode(self, file: Path, rows: pa.Table, number: int, columns: list[str]) -> Episode:
        length = self.index[number]["length"]
        place = rows.column("frame_index").to_numpy()
        if not np.array_equal(place, np.arange(length)):
            raise ValueError(
                f"{file}: episode {number} must have the frames 0 to {length - 1} in order, found {len(place)} rows "
                f"with frame_index {place[:5].tolist()}...; fetch the file again"
            )
        values: dict[str, NDArray[Any]] = {}
        for name in columns:
            feature, where = self.features[name], f"{file}: {name} of episode {number}"
            if feature["dtype"] == "video":
                values[name] = self._video(name, number, place)
            elif feature["dtype"] == "image":
                values[name] = _pictures(rows.column(name), where)
            else:
                values[name] = _values(rows.column(name), feature["dtype"], tuple(feature["shape"]), where)
        unknown = set(rows.column("task_index").to_pylist()) - self.tasks.keys()
        if unknown:
            raise ValueError(f"{file}: task_index {sorted(unknown)} of episode {number} is not in {features.TASKS}")
        return Episode([self.tasks[task] for task in rows.column("task_index").to_pylist()], values)

    def _video(self, name: str, number: int, place: NDArray[np.int64]) -> NDArray[np.uint8]:
        row = self.index[number]
        if self.video_path is None:
            raise ValueError(f"{self.folder / features.INFO}: {name} is a video, but video_path is null")
        file = self._file(self.video_path, row, f"videos/{name}", video_key=name)
        return read_mp4(file, row[f"videos/{name}/from_timestamp"] + place / self.fps, self.fps)

    def _file(self, template: str, row: Mapping[str, Any], prefix: str, **names: str) -> Path:
        """The file of an episode; never outside of the folder, whatever the template says."""
        places = {key: row.get(f"{prefix}/{key}") for key in ("chunk_index", "file_index")}
        if None in places.values():
            raise ValueError(f"{self.folder}/meta/episodes: an episode has no {prefix}/chunk_index or file_index")
        try:
            relative = PurePosixPath(template.format(**places, **names))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.folder / features.INFO}: the path {template!r} cannot be filled in: {error}"
            ) from error
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{self.folder / features.INFO}: the path {template!r} leads out of the data set")
        return self.folder / relative


def open_dataset(folder: Path) -> Dataset:
    """The data set in a folder. Reads the index only.

    Raises FileNotFoundError for a file that is missing, and ValueError for another version of the layout (saying how to
    convert it), for a broken file, and for an index that does not fit info.json.
    """
    folder = Path(folder)
    path = folder / features.INFO
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no LeRobotDataset: it has no {features.INFO}")
    info = _json(path)
    version = str(info.get("codebase_version"))
    if version.startswith(("v1", "v2")):
        raise ValueError(
            f"{path}: codebase_version is {version!r}, genrl reads v3.0. Convert it with lerobot: {_CONVERT}"
        )
    if not version.startswith("v3."):
        raise ValueError(f"{path}: codebase_version must be v3.0, found {version!r}")
    missing = [key for key in ("fps", "features", "total_episodes", "data_path") if key not in info]
    if missing:
        raise ValueError(f"{path} has no {missing}: it is not the file that LeRobot writes")
    if info.get("storage_format", "parquet") != "parquet":
        raise ValueError(f"{path}: storage_format is {info['storage_format']!r}; genrl reads parquet and mp4 only")
    index = _index(folder)
    if [row["episode_index"] for row in index] != list(range(info["total_episodes"])):
        raise ValueError(
            f"{folder}/meta/episodes must have the episodes 0 to {info['total_episodes'] - 1} ({features.INFO}: "
            f"total_episodes), found {len(index)} rows; fetch the folder again"
        )
    return Dataset(
        folder, info["fps"], info["features"], _tasks(folder), index, info["data_path"], info.get("video_path")
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, found {type(content).__name__}")
    return content


def _table(path: Path, columns: Sequence[str] | None = None, episodes: Sequence[int] | None = None) -> pa.Table:
    """Some columns of a parquet file, and the rows of some episodes only."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        filters = [("episode_index", "in", list(episodes))] if episodes is not None else None
        return pq.ParquetFile(path).read() if columns is None else pq.read_table(path, columns=columns, filters=filters)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fetch the file again") from error


def _data_rows(file: Path, columns: list[str], episodes: list[int]) -> pa.Table:
    if file.is_file():
        try:
            stored = pq.read_schema(file).names
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}; fetch the file again") from error
        absent = [name for name in columns if name not in stored]
        if absent:
            raise ValueError(f"{file} has no columns {absent}, which {features.INFO} promises; it has {sorted(stored)}")
    return _table(file, columns, episodes)


def _index(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("meta/episodes/*/*.parquet"))
    if not files:
        raise FileNotFoundError(f"{folder} has no meta/episodes/chunk-000/file-000.parquet")
    rows: list[dict[str, Any]] = []
    for file in files:
        table = _table(file)
        columns = [name for name in table.column_names if not name.startswith("stats/")]
        absent = [name for name in ("episode_index", "length") if name not in columns]
        if absent:
            raise ValueError(f"{file} has no columns {absent}, only {columns}")
        rows += table.select(columns).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _tasks(folder: Path) -> dict[int, str]:
    """The index of a pandas frame is its column `task`, or `__index_level_0__` where it was not given a name."""
    table = _table(folder / features.TASKS)
    text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise ValueError(f"{folder / features.TASKS} must have task_index and task, found {table.column_names}")
    return dict(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True))


def _pictures(column: pa.ChunkedArray, where: str) -> NDArray[np.uint8]:
    pictures = []
    for t, cell in enumerate(column.to_pylist()):
        content = cell["bytes"] if isinstance(cell, dict) else None
        if content is None:
            raise ValueError(f"{where}, frame {t}: there is no picture in the file")
        pictures.append(np.asarray(open_picture(content, f"{where}, frame {t}")))
    sizes = {picture.shape for picture in pictures}
    if len(sizes) > 1:
        raise ValueError(f"{where}: pictures of different sizes {sorted(sizes)}")
    return np.stack(pictures)


def _values(column: pa.ChunkedArray, dtype: str, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """A column of numbers or nested lists of them as [T, *shape]."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    count = len(array)
    while True:
        if array.null_count:
            raise ValueError(f"{where}: {array.null_count} values are missing (null)")
        if isinstance(array, pa.ExtensionArray):  # matrices, once `datasets` is imported
            array = array.storage
        elif isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            lengths = pc.min_max(pc.list_value_length(array)).as_py()
            if lengths["min"] != lengths["max"]:
                raise ValueError(f"{where}: rows of {lengths['min']} to {lengths['max']} numbers, not {list(shape)}")
            array = array.flatten()
        else:
            break
    if len(array) != count * math.prod(shape):
        raise ValueError(f"{where}: {count} frames must have the shape {list(shape)}, found {len(array)} numbers")
    values = np.array(array.to_pylist() if dtype == "string" else array.to_numpy(zero_copy_only=False))
    if dtype == "string":
        return values.reshape(count, *shape)
    alike = np.can_cast(values.dtype, dtype, "same_kind")
    if values.dtype.kind not in "fiub" or not (alike or np.array_equal(values.astype(dtype), values)):
        raise ValueError(f"{where}: the file has {values.dtype}, not all of which are {dtype} ({features.INFO})")
    return values.astype(dtype).reshape(count, *shape)
