"""A run that is stopped, killed or edited goes on as if nothing had been."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from genrl.config import dump, load
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime import checkpoint
from genrl.runtime.run import Run
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

GRPO = {
    "algorithm": "flow_grpo",
    "window": {"size": 1, "low": 0, "high": 3},
    "kl_weight": 0.01,
    "clip_range": 1e-2,
    "inner_epochs": 2,
    "updates_per_iteration": 2,
}
RAMP = {"algorithm": "diffusion_nft", "old_policy_decay": "ramp", "kl_weight": 1e-3, "updates_per_iteration": 2}
DELAYED = {**RAMP, "old_policy_decay": "delayed_ramp", "updates_per_iteration": 1}
SAMPLING = {"num_inference_steps": 4, "guidance_scale": 2.0}
TRAINERS = {"flow_grpo": GRPO, "nft ramp": RAMP, "nft delayed_ramp": DELAYED}


def stopping_reward(folder: Path, number: int, call: int) -> list[dict[str, Any]]:
    """Brightness; in its `call`-th call the process sends itself the signal."""
    return [runs.reward(folder, "Interrupt", args={"number": int(number), "call": call})]


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("lora", [runs.LORA, None], ids=["lora", "full"])
def test_two_and_two_iterations_are_four(
    folder: Path, model: Path, trainer: str, lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended after 2 of 4 iterations, and gone on with: weights, snapshots, optimiser, RNG and metrics to the bit."""
    if trainer == "nft delayed_ramp":  # its ramp begins after 75 steps; here after 1
        delayed = lambda step, kind: 0.0 if step < 1 else min(0.2 * (step - 1), 0.9)  # noqa: E731
        monkeypatch.setattr("genrl.diffusion.methods.diffusion_nft.train.nft_old_policy_decay", delayed)
    common: dict[str, Any] = {"trainer": TRAINERS[trainer], "lora": lora, "sampling": SAMPLING, "iterations": 4}
    common |= {"optimizer": {"lr": 1e-2 if lora else 1e-4, "schedule": "cosine", "warmup_steps": 1}}
    # 2 calls of the reward score an iteration, 1 an evaluation (before the first iteration, and after every second).
    quiet = {"rewards": stopping_reward(folder, signal.SIGTERM, 1000)}
    straight = runs.config(folder, model, output=str(folder / "straight"), **common, **quiet)
    train(straight)

    loud = {"rewards": stopping_reward(folder, signal.SIGTERM, 6)}  # the evaluation after iteration 2
    with pytest.raises(SystemExit) as stopped:
        train(runs.config(folder, model, output=str(folder / "stopped"), **common, **loud))
    assert stopped.value.code == 143
    stopped_run = folder / "stopped"
    assert runs.last_state(stopped_run).step == 2 and [row["step"] for row in runs.rows(stopped_run)] == [0, 1, 2]

    (folder / "quiet").touch()
    train(load(Run(stopped_run).config), stopped_run)
    assert runs.differences(folder / "straight", stopped_run) == []
    names = {"weights", "optimizer", "snapshot-average"} | ({"snapshot-old"} if "nft" in trainer else set())
    assert runs.last_state(stopped_run).tensors.keys() == names


