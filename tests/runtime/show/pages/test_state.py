"""What the page says a run is doing, from its files alone."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genrl.runtime.folder.run import read_metrics, truncate_metrics, write_atomic
from genrl.runtime.show.pages.state import Followed, pace, state_of, warnings
from tests.runtime.show.pages.folders import beat, log, make


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def looked(folder: Path) -> Followed:
    run = Followed(folder)
    run.look()
    return run


@pytest.mark.parametrize(
    ("word", "note", "happens"),
    [
        ("running", "sampling, iteration 4", lambda folder: beat(folder)),
        ("running", "sampling, iteration 4, no progress for 1 min 30 s", lambda folder: beat(folder, ago=90)),
        ("hung", "no progress for 11 min 40 s", lambda folder: beat(folder, ago=700)),
        ("hung", "ended by its watchdog in sampling, iteration 4", lambda folder: beat(folder, ended=True, pid=gone())),
        ("stopped", "killed in sampling, iteration 4; to go on: genrl resume", lambda folder: beat(folder, pid=gone())),
        ("running", "sampling, iteration 4", lambda folder: beat(folder, pid=gone(), host="another.machine")),
        ("stopped", "to go on: genrl resume", lambda folder: None),
        ("stopped", "to go on: genrl resume", lambda folder: (folder / "config.yaml").write_text("iterations: 3.5\n")),
        ("starting", "loading the model", lambda folder: os.utime(folder / "run.json", (0, time.time() + 1))),
        ("finished", "", lambda folder: log(folder, [{"step": 10}])),
    ],
)
def test_states(word: str, note: str, happens: Callable[[Path], object], tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    log(folder, [{"step": 3, "loss": 1.0}])
    happens(folder)
    result = state_of(looked(folder))
    assert result.word == word and note in result.note


def test_one_killed_process_of_several_stops_the_run_and_its_own_limit_says_when_it_hangs(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    beat(folder, 0)
    beat(folder, 1, pid=gone(), ago=3)
    assert state_of(looked(folder)).word == "stopped" and state_of(looked(tmp_path / "later")).word == "waiting"
    folder = make(tmp_path / "limited", "iterations: 10\ndistributed: {timeout_s: 30.0}\n")
    beat(folder, ago=40)
    assert state_of(looked(folder)).word == "hung"


def test_pace_is_of_the_last_fifty_iterations_with_their_evaluations(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", "iterations: 200\n")
    assert pace(looked(folder)) is None
    log(folder, [{"step": 0, "eval/total_mean": 0.5}])
    log(folder, ({"step": step, "timing/iteration_s": 9.0} for step in range(1, 51)))
    log(folder, ({"step": step, "timing/iteration_s": 2.0} | ({"timing/eval_s": 25.0} if step == 60 else {})
                 for step in range(51, 101)))  # fmt: skip
    result = pace(looked(folder))
    assert result is not None and result.seconds == pytest.approx(2.5) and result.left == pytest.approx(250.0)


@pytest.mark.parametrize(
    ("logged", "state", "warned"),
    [
        ({}, "stopped", ""),
        ({"collapse/shapes": 0.12}, "stopped", "shapes lies 0.12 below its best at iteration 3; reward hacking, perha"),
        ({"collapse/loss": 8.0}, "stopped", "loss (8) left its own history at iteration 3"),
        ({"collapse/back": 1.0}, "stopped", "after iteration 3 the run went back to iteration 1"),
        ({"collapse/stopped": 1.0}, "finished", "was stopped after iteration 3; its best is that of iteration 1"),
    ],
)
def test_a_collapse(logged: dict[str, float], state: str, warned: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run", "iterations: 10\n")
    log(folder, [{"step": step, "eval/shapes_mean": 0.5} | (logged if step == 3 else {}) for step in range(5)])
    run = looked(folder)
    result = list(warnings(run))
    assert state_of(run).word == state and len(result) == bool(warned) and warned in "".join(result)
    assert state != "finished" or "the best evaluation was that of step 1" in state_of(run).note


@pytest.mark.parametrize(
    ("total", "held_out", "warned"),
    [
        ([0.1, 0.2, 0.3], [0.9, 0.8, 0.7], True),
        ([0.1, 0.2, 0.3], [0.9, 0.9, 0.7], False),  # one evaluation is none in a row
        ([0.1, 0.2, 0.3], [0.9, 0.89, 0.88], False),  # within a tenth of the standard deviation
        ([0.3, 0.2, 0.1], [0.9, 0.8, 0.7], False),  # all gets worse: no reward is exploited
    ],
)
def test_a_reward_that_falls_while_the_total_rises_is_told(
    total: list[float], held_out: list[float], warned: bool, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    log(folder, ({"step": step, "eval/total_mean": t, "eval/ocr_mean": o, "eval/ocr_std": 0.4}
                 for step, (t, o) in enumerate(zip(total, held_out, strict=True))))  # fmt: skip
    result = list(warnings(looked(folder)))
    assert len(result) == warned and all("ocr fell from 0.9 to 0.7 while the total rose" in text for text in result)


def test_iterations_without_scores_are_told(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    log(folder, [{"step": 1, "reward/total_mean": 0.5}, {"step": 2, "reward/total_mean": None}])
    assert list(warnings(looked(folder))) == ["iteration 2 taught nothing: no sample had a score"]


# -- A run is read on from where the last look ended, whatever happens to its files meanwhile
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
    folder = make(tmp_path / "resumed")
    log(folder, ({"step": step, "loss": float(step)} for step in range(8)))
    run = Followed(folder)
    assert len(values(run, "loss")) == 8
    truncate_metrics(folder / "metrics.jsonl", 4)
    log(folder, ({"step": step, "loss": -1.0} for step in range(5, 12)))
    assert values(run, "loss") == [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").unlink()
    assert values(run, "loss") == []


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    log(folder, ({"step": step, "loss": 1.0} for step in range(20_000)))
    run = Followed(folder)
    assert len(values(run, "loss")) == 20_000
    with (folder / "metrics.jsonl").open("r+b") as file:  # in place: only a second reading would see it
        file.write(b"#")
    log(folder, [{"step": 20_000, "loss": 2.0}])
    assert values(run, "loss")[-1] == (20_000, 2.0) and len(run.columns["loss"].steps) == 20_001


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


ROUNDS = zip("abcdefgh", "bcdefghi", strict=True)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
BOMB += "".join(f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n" for before, after in ROUNDS)


@pytest.mark.parametrize("text", [BOMB, "x: " + "[" * 500, "n: 1\n" * 100_000, "a: 1\na: 2\n", "{"])
def test_a_configuration_that_is_none_costs_nothing(tmp_path: Path, text: str) -> None:
    (folder := make(tmp_path / "run")).joinpath("config.yaml").write_text(text)
    run, began = Followed(folder), time.process_time()
    run.look()
    assert run.problem and run.settings == {} and time.process_time() - began < 1
