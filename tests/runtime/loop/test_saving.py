"""What an error leaves behind: the iterations that were finished, the configuration the run began with, no NaN."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genrl.config.sections import Checkpoint
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop import idle
from genrl.runtime.loop.frame import saved_on_error
from genrl.runtime.loop.guards import NonFiniteError
from genrl.runtime.loop.loop import Loop
from genrl.runtime.weights import weights as runtime_weights
from tests.run_folders import differences
from tests.runtime.loop.loops import Evaluation, Settings, backward, loop, values
from tests.runtime.loop.test_loop import Counter, learn, train


def saved(one: Loop) -> str | None:
    found = checkpoint.latest(one.process.run.checkpoints)
    return None if found is None else found.name


def failing(one: Loop, at: int, *, where: str) -> None:
    """Train, and meet a ZeroDivisionError in iteration `at`: before its update, or after it."""
    with pytest.raises(ZeroDivisionError), saved_on_error(one):
        for iteration in one.iterations():
            if iteration == at:
                if where == "after an update":
                    backward(one, policy=3.0)
                    one.optimization.step(["policy"])
                raise ZeroDivisionError
            learn(one, Counter())


@pytest.mark.parametrize("where", ["before an update", "after an update"])
def test_an_error_saves_the_finished_iterations(tmp_path: Path, where: str) -> None:
    """And the run goes on from them as one that never failed."""
    straight = loop(tmp_path / "straight")
    train(straight, Counter())
    one = loop(tmp_path / "one")
    failing(one, 2, where=where)
    assert saved(one) == "step-000002"
    again = loop(tmp_path / "one")
    again.restore(one.process.run.checkpoints / "step-000002")
    train(again, Counter())
    assert differences(straight.process.run.folder, again.process.run.folder) == []


def test_an_error_in_the_first_iteration_leaves_nothing_that_blocks_a_start(tmp_path: Path) -> None:
    one = loop(tmp_path)
    failing(one, 0, where="before an update")
    assert not one.process.run.checkpoints.exists()


def test_what_cannot_be_undone_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_weights, "LARGEST_COPY", 0)
    one = loop(tmp_path / "updated")
    failing(one, 2, where="after an update")
    assert saved(one) is None
    one = loop(tmp_path / "not")
    failing(one, 2, where="before an update")
    assert saved(one) == "step-000002"


def test_an_idle_run_ends_saved(tmp_path: Path) -> None:
    one = loop(tmp_path, Settings(idle_iterations=2))
    with pytest.raises(RuntimeError, match="last 2 iterations changed no weight"), saved_on_error(one):
        for _ in one.iterations():
            one.finish({})
    assert saved(one) == "step-000002" and one.memory[idle.KEY] == 2


def test_a_row_that_could_not_be_written_is_written_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = loop(tmp_path)

    def full(step: int, values: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), saved_on_error(one):
        for iteration in one.iterations():
            if iteration == 1:
                monkeypatch.setattr(one.process.log, "log", full)
            learn(one, Counter())
    assert saved(one) == "step-000002"
    again = loop(tmp_path)
    again.restore(one.process.run.checkpoints / "step-000002")
    train(again, Counter())
    assert [row["step"] for row in read_metrics(again.process.run.metrics)] == [1, 2, 3, 4]


def test_an_evaluation_that_raises_is_done_again(tmp_path: Path) -> None:
    broken = [True]

    def judge(iteration: int) -> dict[str, float]:
        if iteration == 2 and broken:
            raise ZeroDivisionError
        return {"eval/success_mean": 0.5}

    settings = Settings(evaluation=Evaluation(2))
    one = loop(tmp_path, settings, evaluate=judge)
    with pytest.raises(ZeroDivisionError), saved_on_error(one):
        train(one, Counter())
    broken.clear()
    again = loop(tmp_path, settings, evaluate=judge)
    again.restore(one.process.run.checkpoints / "step-000002")
    train(again, Counter())
    rows = {row["step"]: row.get("eval/success_mean") for row in read_metrics(again.process.run.metrics)}
    assert rows == {0: 0.5, 1: None, 2: 0.5, 3: None, 4: 0.5}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, value: float) -> None:
    """Neither after the last update nor where the error comes later."""
    one = loop(tmp_path, Settings(iterations=3, checkpoint=Checkpoint(every=1, keep=5)))
    with pytest.raises(NonFiniteError, match=r"weights/policy.*were not saved.*genrl resume"), saved_on_error(one):
        for iteration in one.iterations():
            backward(one, policy=1.0)
            one.optimization.step(["policy"])
            if iteration == 2:
                one.weights.named["policy"].data[1] = value
            one.finish({})
    assert saved(one) == "step-000002"
    assert all(
        torch.isfinite(x).all()
        for x in checkpoint.load(one.process.run.checkpoints / "step-000002").tensors["weights"].values()
    )
    assert not torch.isfinite(values(one)["policy"]).all()


def test_a_checkpoint_has_the_configuration_the_run_began_with(tmp_path: Path) -> None:
    one = loop(tmp_path, Settings(iterations=1))
    one.process = replace(one.process, config="lr: 0.001\n")
    one.process.run.folder.mkdir(parents=True)
    one.process.run.config.write_text("lr: 0.5\n")
    train(one, Counter())
    assert (one.process.run.checkpoints / "step-000001" / "config.yaml").read_text() == "lr: 0.001\n"


@pytest.mark.parametrize("how", ["moved", "removed", "another run's"])
def test_a_folder_that_is_another_is_noticed(tmp_path: Path, how: str) -> None:
    """And nothing is written under its name."""
    one = loop(tmp_path)
    folder = one.process.run.folder
    folder.mkdir(parents=True)
    one.process.run.info.write_text('{"started": "now"}')
    one.process = replace(one.process, started="now")
    with pytest.raises(RuntimeError, match="was moved, removed or replaced"), saved_on_error(one):
        for iteration in one.iterations():
            if iteration == 1:
                shutil.rmtree(folder) if how == "removed" else folder.rename(tmp_path / "moved")
                if how == "another run's":
                    folder.mkdir()
                    one.process.run.info.write_text('{"started": "later"}')
            learn(one, Counter())
    assert [path.name for path in folder.iterdir()] == ["run.json"] if how == "another run's" else not folder.exists()
