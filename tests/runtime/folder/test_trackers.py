"""A resumed run goes on in the tracker; pictures, films and tables reach those that take them."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.tracking  # noqa: F401  # before packages that it looks for are stand-ins
import pytest
from PIL import Image

from genrl.runtime.folder import trackers
from genrl.runtime.folder.metrics import MetricLogger, by_heading, catalogue, document, markdown
from genrl.runtime.folder.run import Run, read_metrics, start
from genrl.runtime.folder.trackers import check_trackers

PICTURE = Image.new("RGB", (8, 8), (200, 0, 0))
ROWS: list[list[str | float]] = [["a | b", 0.5], ["c", float("nan")]]


def log_all(run: Run, name: str, first: int) -> None:
    """Two iterations, as a run logs them, after `first` of them."""
    film = run.folder / "film.gif"
    PICTURE.save(film, save_all=True, append_images=[Image.new("RGB", (8, 8))])
    logger = MetricLogger(run, [name], config={"a": {"b": 1}, "c": [1, 2]}, resumed_from=first)
    for step in (first + 1, first + 2):
        logger.log_picture(step, "samples/grid", PICTURE)
        logger.log_video(step, "videos/success-00", film)
        logger.log_table(step, "samples/rewards", ["prompt", "shapes"], ROWS)
        logger.log(step, {"loss": step / 2})
    logger.finish()


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a run that W&B wrote for a later upload: a LevelDB log after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, block, text = file.read_bytes(), 7, 2**15, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # the rest of a block that has no room for a header
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])  # after the checksum
        text += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            yield record
            text = b""


@pytest.mark.slow
def test_a_resumed_run_is_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    run = Run(tmp_path / "mine")
    run.folder.mkdir()
    log_all(run, "wandb", 0)
    log_all(run, "wandb", 2)
    wandb.teardown()  # its own process has written everything
    files = sorted(tmp_path.glob("mine/wandb/offline-run-*/*.wandb"))
    records = [list(wandb_records(file)) for file in files]
    begun = [record.run for some in records for record in some if record.HasField("run")]
    assert len(files) == 2
    assert {(one.run_id, one.display_name) for one in begun} == {(trackers.kept_ids(run)["wandb"], "mine")}
    logged = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for some in records
        for record in some
        if record.HasField("history")
    ]
    assert [(row["_step"], row["loss"]) for row in logged] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    kinds = {"samples/grid": "images/separated", "videos/success-00": "video-file", "samples/rewards": "table-file"}
    for row in logged:
        assert {key: row[f"{key}/_type"] for key in kinds} == kinds


def test_ids_of_a_new_run_and_broken_ones(tmp_path: Path) -> None:
    """A new run in the folder of a start that failed is new to trackers."""
    run = Run(tmp_path)
    run.trackers.write_text('{"wandb": "before"}')
    run.info.write_text('{"command": ["genrl", "train"], "resumed": []}')
    start(tmp_path, "seed: 0\n", seed=0, command=["genrl"])
    assert trackers.kept_ids(run) == {}
    for text in ("{", "[]", '{"wandb": 1}'):
        run.trackers.write_text(text)
        with pytest.raises(ValueError, match="repair it, or delete it"):
            trackers.kept_ids(run)


# -- trackio, which is not among the packages of the tests
class Recorder(ModuleType):
    """Stands for it: its functions and classes only note how they were called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.config = SimpleNamespace(update=lambda values, **_: self.calls.append(("config", (values,), {})))

    def init(self, **given: Any) -> SimpleNamespace:
        self.calls.append(("init", (), given))
        return SimpleNamespace(log=self.note("log"), finish=lambda: None)

    def note(self, name: str) -> Any:
        return lambda *args, **given: self.calls.append((name, args, given))

    def given(self, name: str) -> list[dict[str, Any]]:
        return [given for called, _, given in self.calls if called == name]

    def logged(self, key: str) -> list[int]:
        """Steps at which a key was logged."""
        return [given["step"] for name, args, given in self.calls if name == "log" and key in args[0]]


