"""The end of a run whose held-out scorer falls: when, with which weights, and across a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import load_peft_weights
from safetensors.torch import load_file

from genrl.config import Config, ConfigError
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime import checkpoint
from genrl.runtime.run import Run
from tests.diffusion import runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

SCORES = [0.5, 0.7, 0.4, 0.69, 0.3, 0.2, 0.9, 0.9]  # of the evaluations after 0, 1, ... iterations
TINY_LM = Path(__file__).resolve().parents[2] / "assets" / "tiny-lm"
WATCH = {"reward": "redness", "tolerance": 0.05, "patience": 2}


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations score as `SCORES` has it."""
    evaluate = DiffusionRun.evaluate

    def scripted(self: DiffusionRun, iteration: int) -> dict[str, float]:
        return evaluate(self, iteration) | {"eval/redness_mean": SCORES[iteration]}

    monkeypatch.setattr(DiffusionRun, "evaluate", scripted)


def config(folder: Path, model: Path, **changes: Any) -> Config:
    monitored = changes.pop("monitor", {"action": "roll_back"})
    common: dict[str, Any] = {
        "rewards": [runs.reward(folder, "brightness"), runs.reward(folder, "redness", weight=0)],
        "evaluation": {"every": 1, "monitor": {**WATCH, **monitored}},
        "checkpoint": {"every": 1, "keep": 20},
        "iterations": 7,
        "ema": {"decay": 0.5},
    }
    return runs.config(folder, model, **{**common, **changes})


def at(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    return checkpoint.load(Run(run).checkpoints / f"step-{step:06d}").tensors


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def adapter(tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors["kept-rewriter"].items() if key.startswith("adapter/")}


def asked_at(stop: int, monkeypatch: pytest.MonkeyPatch, stopped: Config) -> None:
    """A run that is asked to end while it samples iteration `stop`."""
    advance: Callable[..., None] = DiffusionRun.advance_together

    def ask(self: DiffusionRun, images: int) -> None:
        if (self.process.progress.name, self.iteration) == ("sampling", stop):
            self.process.stop.signal = 15
        advance(self, images)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(DiffusionRun, "advance_together", ask)
        train(stopped)


def test_it_ends_with_the_weights_of_the_best_evaluation(folder: Path, model: Path, capfd: Any) -> None:
    """After 0.7, one lower evaluation and one within the tolerance are no reason; two lower ones in a row are."""
    run = train(config(folder, model))
    drops = [row["eval/monitor_drop"] for row in runs.rows(run)]
    assert drops == pytest.approx([0.0, 0.0, 0.3, 0.01, 0.4, 0.5])
    end, best = at(run, 5), at(run, 1)
    assert equal(end["weights"], best["snapshot-average"]) and equal(end["snapshot-average"], end["weights"])
    assert not equal(end["weights"], at(run, 4)["weights"])
    assert (Run(run).lora / "pytorch_lora_weights.safetensors").is_file()
    assert load_file(Run(run).lora / "pytorch_lora_weights.safetensors").keys()
    assert "redness fell from 0.7 (iteration 1) to 0.2: training ends with the weights of iteration 1" in (
        "".join(capfd.readouterr())
    )


def test_stop_keeps_the_weights_as_they_are(folder: Path, model: Path) -> None:
    run = train(config(folder, model, monitor={"action": "stop"}))
    end = at(run, 5)
    assert len(runs.rows(run)) == 6 and "snapshot-best" not in end
    assert not equal(end["weights"], at(run, 1)["weights"])
    straight = train(config(folder, model, monitor={"tolerance": 10.0}, iterations=5, output=str(folder / "straight")))
    assert equal(end["weights"], at(straight, 5)["weights"])


@pytest.mark.slow
def test_a_rewriter_goes_back_with_the_model(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are saved as they were evaluated together; also where the run was stopped after the best evaluation."""
    rewriter = {"path": str(TINY_LM), "instruction": "{prompt}", "max_new_tokens": 16, "lr": 1e-2}
    changes: dict[str, Any] = {
        "trainer": {"algorithm": "prompt_rl", "retained": 1, "rewriter": rewriter, "clip_range": 1e-2},
        "sampling": {"group_size": 4, "prompts_per_iteration": 2, "batch_size": 4},
        "monitor": {"action": "roll_back", "patience": 1},
    }
    straight = train(config(folder, model, output=str(folder / "straight"), **changes))
    stopped = config(folder, model, output=str(folder / "stopped"), **changes)
    asked_at(1, monkeypatch, stopped)
    train(stopped, folder / "stopped")
    assert runs.differences(straight, folder / "stopped") == []
    for run in (straight, folder / "stopped"):
        end, best = at(run, 2), at(run, 1)
        assert equal(end["weights"], best["snapshot-average"])
        assert equal(end["kept-rewriter"], best["kept-rewriter"])
        saved = load_peft_weights(str(run / "rewriter"))
        assert saved and equal({f"adapter/{key}": value for key, value in saved.items()}, adapter(best))
        assert runs.rows(run)[2]["rewriter/grad_norm"] > 0  # it had learnt since


@pytest.mark.parametrize("stop", [2, 4], ids=["between", "one before the last"])
def test_two_and_two_iterations_are_four(folder: Path, model: Path, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = train(config(folder, model, output=str(folder / "straight")))
    stopped = config(folder, model, output=str(folder / "stopped"))
    asked_at(stop, monkeypatch, stopped)
    assert runs.last_state(folder / "stopped").step == stop
    train(stopped, folder / "stopped")
    assert runs.differences(straight, folder / "stopped") == []
    train(stopped, folder / "stopped")  # it has ended: nothing is done again
    assert runs.differences(straight, folder / "stopped") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"monitor": {"reward": "rednes"}}, "no reward is called 'rednes'; did you mean 'redness'"),
        ({"monitor": {"reward": "brightness"}}, "is trained on, and so no witness"),
        ({"monitor": {"patience": 8}}, "only 7 evaluations follow the first"),
        ({"evaluation": {"every": 0, "monitor": WATCH}}, "nothing is evaluated, so nothing can be watched"),
    ],
)
def test_what_cannot_be_watched(folder: Path, model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(folder, model, **changes)


def test_a_run_with_older_samples_goes_on_after_its_roll_back(folder: Path, model: Path) -> None:
    """The versions that draw are not put back: the number of iterations is not either."""
    older = {"sampling": {"staleness": 1}, "monitor": {"action": "roll_back", "patience": 1}, "ema": None}
    ended = train(config(folder, model, **older))
    assert (last := checkpoint.latest(Run(ended).checkpoints)) is not None and last.name == "step-000002"
    assert not any("best" in name for name in checkpoint.load(last).tensors if name.startswith("kept"))
    train(config(folder, model, **{**older, "evaluation": {"every": 0}, "iterations": 4}), ended)
    assert [row["staleness"] for row in runs.rows(ended)[-2:]] == [1.0, 1.0]
