"""A run is read on from where the last look ended, whatever happens to its files meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from genrl.runtime.folder.run import read_metrics, truncate_metrics, write_atomic
from genrl.runtime.show.pages.followed import Followed
from tests.runtime.show.pages.folders import log, make


def values(run: Followed, key: str) -> list[tuple[float, float | None]]:
    run.look()
    assert run.problem == ""
    return run.columns[key].points() if key in run.columns else []


def test_rows_are_added_as_they_are_written(tmp_path: Path) -> None:
    run = Followed(tmp_path / "run")
    run.look()
    assert not run.exists and run.problem == ""
    folder = make(tmp_path / "run")
    assert values(run, "loss") == [] and run.exists and run.planned == 10
    log(folder, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None, "kl": 1}])
    assert values(run, "loss") == [(1, 2.0), (2, None)] and run.done == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 3.0, "st')
        file.flush()
        assert len(values(run, "loss")) == 2
        file.write('ep": 3}\n')
    assert values(run, "loss") == [(1, 2.0), (2, None), (3, 3.0)]
    assert run.columns["loss"].missing == 1 and run.columns["loss"].last == 3.0 and run.columns["kl"].is_constant


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    log(folder, ({"step": step, "loss": 1.0} for step in range(20_000)))
    run = Followed(folder)
    assert len(values(run, "loss")) == 20_000
    with (folder / "metrics.jsonl").open("r+b") as file:  # in place: only a second reading would see it
        file.write(b"#")
    log(folder, [{"step": 20_000, "loss": 2.0}])
    assert values(run, "loss")[-1] == (20_000, 2.0) and len(run.columns["loss"].steps) == 20_001


def test_a_resumed_run_has_written_its_rows_anew(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    log(folder, ({"step": step, "loss": float(step)} for step in range(8)))
    run = Followed(folder)
    assert len(values(run, "loss")) == 8
    truncate_metrics(folder / "metrics.jsonl", 4)
    log(folder, ({"step": step, "loss": -1.0} for step in range(5, 12)))
    assert values(run, "loss") == [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").unlink()
    assert values(run, "loss") == []


def test_what_cannot_be_read_is_told_and_nothing_more_is_lost(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    log(folder, [{"step": 1, "loss": 2.0}])
    run = Followed(folder)
    assert len(values(run, "loss")) == 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no row\n")
    for _ in range(2):
        run.look()
        assert "metrics.jsonl:2: not a row of metrics" in run.problem and run.done == 1
    write_atomic(folder / "metrics.jsonl", '{"step": 1, "loss": 5.0}\n')
    assert values(run, "loss") == [(1, 5.0)]
    (folder / "config.yaml").write_text("iterations: [\n")
    for _ in range(2):
        run.look()
        assert run.problem and run.planned == 10


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, "x: " + "[" * 500, "n: 1\n" * 100_000, "a: 1\na: 2\n", "{"])
def test_a_configuration_that_is_none_costs_nothing(tmp_path: Path, text: str) -> None:
    """A page is shown beside what is wrong, within a second."""
    (folder := make(tmp_path / "run")).joinpath("config.yaml").write_text(text)
    run, began = Followed(folder), time.process_time()
    run.look()
    assert run.problem and run.settings == {} and time.process_time() - began < 1
