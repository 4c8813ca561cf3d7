"""LeRobotDataset v3.0: what is written is read, in the published layout; what is broken is named."""

import io
import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from genrl.vla.data.lerobot_dataset import Episode, Limits, open_dataset, write_dataset
from genrl.vla.data.lerobot_dataset.read import _values

TOP, WRIST = "observation.images.top", "observation.images.wrist"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def episode(number: int, length: int = 5, *, pictures: bool = True) -> Episode:
    rng = np.random.default_rng(number)
    columns = {
        "observation.state": rng.normal(size=(length, 3)).astype(np.float32),
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "next.reward": rng.normal(size=(length, 1)).astype(np.float32),
        "next.done": np.arange(length)[:, None] == length - 1,
        "phase": rng.integers(0, 9, size=(length, 4)),
        "level": rng.integers(0, 256, size=(length, 1)).astype(np.uint8),
        "exact": rng.normal(size=(length, 2)),
    }
    if pictures:
        columns[TOP] = rng.integers(0, 256, size=(length, 16, 20, 3), dtype=np.uint8)
        columns[WRIST] = smooth(number, length)
    return Episode([f"do {number % 3}"] * (length - 1) + ["stop"], columns)


def smooth(number: int, length: int, size: int = 32) -> np.ndarray:
    """Pictures that differ from frame to frame, and that a lossy codec keeps nearly as they are."""
    level = 30 + 25 * ((np.arange(length) + 3 * number) % 8)
    x = np.linspace(0, 20, size)
    shown = level[:, None, None, None] + x[None, None, :, None] + np.zeros((1, size, 1, 3))
    return np.clip(shown, 0, 255).astype(np.uint8)


def assert_equal(actual: Episode, expected: Episode) -> None:
    assert list(actual.instructions) == list(expected.instructions)
    assert actual.columns.keys() == expected.columns.keys()
    for name, values in expected.columns.items():
        assert actual.columns[name].dtype == values.dtype and np.array_equal(actual.columns[name], values), name


@pytest.mark.parametrize("limit", [100, 0.03])
def test_what_is_written_is_read(tmp_path: Path, limit: float) -> None:
    written = [episode(number, 3 + number) for number in range(7)]
    result = write_dataset(tmp_path / "set", iter(written), fps=10, limits=Limits(chunks_size=2, data_mb=limit))
    files = sorted(path.relative_to(tmp_path / "set/data").as_posix() for path in tmp_path.glob("set/data/*/*"))
    assert files[0] == "chunk-000/file-000.parquet" and (len(files) == 1) == (limit == 100)
    if limit < 1:
        assert "chunk-001/file-000.parquet" in files and "chunk-000/file-002.parquet" not in files
        assert all(path.stat().st_size < 1.5 * limit * 2**20 for path in tmp_path.glob("set/data/*/*"))
    for a, b in zip(result.read(), written, strict=True):
        assert_equal(a, b)
    (only,) = result.read(["action"], [4])
    assert only.columns.keys() == {"action"} and np.array_equal(only.columns["action"], written[4].columns["action"])
    picked = list(result.read(["next.reward", TOP], [6, 0, 1]))
    assert [len(part.instructions) for part in picked] == [9, 3, 4]
    assert np.array_equal(picked[0].columns[TOP], written[6].columns[TOP])
    assert result.cameras == [TOP, WRIST] and len(result) == 7 and not list(tmp_path.glob("*.partial"))


