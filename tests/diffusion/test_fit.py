"""The batch size that is found before training: by halving, in all processes, and once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.data.prompts import Prompt
from genrl.diffusion import before
from genrl.diffusion import run as diffusion_run
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime.loop.frame import shrink
from tests.diffusion import ranks, runs
from tests.run_folders import tiered

pytestmark = pytest.mark.usefixtures("unproven")

SAMPLING = {"prompts_per_iteration": 2, "group_size": 4, "fit_batch": True}


def room_for(most: int, tried: list[int]) -> Any:
    whole = before.attempt

    def attempt(run: DiffusionRun, prompts: list[Prompt], size: int) -> None:
        tried.append(size)
        if size > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        whole(run, prompts, size)

    return attempt


def test_the_largest_that_fits_in_all_processes() -> None:
    """A process without room goes on asking with the others."""
    here, others = {8: False, 4: True, 2: True}, {8: True, 4: False, 2: True}
    asked: list[tuple[int, bool]] = []

    def fits(size: int) -> bool:
        asked.append((size, here[size]))
        return here[size]

    assert before.largest([8, 4, 2, 1], fits, lambda ok: ok and others[asked[-1][0]]) == 2
    assert asked == [(8, False), (4, True), (2, True)]
    with pytest.raises(RuntimeError, match=r"micro-batch of 3 samples does not fit.*sampling\.batch_size"):
        before.largest([6, 3], lambda size: False, lambda ok: ok)


def test_a_run_takes_what_fits_and_keeps_it(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is that of the batch size written out, and a resumed one does not try again."""
    tried: list[int] = []
    monkeypatch.setattr(before, "attempt", room_for(2, tried))
    changes: dict[str, Any] = {"iterations": 1, "evaluation": {"every": 0}}
    result = train(runs.config(folder, model, sampling={**SAMPLING, "batch_size": 8}, **changes))
    assert tried == [8, 4, 2]
    written_out = {**SAMPLING, "batch_size": 2, "fit_batch": False}
    plain = train(runs.config(folder, model, sampling=written_out, output=str(folder / "plain"), **changes))
    same = ("loss", "grad_norm", "reward/brightness_mean", "ratio/max_abs_dev")
    (row,), (other,) = (runs.rows(run) for run in (result, plain))
    assert {key: row[key] for key in same if key in row} == {key: other[key] for key in same if key in other}
    assert runs.last_state(result).state["memory"]["batch_size"] == 2
    train(runs.config(folder, model, sampling={**SAMPLING, "batch_size": 8}, **changes | {"iterations": 2}), result)
    assert tried == [8, 4, 2] and len(runs.rows(result)) == 2


def test_a_trial_leaves_nothing_behind_and_smaller_micro_batches_are_checked_anew(folder: Path, model: Path) -> None:
    """Whether their replay is exact; and there is an end."""
    config = runs.config(folder, model, sampling={**SAMPLING, "batch_size": 4})
    with runs.opened(config) as run:
        weights = {key: p.detach().clone() for key, p in run.weights.named.items()}
        calls = run.policy.model_calls
        before.settle(run, run.prompts)
        assert run.config.sampling.batch_size == 4
        assert all(torch.equal(p, weights[key]) and p.grad is None for key, p in run.weights.named.items())
        assert run.policy.model_calls == calls and not run.loop.optimizer.state
        for size in (2, 1):
            run.replays = True
            shrink(run.loop, before.MEMORY_HINT)
            assert run.config.sampling.batch_size == size and not run.replays
        with pytest.raises(RuntimeError, match=r"micro-batch of 1 samples does not fit.*sampling\.batch_size"):
            shrink(run.loop, before.MEMORY_HINT)


QUIET: dict[str, Any] = {"evaluation": {"every": 0}, "iterations": 3}
PHASES = {"flow_grpo": "training", "diffusion_nft": "sampling", "prdp": "training"}


@pytest.mark.parametrize("algorithm", tiered(PHASES, ("flow_grpo",)))
def test_an_iteration_that_runs_out_of_memory_is_done_again_with_less(
    folder: Path, model: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """To the bit the run that has the smaller size from that iteration on."""
    trainer = {"algorithm": algorithm} | ({"kernel": "flow_sde"} if algorithm == "prdp" else {})
    changes = {**QUIET, "trainer": trainer, "sampling": {**SAMPLING, "batch_size": 8}}
    wanted = train(runs.config(folder, model, **{**changes, "iterations": 1, "output": str(folder / "by-hand")}))

    def settle(run: DiffusionRun, prompts: object) -> None:
        run.loop.memory.update(batch_size=2)
        run.resize(2)

    with monkeypatch.context() as by_hand:
        by_hand.setattr(diffusion_run, "settle", settle)
        train(runs.config(folder, model, **changes, output=str(wanted)), wanted)
    monkeypatch.setattr(DiffusionRun, "begin", DiffusionRun.begin)  # put back in the end
    ranks.running_out(2, PHASES[algorithm])
    actual = train(runs.config(folder, model, **changes))
    said = capsys.readouterr().err
    assert "memory ran out in iteration 2 with 8 samples in a micro-batch: it is done again, with 4" in said
    assert "with 4 samples in a micro-batch: it is done again, with 2 from here on" in said
    assert runs.differences(actual, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["sampling", "training"])
def test_processes_go_down_together(folder: Path, model: Path, phase: str) -> None:
    """Memory runs out in the second of two, in the second iteration: the run is that of one process."""
    changes = {**QUIET, "iterations": 2, "sampling": {**SAMPLING, "batch_size": 4}}
    result = {}
    for count in (1, 2):
        runs.finish(runs.written(folder, model, str(count), **changes), count, ranks.short, 2, phase, count - 1)
        run = folder / str(count) / "run"
        result[count] = runs.last_state(run)
        assert result[count].step == 2 and result[count].state["memory"]["batch_size"] == 2
        assert [row["ratio/max_abs_dev"] for row in runs.rows(run)] == [0.0, 0.0]
    for key, tensor in result[1].tensors["weights"].items():
        torch.testing.assert_close(result[2].tensors["weights"][key], tensor, atol=1e-4, rtol=0)


def test_memory_that_runs_out_in_a_reward(folder: Path, model: Path) -> None:
    """The iteration is done again; without the key the run ends with the error and what to do."""
    full = "def full(images):\n    if len(images) > 2:\n        raise torch.OutOfMemoryError('CUDA out of memory')\n"
    with (folder / "rewards.py").open("a") as file:
        file.write(f"{full}    return brightness(images)\n")
    changes: dict[str, Any] = {**QUIET, "iterations": 1, "rewards": [runs.reward(folder, "full")]}
    fixed = {**SAMPLING, "batch_size": 4, "fit_batch": False}
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(runs.config(folder, model, **changes, sampling=fixed, output=str(folder / "no")))
    assert "micro-batches of 4 samples do not fit: lower sampling.batch_size" in error.value.__notes__[0]
    result = train(runs.config(folder, model, **changes, sampling={**SAMPLING, "batch_size": 4}))
    assert runs.last_state(result).state["memory"]["batch_size"] == 2
    assert runs.rows(result)[0]["reward/full_failed"] == 0
