"""What an error leaves behind: the iterations that were finished, the configuration the run began with, no NaN."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from genrl.config.sections import Checkpoint
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.loop.frame import saved_on_error
from genrl.runtime.loop.guards import NonFiniteError, any_rank, non_finite, read_dump, require_finite, statistics
from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.state import Kept
from genrl.runtime.weights import weights as runtime_weights
from tests.run_folders import differences, start_ranks, wait
from tests.runtime.loop.loops import Settings, backward, loop, values
from tests.runtime.loop.test_loop import Counter, learn, train


def saved(one: Loop) -> str | None:
    result = checkpoint.latest(one.process.run.checkpoints)
    return None if result is None else result.name


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
    straight = loop(tmp_path / "straight")
    train(straight, Counter())
    one = loop(tmp_path / "one")
    failing(one, 2, where=where)
    assert saved(one) == "step-000002"
    again = loop(tmp_path / "one")
    again.restore(one.process.run.checkpoints / "step-000002")
    train(again, Counter())
    assert differences(straight.process.run.folder, again.process.run.folder) == []


def test_an_error_in_the_first_iteration_leaves_nothing_and_an_idle_run_ends_saved(tmp_path: Path) -> None:
    one = loop(tmp_path)
    failing(one, 0, where="before an update")
    assert not one.process.run.checkpoints.exists()
    one = loop(tmp_path / "idle", Settings(idle_iterations=2))
    with pytest.raises(RuntimeError, match="last 2 iterations changed no weight"), saved_on_error(one):
        for _ in one.iterations():
            one.finish({})
    assert saved(one) == "step-000002" and one.memory["idle"] == 2


def test_what_cannot_be_undone_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_weights, "LARGEST_COPY", 0)
    one = loop(tmp_path / "updated")
    failing(one, 2, where="after an update")
    assert saved(one) is None
    one = loop(tmp_path / "not")
    failing(one, 2, where="before an update")
    assert saved(one) == "step-000002"


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, value: float) -> None:
    one = loop(tmp_path, Settings(iterations=3, checkpoint=Checkpoint(every=1, keep=5)))
    with pytest.raises(NonFiniteError, match=r"weights/policy.*were not saved.*genrl resume"), saved_on_error(one):
        for iteration in one.iterations():
            backward(one, policy=1.0)
            one.optimization.step(["policy"])
            if iteration == 2:
                one.weights.named["policy"].data[1] = value
            one.finish({})
    assert saved(one) == "step-000002"
    held = checkpoint.load(one.process.run.checkpoints / "step-000002").tensors["weights"]
    assert all(torch.isfinite(x).all() for x in held.values())
    assert not torch.isfinite(values(one)["policy"]).all()


def test_a_checkpoint_has_the_configuration_the_run_began_with(tmp_path: Path) -> None:
    one = loop(tmp_path, Settings(iterations=1))
    one.process = replace(one.process, config="lr: 0.001\n")
    one.process.run.folder.mkdir(parents=True)
    one.process.run.config.write_text("lr: 0.5\n")
    train(one, Counter())
    assert (one.process.run.checkpoints / "step-000001" / "config.yaml").read_text() == "lr: 0.001\n"


@pytest.mark.parametrize("how", ["moved", "removed", "another run's", "made anew"])
def test_a_folder_that_is_another_is_noticed(tmp_path: Path, how: str) -> None:
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
                if how == "made anew":  # as by a film that was just written
                    folder.mkdir()
                    (folder / "film.gif").touch()
            learn(one, Counter())
    left = {"another run's": ["run.json"], "made anew": ["film.gif"]}.get(how, [])
    assert left == ([path.name for path in folder.iterdir()] if folder.exists() else [])
    assert not one.process.has_folder
    folder.mkdir(exist_ok=True)
    (folder / "run.lock").touch()
    one.process.run.info.unlink(missing_ok=True)
    assert one.process.has_folder  # run.json alone was removed: it only tells how the run was begun


def test_rows_that_are_removed_meanwhile_are_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricLogger(Run(tmp_path))
    log.log(0, {"lr": 1.0})
    Run(tmp_path).metrics.unlink()
    log.log(1, {"lr": 1.0})
    log.log(2, {"lr": 1.0})
    assert caplog.text.count("was removed while the run was going: the rows before 1 are lost") == 1


# -- A number that is not finite stops all ranks before the step, and its micro-batch can be read back
BAD = [float("nan"), float("inf"), -float("inf")]


def check(tmp_path: Path, value: float, where: str = "log-prob") -> None:
    latents = torch.arange(12.0).reshape(3, 4)
    require_finite(
        {"log_prob": torch.tensor([0.5, value]), "loss": torch.tensor(1.0)},
        where=where,
        step=12,
        dumps=tmp_path / "dumps",
        batch={"latents": latents, "first": latents[0], "view": latents.T},
        info={"prompts": ["<b>", "two"], "seeds": [1, 2]},
    )


def test_without_a_micro_batch_or_space_there_is_no_dump_but_the_error(tmp_path: Path) -> None:
    check(tmp_path, 1e30)  # finite numbers pass
    bad = {"gradient": torch.tensor(float("inf"))}
    said = "Each micro-batch of this rank was finite: see the dumps of the"
    with pytest.raises(NonFiniteError, match=said) as caught:
        require_finite(bad, where="gradient", step=1, dumps=tmp_path / "dumps", batch={}, info={})
    assert caught.value.dump is None and not (tmp_path / "dumps").exists()
    (tmp_path / "dumps").write_text("")
    with pytest.raises(NonFiniteError, match="could not be dumped") as caught:
        check(tmp_path, float("nan"))
    assert caught.value.dump is None


@pytest.mark.parametrize("value", BAD)
def test_the_error_says_what_where_and_the_dump_holds_it(tmp_path: Path, value: float) -> None:
    for _ in range(2):
        with pytest.raises(NonFiniteError) as caught:
            check(tmp_path, value, where="loss, update 2/3")
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step-000012-loss-update-2-3-rank-0"]
    text = str(caught.value)
    assert "before the update of step 12 on rank 0: loss, update 2/3 is not finite" in text
    assert f"log_prob: {int(value != value)} NaN and {int(value == value)} infinite of 2" in text
    assert f"`genrl replay {caught.value.dump}`" in text and "optimizer.lr" in text
    assert "reward" not in text  # an infinite score is no score: it cannot be the cause
    assert caught.value.dump is not None
    dump = read_dump(caught.value.dump)
    assert (dump.step, dump.where, dump.info) == (12, "loss, update 2/3", {"prompts": ["<b>", "two"], "seeds": [1, 2]})
    assert torch.equal(dump.checked["log_prob"], torch.tensor([0.5, value])) or value != value
    assert torch.equal(dump.batch["view"], torch.arange(12.0).reshape(3, 4).T)
    record = json.loads((caught.value.dump / "dump.json").read_text())
    assert record["statistics"]["batch/latents"]["max"] == 11.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_which_tensors_are_not_finite_and_statistics_of_the_rest(dtype: torch.dtype) -> None:
    tensors = {str(value): torch.tensor([[1.0, value]], dtype=dtype) for value in [*BAD, 65504.0]}
    assert non_finite(tensors | {"empty": torch.zeros(0), "steps": torch.tensor([1, 2])}) == ["nan", "inf", "-inf"]
    assert non_finite({}) == []
    assert statistics(torch.tensor([1.0, 3.0, float("nan"), float("inf")])) == {
        "shape": [4], "dtype": "float32", "nan": 1, "inf": 1, "min": 1.0, "max": 3.0, "mean": 2.0,
    }  # fmt: skip
    assert statistics(torch.tensor(float("nan")))["mean"] is None


def one_of_two(folder: str) -> None:
    """Child: rank 1 finds a NaN."""
    accelerator = Accelerator(cpu=True)
    rank, place = accelerator.process_index, Path(folder)
    assert any_rank(rank == 1, accelerator) and not any_rank(False, accelerator)
    given = {"where": "loss", "step": 3, "dumps": place / "dumps", "accelerator": accelerator}
    given |= {"batch": {"x": torch.tensor([float(rank)])}, "info": {"rank": rank}}
    require_finite({"loss": torch.tensor(1.0)}, **given)
    try:
        require_finite({"loss": torch.tensor(float("nan") if rank == 1 else 1.0)}, **given)
    except NonFiniteError as error:
        (place / f"error-{rank}.txt").write_text(str(error))
    accelerator.wait_for_everyone()
    accelerator.end_training()


@pytest.mark.slow
def test_all_ranks_stop_when_one_has_a_nan(tmp_path: Path) -> None:
    assert any_rank(True, None) is True and any_rank(False, None) is False
    codes = wait(start_ranks(2, one_of_two, str(tmp_path), log=tmp_path / "log.txt"))
    assert codes == [0, 0], "\n".join(path.read_text() for path in tmp_path.glob("log*"))
    assert "on rank 1: loss is not finite" in (tmp_path / "error-1.txt").read_text()
    assert "another rank found a number that is not finite" in (tmp_path / "error-0.txt").read_text()
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["step-000003-loss-rank-1"]
    assert read_dump(tmp_path / "dumps" / "step-000003-loss-rank-1").info == {"rank": 1}


def test_what_is_not_kept_again_yet_is_saved_again() -> None:
    """A run in stages that is stopped twice within one that does without what another one keeps."""
    kept, again = Kept({"counter": Counter(torch.ones(2), 3)}), Kept()
    again.restore(*kept.pack())
    tensors, trees = again.pack()
    assert tensors["kept-counter"]["mean"].tolist() == [1, 1] and trees == kept.pack()[1]