def test_statistics_are_numpys(tmp_path: Path) -> None:
    """Of all frames in meta/stats.json, of each episode in meta/episodes; pictures per channel, in [0, 1]."""
    made = [episode(number, 4 + number) for number in range(3)]
    actual = write_dataset(tmp_path / "set", made, fps=10)
    assert actual.stats.keys() == actual.features.keys()
    for name in made[0].columns:
        values = np.concatenate([part.columns[name] for part in made])
        count, scale, shape = len(values), 255.0 if values.ndim == 4 else 1.0, values.shape[-1:]
        flat = values.reshape(-1, *shape) / scale
        of = actual.stats[name]
        assert of["count"].tolist() == [count]
        for key, expected in {"min": flat.min(0), "max": flat.max(0), "mean": flat.mean(0), "std": flat.std(0)}.items():
            np.testing.assert_allclose(of[key].numpy(), expected, rtol=1e-6, atol=1e-7)
        for key, share in QUANTILES.items():
            np.testing.assert_allclose(of[key].numpy(), np.quantile(flat, share, axis=0), rtol=1e-6, atol=1e-7)
    row = pq.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet").to_pylist()[1]
    np.testing.assert_allclose(row["stats/action/mean"], made[1].columns["action"].mean(0), rtol=1e-6)
    assert np.shape(row[f"stats/{TOP}/q90"]) == (3, 1, 1) and row[f"stats/{TOP}/count"] == [5]
    assert actual.stats["episode_index"]["max"].tolist() == [2] and actual.stats["index"]["max"].tolist() == [14]


def test_files_are_those_that_lerobot_and_hugging_face_datasets_read(tmp_path: Path) -> None:
    made = [episode(number) for number in range(4)]
    write_dataset(tmp_path / "set", made, fps=10, names={"action": ["x", "y"]}, robot_type="arm")
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    features = info.pop("features")
    counts = {"total_episodes": 4, "total_frames": 20, "total_tasks": 4, "fps": 10, "robot_type": "arm"}
    limits = {"chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
    where = {"codebase_version": "v3.0", "splits": {"train": "0:4"}, "data_path": DATA, "video_path": None}
    assert info == counts | limits | where
    assert features["action"] == {"dtype": "float32", "shape": [2], "names": ["x", "y"]}
    assert features[TOP] == {"dtype": "image", "shape": [16, 20, 3], "names": ["height", "width", "channels"]}
    assert features["timestamp"] == {"dtype": "float32", "shape": [1], "names": None}
    tasks = pandas.read_parquet(tmp_path / "set/meta/tasks.parquet")
    assert tasks.index.name == "task" and tasks.loc["do 2"].task_index == 3 and tasks.loc["stop"].task_index == 1
    rows = pq.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert rows[2]["tasks"] == ["do 2", "stop"] and rows[2]["length"] == 5
    assert (rows[2]["dataset_from_index"], rows[2]["dataset_to_index"]) == (10, 15)
    assert not any(rows[2][f"{part}/{key}_index"] for part in ("data", "meta/episodes") for key in ("chunk", "file"))
    file = pq.ParquetFile(tmp_path / "set/data/chunk-000/file-000.parquet")
    assert file.num_row_groups == 4
    kinds = {field.name: field.type for field in file.schema_arrow}
    assert kinds["action"] == pa.list_(pa.float32(), 2) and kinds["next.reward"] == pa.float32()
    assert kinds["next.done"] == pa.bool_() and kinds["task_index"] == pa.int64() and kinds["timestamp"] == pa.float32()
    assert kinds[TOP] == pa.struct({"bytes": pa.binary(), "path": pa.string()})
    files = str(tmp_path / "set/data/*/*.parquet")
    result = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert result.features[TOP] == datasets.Image() and result.features["action"].length == 2 and len(result) == 20
    row = result[7]
    assert np.array_equal(np.asarray(row[TOP]), made[1].columns[TOP][2]) and row["next.done"] is False
    assert (row["episode_index"], row["frame_index"], row["index"]) == (1, 2, 7)


def by_hand(folder: Path) -> None:
    """A data set as other writers make them: one row group, tasks of an unnamed index, ragged types, extras."""
    for part in ("meta/episodes/chunk-000", "data/chunk-000"):
        (folder / part).mkdir(parents=True)
    png = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), 200, np.uint8)).save(png, "PNG")
    features = {
        "observation.image": {"dtype": "image", "shape": [3, 4, 6], "names": ["channels", "height", "width"]},
        "action": {"dtype": "float32", "shape": [2], "names": {"motors": ["a", "b"]}, "fps": 30.0},
        "pose": {"dtype": "float32", "shape": [2, 2], "names": None},
        "note": {"dtype": "string", "shape": [1], "names": None},
        **{name: {"dtype": "int64", "shape": [1], "names": None} for name in ("frame_index", "episode_index")},
    }
    info = {"codebase_version": "v3.0", "total_episodes": 2, "fps": 30, "data_path": DATA, "features": features}
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/stats.json").write_text(json.dumps({"action": {"min": [0, 0], "max": [5, 6], "count": [3]}}))
    pandas.DataFrame({"task_index": [0]}, index=["lift it"]).to_parquet(folder / "meta/tasks.parquet")
    place = {"tasks": ["lift it"], "data/chunk_index": 0, "data/file_index": 0}
    rows = [{"episode_index": number, "length": length, **place} for number, length in enumerate((2, 1))]
    pq.write_table(pa.Table.from_pylist(rows), folder / "meta/episodes/chunk-000/file-000.parquet")
    table = {
        "observation.image": [{"bytes": png.getvalue(), "path": "x.png"}] * 3,
        "action": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
        "pose": [[[1.0, 2.0], [3.0, 4.0]]] * 3,
        "note": ["a", "b", "c"],
    }
    table |= {"timestamp": [0.0, 1 / 30, 0.0], "frame_index": [0, 1, 0], "episode_index": [0, 0, 1]}
    table |= {"index": [0, 1, 2], "task_index": [0, 0, 0], "extra": [1, 2, 3]}
    pq.write_table(pa.table(table), folder / "data/chunk-000/file-000.parquet")