@pytest.mark.parametrize("call", [2, 3, 4], ids=["first sampling", "first scoring", "second sampling"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_stopped_in_the_middle_of_an_iteration(folder: Path, model: Path, call: int, number: int, code: int) -> None:
    """What the iteration had done is thrown away and done again; row 0 and the pictures of it are there once."""
    quiet = runs.config(folder, model, rewards=stopping_reward(folder, number, 1000), output=str(folder / "straight"))
    train(quiet)
    loud = runs.config(folder, model, rewards=stopping_reward(folder, number, call), output=str(folder / "stopped"))
    with pytest.raises(SystemExit) as stopped:
        train(loud)
    assert stopped.value.code == code
    (folder / "quiet").touch()
    train(load(Run(folder / "stopped").config), folder / "stopped")
    assert runs.differences(folder / "straight", folder / "stopped") == []


def stop_in(monkeypatch: pytest.MonkeyPatch, phase: str, iteration: int) -> None:
    """Let the process send itself SIGTERM in that phase of the run (after so many finished iterations), once."""
    advance, armed = DiffusionRun.advance_together, [True]

    def watched(self: DiffusionRun, images: int) -> None:
        if armed and (self.process.progress.name, self.iteration) == (phase, iteration):
            armed.clear()
            signal.raise_signal(signal.SIGTERM)
        advance(self, images)

    monkeypatch.setattr(DiffusionRun, "advance_together", watched)


@pytest.mark.parametrize(
    "places",
    [
        [("evaluating", 0)],
        [("evaluating", 2)],
        [("evaluating", 4)],
        [("evaluating", 0), ("sampling", 0), ("evaluating", 0)],
        [("evaluating", 2), ("evaluating", 2), ("sampling", 2), ("sampling", 3)],
    ],
    ids=["before", "between", "at the end", "before, again and again", "between, again and again"],
)
def test_stopped_in_an_evaluation(
    folder: Path, model: Path, places: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done again on resume, and its row is written once, however often the run is stopped."""
    common: dict[str, Any] = {"evaluation": {"every": 2, "batch_size": 1}, "checkpoint": {"every": 4}, "iterations": 4}
    straight = train(runs.config(folder, model, output=str(folder / "straight"), **common))
    config = runs.config(folder, model, output=str(folder / "stopped"), **common)
    for attempt, (phase, iteration) in enumerate(places):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            stop_in(patch, phase, iteration)
            train(config, Path(config.output) if attempt else None)
        assert stopped.value.code == 143
        assert runs.last_state(Path(config.output)).step == iteration
    train(config, Path(config.output))
    assert runs.differences(straight, Path(config.output)) == []


def test_stopped_before_the_first_update_of_an_iteration(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two backward passes: nothing has changed yet, and the iteration is done again."""
    common: dict[str, Any] = {"evaluation": {"every": 0}, "checkpoint": {"every": 4}, "iterations": 2}
    straight = train(runs.config(folder, model, output=str(folder / "straight"), **common))
    config = runs.config(folder, model, output=str(folder / "stopped"), **common)
    backward, calls = DiffusionRun.backward, iter(range(1000))

    def watched(self: DiffusionRun, *arguments: Any, **counts: int) -> None:
        if next(calls) == 6:  # the third of the second iteration's four
            signal.raise_signal(signal.SIGTERM)
        backward(self, *arguments, **counts)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(DiffusionRun, "backward", watched)
        train(config)
    assert next(calls) == 7 and runs.last_state(folder / "stopped").step == 1
    train(config, folder / "stopped")
    assert runs.differences(straight, folder / "stopped") == []


def stop_in_backward(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the process send itself SIGTERM before its `call`-th backward pass (0-based)."""
    backward, calls = DiffusionRun.backward, iter(range(1000))

    def watched(self: DiffusionRun, *arguments: Any, **counts: int) -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        backward(self, *arguments, **counts)

    monkeypatch.setattr(DiffusionRun, "backward", watched)


@pytest.mark.parametrize("trainer", [{"algorithm": "flow_grpo", "inner_epochs": 2}, {**runs.NFT, "inner_epochs": 2}])
def test_stopped_between_two_updates_of_an_iteration(
    folder: Path, model: Path, trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter the updates are taken back, momentum and average with them, and the iteration is done again."""
    common: dict[str, Any] = {
        "trainer": trainer, "evaluation": {"every": 0}, "iterations": 3, "ema": {"decay": 0.5},
        "checkpoint": {"every": 5},
    }  # fmt: skip
    straight = train(runs.config(folder, model, output=str(folder / "straight"), **common))
    config = runs.config(folder, model, output=str(folder / "stopped"), **common)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        # two steps of each of two micro-batches, twice over, make an iteration: in the second half of the second one
        stop_in_backward(patch, 8 + 5)
        train(config)
    assert runs.last_state(folder / "stopped").step == 1
    train(config, folder / "stopped")
    assert runs.differences(straight, folder / "stopped") == []


@pytest.mark.parametrize(("most", "step"), [(10, 2), (10**9, 1)])
def test_full_fine_tuning_ends_its_iteration_first_where_it_is_large(
    folder: Path, model: Path, most: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is undone, too."""
    monkeypatch.setattr("genrl.runtime.weights.LARGEST_COPY", most)
    common: dict[str, Any] = {"trainer": {"algorithm": "flow_grpo", "inner_epochs": 2}, "evaluation": {"every": 0}}
    config = runs.config(folder, model, lora=None, iterations=3, **common)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_in_backward(patch, 8 + 5)
        train(config)
    assert runs.last_state(Path(config.output)).step == step


NOISY = '''\
import random

import numpy as np
import torch


def noisy(images):
    """Brightness, and noise of three kinds."""
    extra = [random.random() + np.random.rand() for _ in images]
    return (images.mean(dim=(1, 2, 3)) + torch.rand(len(images)) + torch.tensor(extra)).tolist()
'''


def test_a_reward_that_draws_random_numbers_is_repeated_too(folder: Path, model: Path) -> None:
    """From the global generators of torch, numpy and Python, which are seeded for each iteration."""
    (folder / "noisy.py").write_text(NOISY)
    common: dict[str, Any] = {"rewards": [{"name": f"{folder}/noisy.py:noisy"}], "evaluation": {"every": 0}}
    train(runs.config(folder, model, iterations=2, output=str(folder / "stopped"), **common))
    resumed = runs.config(folder, model, iterations=4, output=str(folder / "stopped"), **common)
    train(resumed, folder / "stopped")
    train(runs.config(folder, model, iterations=4, output=str(folder / "straight"), **common))
    assert runs.differences(folder / "straight", folder / "stopped") == []


def test_more_iterations_can_be_asked_for(folder: Path, model: Path) -> None:
    first = runs.config(folder, model, iterations=1, evaluation={"every": 0})
    train(first)
    train(runs.config(folder, model, iterations=3, evaluation={"every": 0}), Path(first.output))
    assert [row["step"] for row in runs.rows(Path(first.output))] == [1, 2, 3]
    with pytest.raises(ValueError, match="cannot resume .* with another value of optimizer.lr"):
        train(
            runs.config(folder, model, iterations=3, evaluation={"every": 0}, optimizer={"lr": 5e-2}),
            Path(first.output),
        )


def test_a_finished_run_resumes_to_itself(folder: Path, model: Path) -> None:
    config = runs.config(folder, model, iterations=1)
    train(config)
    before, kept = runs.rows(Path(config.output)), runs.last_state(Path(config.output))
    train(config, Path(config.output))
    assert runs.rows(Path(config.output)) == before and runs.last_state(Path(config.output)).step == kept.step


def test_a_damaged_checkpoint_is_passed_over(folder: Path, model: Path) -> None:
    """The newest complete one is taken; the steps after it are done again, to the same bits."""
    config = runs.config(folder, model, iterations=3, evaluation={"every": 0})
    run = train(config)
    shutil.copytree(run, folder / "copy")
    newest = Run(folder / "copy").checkpoints / "step-000003"
    with (newest / "weights.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x01\x02\x03")
    assert checkpoint.latest(newest.parent) == newest.parent / "step-000002"
    train(config, folder / "copy")
    assert runs.differences(run, folder / "copy") == []


def test_a_checkpoint_of_another_adapter_is_refused(folder: Path, model: Path) -> None:
    config = runs.config(folder, model, iterations=1, evaluation={"every": 0})
    run = train(config)
    other = runs.config(folder, model, iterations=2, evaluation={"every": 0}, lora={"rank": 8, "alpha": 8})
    with pytest.raises(ValueError, match=r"another value of model\.lora\.rank"):
        train(other, run)
    written = Run(run).config  # and where the file was edited as well
    written.write_text(dump(other))
    with pytest.raises(ValueError, match=r"another value of model\.lora\.rank"):
        train(load(written), run)


def test_a_second_process_may_not_write_into_the_run(folder: Path, model: Path) -> None:
    from genrl.runtime import run as run_folder

    config = runs.config(folder, model, iterations=1)
    run = train(config)
    file = run_folder.lock(run)
    with pytest.raises(ValueError, match="another process is training"):
        train(config, run)
    file.release()


# -- killed and stopped from outside ---------------------------------------------------------------------------------

KILLS = 8
ENDLESS: dict[str, Any] = {
    "trainer": RAMP,
    "sampling": {"num_inference_steps": 2},
    "iterations": 1000,  # no attempt comes to its end
    "evaluation": {"every": 7},
    "checkpoint": {"every": 1, "keep": 2},
}


def newest_step(run: Path) -> int:
    """Of all step folders, complete or not; -1 where there is none."""
    found = checkpoint.steps(Run(run).checkpoints)
    return int(found[0].name.removeprefix("step-")) if found else -1


@dataclass(frozen=True)
class Attempt:
    """One process that was sent a signal."""

    code: int
    startup: float
    """Seconds until it had saved once; infinity where that was not waited for."""
    ending: float
    """Seconds from the signal to its end."""


def interrupt(run: Path, yaml_file: Path, number: int, *, saves: int, delay: float) -> Attempt:
    """Start the run or go on with it; `delay` seconds after `saves` more checkpoints send it a signal."""
    resume = str(run) if Run(run).config.is_file() else None
    before, log = newest_step(run), run.with_suffix(".log")
    started = time.monotonic()
    process = runs.start(runs.train_file, str(yaml_file), resume, log=log)
    while newest_step(run) < before + saves:
        assert process.exitcode is None, log.read_text()[-3000:]
        time.sleep(0.002)
    startup = time.monotonic() - started if saves else math.inf
    time.sleep(delay)
    assert process.pid is not None and process.exitcode is None, log.read_text()[-3000:]
    sent = time.monotonic()
    os.kill(process.pid, number)
    (code,) = runs.wait([process], 60)
    assert code is not None, f"still there a minute after signal {number}"
    return Attempt(code, startup, time.monotonic() - sent)


def interrupted(folder: Path, model: Path, numbers: list[int], *, gentle: bool) -> list[Attempt]:
    """A run in `folder/cut` that is sent these signals, one after the other, each at a random moment of its work.

    Not gentle: also while it loads. In the end it is let go on for two iterations, and compared with a run that was
    left alone.
    """
    run, source = folder / "cut", random.Random(time.time_ns())
    runs.config(folder, model, output=str(run), **ENDLESS)
    path = (folder / "tiny.yaml").rename(folder / "endless.yaml")
    runs.wait([runs.start(print, "imports are done", log=folder / "warm.log")])
    attempts: list[Attempt] = []
    for number in numbers:
        saves = 1 if gentle or not attempts else source.choice([0, 1, 1])
        # From loading to the first save, or an iteration and its save: that is well under half as long.
        scale = min((attempt.startup for attempt in attempts), default=0.0)
        delay = source.uniform(0.0, scale * (0.4 if saves else 1.0))
        attempts.append(interrupt(run, path, number, saves=saves, delay=delay))
        state = runs.last_state(run)  # verified: sizes and hashes
        assert newest_step(run) - state.step <= 1  # never more lost than one save
    end = {**ENDLESS, "iterations": runs.last_state(run).step + 2}
    train(runs.config(folder, model, output=str(run), **end), run)
    straight = train(runs.config(folder, model, output=str(folder / "straight"), **end))
    assert runs.differences(straight, run) == []
    assert not [path for path in run.rglob("*") if ".tmp-" in path.name]  # nothing is left over
    return attempts


@pytest.mark.slow
def test_killed_at_random_moments(folder: Path, model: Path) -> None:
    """SIGKILL eight times in one run, while it loads, samples, trains or saves: it ends as the other, to the bit."""
    attempts = interrupted(folder, model, [signal.SIGKILL] * KILLS, gentle=False)
    assert [attempt.code for attempt in attempts] == [-signal.SIGKILL] * KILLS


@pytest.mark.slow
def test_stopped_by_signals_from_outside(folder: Path, model: Path) -> None:
    """SIGTERM and SIGINT in turn: saved and ended within 30 s, with the right exit code."""
    attempts = interrupted(folder, model, [signal.SIGTERM, signal.SIGINT] * 3, gentle=True)
    assert [attempt.code for attempt in attempts] == [143, 130] * 3
    assert max(attempt.ending for attempt in attempts) < 30
