"""A run that is stopped, damaged or edited goes on as if nothing had been (kills: tests/runtime/folder).
Whole runs with every type of adapter: on-policy ratios, resumed to the bit, exported merged; begun from another."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import DiffusionPipeline

from genrl.config import dump, load
from genrl.diffusion.config.estimate import read_components, trained_parameters
from genrl.diffusion.config.schema import Config
from genrl.diffusion.files.export import export
from genrl.diffusion.policy.adapters import load_lora
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import updating
from genrl.runtime.loop.loop import Loop
from tests.diffusion import runs
from tests.diffusion.methods.watched import resumed
from tests.run_folders import tiered

GRPO = {"algorithm": "flow_grpo", "window": {"size": 1, "low": 0, "high": 3}, "kl_weight": 0.01, "clip_range": 1e-2}
GRPO |= {"inner_epochs": 2, "updates_per_iteration": 2}
RAMP = {"algorithm": "diffusion_nft", "old_policy_decay": "ramp", "kl_weight": 1e-3, "updates_per_iteration": 2}
LORAS = {"flow_grpo": runs.LORA, "diffusion_nft": None}
"""What the first trains is an adapter, what the second trains is all weights."""


def resumable(folder: Path, model: Path, name: str, output: Path | None = None) -> Config:
    """Three iterations of several updates each, by a reward that draws from the global generators."""
    changes: dict[str, Any] = {
        **{"trainer": GRPO if name == "flow_grpo" else RAMP, "lora": LORAS[name], "iterations": 3},
        "sampling": {"num_inference_steps": 4, "guidance_scale": 2.0},
        "optimizer": {"lr": 1e-2 if LORAS[name] else 1e-4, "schedule": "cosine", "warmup_steps": 1},
        "rewards": [runs.reward(folder, "noisy")],
        **{"evaluation": {"every": 2, "batch_size": 1}, "checkpoint": {"every": 1, "keep": 5}, "ema": {"decay": 0.5}},
    }
    return runs.config(folder, model, output=str(output or folder / "run"), **changes)


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of `resumable` that nobody stops."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            runs.write_folder(folder)
            made[name] = train(resumable(folder, model, name))
        return made[name]

    return of


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("name", LORAS)
def test_gone_on_with_from_a_checkpoint(straight: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Weights, snapshots, optimiser, random numbers and metrics to the bit."""
    again = runs.resumed(straight(name), tmp_path, 2)
    assert runs.differences(straight(name), again) == []
    old = {"snapshot-old"} if name == "diffusion_nft" else set()
    assert runs.last_state(again).tensors.keys() == {"weights", "optimizer", "snapshot-average", "kept-before"} | old


Place = tuple[str, int, int]
"""A phase, so many finished iterations, and the step of the phase (from 0) in which the signal comes."""
STOPS: dict[str, list[Place]] = {
    "before the first iteration, again and again": [("evaluating", 0, 0), ("sampling", 0, 1), ("evaluating", 0, 1)],
    "between, again and again": [("evaluating", 2, 0), ("evaluating", 2, 1), ("sampling", 2, 0)],
    "at the end": [("evaluating", 3, 0)],
    "before the first update": [("training", 1, 0)],
    "between two updates": [("training", 1, 3)],  # of 4 backward passes
}


def stop_at(monkeypatch: pytest.MonkeyPatch, place: Place, number: int) -> None:
    """Let the process send itself the signal there."""
    advance, backward, left = DiffusionRun.advance_together, updating._backward, [place[2]]

    def reached(run: DiffusionRun | Loop) -> None:
        if left and (run.process.progress.name, run.iteration) == place[:2]:
            if left[0] == 0:
                left.clear()
                signal.raise_signal(number)
            else:
                left[0] -= 1

    def advanced(run: DiffusionRun, images: int) -> None:
        if place[0] != "training":
            reached(run)
        advance(run, images)

    def passed(loop: Loop, *arguments: Any, **counts: Any) -> None:
        reached(loop)
        backward(loop, *arguments, **counts)

    monkeypatch.setattr(DiffusionRun, "advance_together", advanced)
    monkeypatch.setattr(updating, "_backward", passed)


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("where", tiered(STOPS, ("between two updates",)))
def test_stopped_by_a_signal(straight: Any, folder: Path, model: Path, where: str, monkeypatch: Any) -> None:
    """What had been done is undone and done again; each row is written once, however often the run is stopped."""
    whole = straight("flow_grpo")
    again = folder / "again"
    first = STOPS[where][0][1]
    config = resumable(folder, model, "flow_grpo", again)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 100})})
    number, code = (signal.SIGINT, 130) if where.startswith("between") else (signal.SIGTERM, 143)
    for attempt, place in enumerate(STOPS[where]):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            stop_at(patch, place, number)
            train(config, again if attempt else None)
        assert stopped.value.code == code
        assert runs.last_state(again).step == place[1] >= first
    train(config, again)
    assert runs.differences(whole, again) == []


