"""Every metric is documented, every row is readable, and equal runs write equal rows."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.runtime.folder.metrics import MetricLogger, by_heading, catalogue, document, markdown
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.folder.trackers import check_trackers


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

    found = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    tags = found.Tags()
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags["scalars"]}
    images = {tag: [(e.step, e.width) for e in found.Images(tag)] for tag in tags["images"]}
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode().splitlines() for tag in tags["tensors"]}
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