def test_trackio_goes_on_by_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four iterations in two parts, each logged once."""
    package = Recorder("trackio")
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["trackio"])
    for kind in ("Image", "Video", "Table"):
        setattr(package, kind, package.note(kind))
    for done in (0, 2):
        log_all(Run(tmp_path), "trackio", done)
    first, second = package.given("init")
    assert first == second and first["resume"] == "allow"
    assert first["name"] == f"{tmp_path.name}-{trackers.kept_ids(Run(tmp_path))['trackio'][:6]}"
    for key in ("loss", "samples/grid", "videos/success-00", "samples/rewards"):
        assert package.logged(key) == [1, 2, 3, 4]
    assert package.given("Table")[0] == {"columns": ["prompt", "shapes"], "data": [["a | b", 0.5], ["c", None]]}


FAILURES = [
    ("swanlab", RuntimeError("api_key not configured (no-tty)"), "api_key not configured.*swanlab login"),
    ("swanlab", SystemExit(1), "swanlab login"),
    ("swanlab", KeyError(), "KeyError.*SWANLAB_MODE=local"),
    ("wandb", ConnectionError("no route"), "no route.*WANDB_API_KEY.*WANDB_MODE=offline"),
    ("mlflow", OSError("refused"), "refused.*MLFLOW_TRACKING_URI"),
    ("aim", ValueError("locked"), "locked.*take it out of trackers"),
]


@pytest.mark.parametrize(("name", "error", "says"), FAILURES)
def test_a_tracker_that_does_not_start_is_an_error_that_says_what_to_do(
    name: str, error: BaseException, says: str, tmp_path: Path, monkeypatch: Any
) -> None:

    class Failing:
        requires_logging_directory = False

        def __init__(self, *given: Any, **keys: Any) -> None:
            pass

        def start(self) -> None:
            raise error

    monkeypatch.setattr("accelerate.tracking.LOGGER_TYPE_TO_CLASS", {name: Failing})
    with pytest.raises(ValueError, match=f"trackers: {name} does not start.*{says}"):
        trackers.start(name, Run(tmp_path), None, 0)


# -- Every metric is documented, every row is readable, and equal runs write equal rows
def test_the_page_is_made_from_the_catalogue_and_keys_find_their_entry_or_are_an_error(
    root: Path, tmp_path: Path
) -> None:
    page = (root / "docs" / "metrics.md").read_text()
    assert page == markdown(), "run `python -m genrl.runtime.folder.metrics > docs/metrics.md`"
    for section in by_heading().values():
        for key, doc in section.items():
            assert doc.formula and doc.reading.endswith((".", "!")), key
            assert catalogue()[key] is doc, key  # several methods may log the same
    for name in ("shapes", "shapes/count", "mine/text quality"):
        assert document(f"reward/{name}_mean") is catalogue()["reward/<name>_mean"]
    assert document("reward/total_mean") is catalogue()["reward/total_mean"]
    assert document("eval/my-scorer.v2_failed") is catalogue()["eval/<name>_failed"]
    assert document("timing/sample_s") is catalogue()["timing/sample_s"]
    logger = MetricLogger(Run(tmp_path))
    for key in ("", "losses", "reward/_mean", "reward/a/b/c_mean", "reward/shapes", "timing/<name>_s"):
        with pytest.raises(ValueError, match="has no entry"):
            logger.log(1, {key: 0.5})
    assert not Run(tmp_path).metrics.exists()


def test_rows_of_which_other_processes_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    other = MetricLogger(run, ["tensorboard"], enabled=False)
    other.log(1, {"loss": 1.0})
    other.log_picture(1, "samples", Image.new("RGB", (4, 4)))
    other.finish()
    assert not run.folder.exists()
    logger = MetricLogger(run)
    logger.log(0, {"eval/total_mean": 0.25})
    logger.log(1, {"loss": float("nan"), "kl": float("inf"), "grad_norm": None, "lr": 1 / 3, "updates": 2})
    assert run.metrics.read_text() == (
        '{"eval/total_mean": 0.25, "step": 0}\n'
        '{"grad_norm": null, "kl": null, "loss": null, "lr": 0.3333333333333333, "step": 1, "updates": 2}\n'
    )
    with pytest.raises(ValueError, match="unknown tracker 'tensorbord'.*tensorboard"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(ValueError, match="pip install tensorboard"):
        MetricLogger(Run(tmp_path), ["tensorboard"])


def events(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    tags = result.Tags()
    scalars = {tag: [(e.step, e.value) for e in result.Scalars(tag)] for tag in tags["scalars"]}
    images = {tag: [(e.step, e.width) for e in result.Images(tag)] for tag in tags["images"]}
    texts = {tag: result.Tensors(tag)[0].tensor_proto.string_val[0].decode().splitlines() for tag in tags["tensors"]}
    return scalars | images | texts


def test_tensorboard_shows_the_same_rows_a_table_and_a_resumed_run_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    logger = MetricLogger(run, ["tensorboard"], config={"a": {"b": 1}})
    for step in (1, 2, 3):
        logger.log(step, {"loss": step / 2, "kl": float("nan")})
    logger.log_picture(0, "samples", Image.new("RGB", (6, 4), (255, 0, 0)))
    logger.log_table(1, "rewards", ["prompt", "shapes"], [["a | b", 0.5], ["c", float("nan")]])
    logger.finish()
    logger = MetricLogger(run, ["tensorboard"], resumed_from=1)
    logger.log(2, {"loss": 10.0, "reward/mine/text quality_mean": 0.5})
    logger.finish()
    assert events(tmp_path / "tensorboard") == {
        "loss": [(1, 0.5), (2, 10.0)],
        "reward/mine/text quality_mean": [(2, 0.5)],
        "samples": [(0, 6)],
        "rewards/text_summary": ["| prompt | shapes |", "| --- | --- |", "| a \\| b | 0.5 |", "| c |  |"],
    }
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3, 2]  # `run.resume` is what cuts these