def test_a_finished_run_can_be_asked_for_more_and_not_for_something_else(copied: Config) -> None:
    run = Path(copied.output)
    with pytest.raises(ValueError, match=f"go on with it by `genrl resume {run}`"):
        train(copied)
    before = runs.rows(run)
    train(copied, run)
    assert runs.rows(run) == before and runs.last_state(run).step == 2
    fewer = copied.evaluation.model_copy(update={"num_prompts": 1})
    train(copied.model_copy(update={"iterations": 3, "evaluation": fewer}), run)
    assert [row["step"] for row in runs.rows(run)] == [0, 1, 2, 3] and runs.rows(run)[:2] == before[:2]
    assert "eval/moved" in before[2] and "eval/moved" not in runs.rows(run)[3]  # from other prompts than these
    Run(run).config.write_text(dump(load(Run(run).config, ["model.lora.rank=8"])))  # the weights know better
    with pytest.raises(ValueError, match=r"another value of model\.lora\.rank"):
        train(load(Run(run).config), run)


picture = partial(runs.picture, guidance_scale=7.0)


def trained(folder: Path, model: Path, name: str, **lora: Any) -> Path:
    """Gone on with from the first of two iterations; and what was on-policy had ratios of 1."""
    keys = {"rank": 4, "alpha": 8.0} | lora if "from" not in lora else lora
    trainer = {"algorithm": "flow_grpo", "kl_weight": 0.01}  # the reference takes part
    run = resumed(runs.config(folder, model, output=str(folder / name), lora=keys, trainer=trainer), folder)
    assert [row["ratio/max_abs_dev"] for row in runs.rows(run)[1:]] == [0.0, 0.0]
    return run


@pytest.mark.parametrize("kind", tiered(["lora", "dora", "rslora", "lokr"], ("lokr",)))
def test_each_type(folder: Path, model: Path, kind: str) -> None:
    run = trained(folder, model, "run", type=kind)
    config = load(Run(run).config)
    weights = runs.last_state(run).tensors["weights"]
    assert trained_parameters(config, read_components(model)) == sum(t.numel() for t in weights.values())  # type: ignore[arg-type]
    plain = DiffusionPipeline.from_pretrained(model)
    base = picture(plain)
    load_lora(plain, str(run / "lora"))
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(picture(merged), picture(plain), rtol=1e-4, atol=1e-4)
    assert not np.allclose(picture(plain), base, atol=1e-3)


@pytest.mark.slow
def test_from_another_beside_a_frozen_one(folder: Path, model: Path, finished: Path) -> None:
    """The reference is the model that training begins with, in a resumed run, too."""
    first, second = trained(folder, model, "first", rank=2, alpha=6.0), finished
    run = trained(folder, model, "third", **{"from": str(first / "lora"), "frozen": [str(second / "lora")]})
    rows = runs.rows(run)
    begun = [row["kl_reference"] for row in rows[1:] if "kl_reference" in row]
    assert not begun or begun[0] == 0.0
    card = (run / "lora" / "README.md").read_text()
    assert "pipe.set_adapters(['trained', 'frozen_0'])" in card and str(second / "lora") in card
    pipe = DiffusionPipeline.from_pretrained(model)
    for name, source in (("trained", run), ("frozen_0", second)):
        load_lora(pipe, str(source / "lora"), name)
    pipe.set_adapters(["trained", "frozen_0"])
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(picture(merged), picture(pipe), rtol=1e-4, atol=1e-4)