def spoil(folder: Path, change: dict) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_set_made_by_hand_is_read_also_with_matrices_of_datasets(tmp_path: Path) -> None:
    by_hand(tmp_path / "set")
    result = open_dataset(tmp_path / "set")
    with pytest.raises(KeyError, match="no column 'actions', did you mean 'action'"):
        result.read(["actions"])
    with pytest.raises(IndexError, match=r"episodes 0 to 1, not \[2\]"):
        result.read(episodes=[0, 2])
    first, second = result.read()
    assert list(first.instructions) == ["lift it"] * 2 and result.fps == 30
    assert np.array_equal(first.columns["action"], np.array([[1, 2], [3, 4]], np.float32))
    assert second.columns["pose"].tolist() == [[[1, 2], [3, 4]]] and second.columns["note"].tolist() == [["c"]]
    assert first.columns["observation.image"].shape == (2, 4, 6, 3) and first.columns["observation.image"].min() == 200
    assert result.stats["action"]["max"].tolist() == [5, 6] and "q01" not in result.stats["action"]
    path = tmp_path / "set/data/chunk-000/file-000.parquet"
    table = pq.read_table(path).drop(["observation.image"])
    kinds = datasets.Features({"pose": datasets.Array2D((2, 2), "float32")})
    matrices = datasets.Dataset.from_dict({"pose": np.arange(12.0).reshape(3, 2, 2).tolist()}, features=kinds)
    pq.write_table(table.drop(["pose"]).append_column("pose", matrices.data.column("pose")), path)
    (second,) = open_dataset(tmp_path / "set").read(["pose"], [1])
    assert second.columns["pose"].tolist() == [[[8, 9], [10, 11]]]


@pytest.mark.parametrize("limit", [200, 0.001])
def test_videos_hold_the_frames_of_every_episode(tmp_path: Path, limit: float) -> None:
    """Several episodes in a file, several files, two cameras; frames found by time, near enough to tell them apart."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    made = [
        Episode(["x"] * n, {"action": np.zeros((n, 1), np.float32), TOP: smooth(k, n), WRIST: smooth(k + 1, n, 48)})
        for k, n in enumerate((5, 1, 8, 6))
    ]
    result = write_dataset(tmp_path / "set", made, fps=7, videos=True, limits=Limits(chunks_size=2, video_mb=limit))
    files = list(tmp_path.glob(f"set/videos/{TOP}/chunk-*/file-*.mp4"))
    assert (len(files) == 1) == (limit == 200) and not list(tmp_path.glob("set/images*"))
    assert result.features[TOP]["dtype"] == "video" and result.features[TOP]["info"]["video.codec"] == "h264"
    for numbers in ([0, 1, 2, 3], [3], [2, 0]):
        for number, part in zip(numbers, result.read(episodes=numbers), strict=True):
            for name in (TOP, WRIST):
                error = part.columns[name].astype(int) - made[number].columns[name]
                assert np.abs(error).max() <= 8, (number, name)  # neighbouring frames differ by 25
    with av.open(str(files[0])) as container:
        shown = [(frame.time, frame.key_frame) for frame in container.decode(video=0)]
    times, keys = zip(*shown, strict=True)
    assert np.allclose(times, np.arange(len(times)) / 7, atol=1e-4)  # what LeRobot tolerates
    assert all(keys[::2])  # single frames are found fast
    row = result.index[2]
    if limit == 200:
        assert row[f"videos/{TOP}/from_timestamp"] == pytest.approx(6 / 7)
        assert row[f"videos/{TOP}/to_timestamp"] == pytest.approx(2.0)
    files[0].write_bytes(b"no video")
    with pytest.raises(ValueError, match="cannot be decoded"):
        list(open_dataset(tmp_path / "set").read())


def test_a_video_that_is_too_short_and_odd_sizes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    made = [Episode(["x"] * 4, {"action": np.zeros((4, 1), np.float32), TOP: smooth(0, 4)})]
    write_dataset(tmp_path / "short", made, fps=10, videos=True)
    longer = [Episode(["x"] * 9, {"action": np.zeros((9, 1), np.float32), TOP: smooth(0, 9)})]
    result = write_dataset(tmp_path / "long", longer, fps=10, videos=True)
    place = f"videos/{TOP}/chunk-000/file-000.mp4"
    shutil.copy(tmp_path / "short" / place, tmp_path / "long" / place)
    with pytest.raises(ValueError, match=r"file-000.mp4 has no frame at 0.4000 s"):
        list(result.read())
    odd = [Episode(["x"] * 4, {"action": np.zeros((4, 1), np.float32), TOP: smooth(0, 4, 31)})]
    with pytest.raises(ValueError, match="even height and width, got 31 x 31"):
        write_dataset(tmp_path / "odd", odd, fps=10, videos=True)
    assert not (tmp_path / "odd").exists() and not (tmp_path / "odd.partial").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v2.1"}, "codebase_version is 'v2.1'.*convert_dataset_v21_to_v30"),
        ({"storage_format": "lance"}, "storage_format is 'lance'"),
        ({"total_episodes": 3}, "must have the episodes 0 to 2 .*found 2 rows"),
        ({"data_path": "../data/file.parquet"}, "leads out of the data set"),
        ({"data_path": "/data/{file_index}.parquet"}, "leads out of the data set"),
        ({"data_path": "data/{file}.parquet"}, "cannot be filled in"),
    ],
)
def test_other_versions_and_lying_info_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    by_hand(tmp_path / "set")
    spoil(tmp_path / "set", change)
    with pytest.raises(ValueError, match=message):
        list(open_dataset(tmp_path / "set").read())


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no meta/info.json"):
        open_dataset(tmp_path)
    for name in ("meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"):
        folder = tmp_path / name.replace("/", "-")
        by_hand(folder)
        (folder / name).write_bytes(b"PAR1 and nothing")
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            list(open_dataset(folder).read())
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            list(open_dataset(folder).read())
    by_hand(tmp_path / "json")
    (tmp_path / "json/meta/stats.json").write_text("{")
    with pytest.raises(ValueError, match="stats.json is no JSON"):
        _ = open_dataset(tmp_path / "json").stats


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"action": None}, r"file-000.parquet has no columns \['action'\]"),
        ({"action": [[1.0], [2.0], [3.0]]}, "action of episode 0: 2 frames must have the shape .2., found 2 numbers"),
        ({"action": [[1.0], [2.0, 3.0, 4.0], [5.0, 6.0]]}, "action of episode 0: rows of 1 to 3 numbers"),
        ({"action": [[1.0, 2.0], None, [5.0, 6.0]]}, "action of episode 0: 1 values are missing"),
        ({"frame_index": [0, 2, 0]}, "episode 0 must have the frames 0 to 1"),
        ({"episode_index": [0, 0, 0]}, "episode 0 must have the frames 0 to 1"),
        ({"task_index": [0, 9, 0]}, r"task_index \[9\] of episode 0"),
        ({"action": [["1", "2"]] * 3}, "action of episode 0: the file has .*, not all of which are float32"),
        ({"observation.image": [{"bytes": b"no", "path": ""}] * 3}, "observation.image of episode 0, frame 0"),
        ({"observation.image": [{"bytes": None, "path": "a.png"}] * 3}, "frame 0: there is no picture"),
    ],
)
def test_data_that_do_not_fit_are_named(tmp_path: Path, columns: dict, message: str) -> None:
    by_hand(tmp_path / "set")
    path = tmp_path / "set" / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path).to_pydict() | columns
    pq.write_table(pa.table({name: values for name, values in table.items() if values is not None}), path)
    with pytest.raises(ValueError, match=message):
        list(open_dataset(tmp_path / "set").read())


@pytest.mark.parametrize(("values", "dtype"), [([0.3, 1.0], "bool"), ([0.5, 2.0], "int64"), ([0, 2], "bool")])
def test_numbers_are_not_cast_to_what_the_index_promises(values: list[float], dtype: str) -> None:
    with pytest.raises(ValueError, match=f"not all of which are {dtype}"):
        _values(pa.chunked_array([values]), dtype, (1,), "next.success")
    assert _values(pa.chunked_array([[0.0, 1.0]]), dtype, (1,), "next.success").tolist() == [[0], [1]]


GOOD = episode(1).columns


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Episode([], {}), "episode 1 has no frame"),
        (Episode(["x"] * 4 + [" "], GOOD), "episode 1, frame 4: the instruction is empty"),
        (Episode(["x"] * 4, GOOD), r"observation.state must be float32 \[4, 3\].*got float32 \[5, 3\]"),
        (episode(1, pictures=False), "episode 1 has the columns"),
        (Episode(["x"] * 5, GOOD | {"action": np.full((5, 2), np.nan, np.float32)}), "frame 0: action is not finite"),
        (Episode(["x"] * 5, GOOD | {"action": np.zeros((5, 2))}), "action must be float32"),
    ],
)
def test_episodes_that_do_not_fit_leave_nothing(tmp_path: Path, bad: Episode, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_dataset(tmp_path / "set", [episode(0), bad], fps=10)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [episode(0)], fps=10)
    with pytest.raises(FileExistsError, match="remove it"):
        write_dataset(tmp_path / "set", [episode(1)], fps=10)
    for episodes, names, message in (
        ([], None, "needs an episode"),
        ([episode(0)], {"acton": ["x"]}, r"names are given for \['acton'\]"),
        ([Episode(["x"] * 2, {"a/b": np.zeros((2, 1))})], None, "cannot be called 'a/b'"),
        ([Episode(["x"] * 2, {"a": np.zeros((2, 4, 4, 3))})], None, r"a must be numbers \[T, D\].*float64 \[2, 4, "),
    ):
        with pytest.raises(ValueError, match=message):
            write_dataset(tmp_path / "other", episodes, fps=10, names=names)
