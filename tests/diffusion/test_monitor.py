"""The end of a run whose held-out scorer falls: when, with which weights, and across a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import load_peft_weights
from safetensors.torch import load_file

from genrl.config import ConfigError, load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from tests.diffusion import runs

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("unproven")]

SCORES = [0.5, 0.7, 0.4, 0.69, 0.3, 0.2, 0.9, 0.9]  # of the evaluations after 0, 1, ... iterations
TINY_LM = Path(__file__).resolve().parents[2] / "assets" / "tiny-lm"
WATCH = {"reward": "redness", "tolerance": 0.05, "patience": 2}


def script(patch: pytest.MonkeyPatch) -> None:
    """Let evaluations score as `SCORES` has it."""
    evaluate = DiffusionRun.evaluate

    def scripted(self: DiffusionRun, iteration: int) -> dict[str, float]:
        return evaluate(self, iteration) | {"eval/redness_mean": SCORES[iteration]}

    patch.setattr(DiffusionRun, "evaluate", scripted)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch)


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


@pytest.fixture(scope="module")
def ended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose figure fell. Not to be changed."""
    folder = tmp_path_factory.mktemp("monitored")
    runs.write_folder(folder)
    with pytest.MonkeyPatch.context() as patch:
        script(patch)
        return train(config(folder, model))


def test_it_ends_with_the_weights_of_the_best_evaluation(ended: Path) -> None:
    """After 0.7, one lower evaluation and one within the tolerance are no reason; two lower ones in a row are."""
    drops = [row["eval/monitor_drop"] for row in runs.rows(ended)]
    assert drops == pytest.approx([0.0, 0.0, 0.3, 0.01, 0.4, 0.5])
    end, best = at(ended, 5), at(ended, 1)
    assert equal(end["weights"], best["snapshot-average"]) and equal(end["snapshot-average"], end["weights"])
    assert not equal(end["weights"], at(ended, 4)["weights"])
    assert load_file(Run(ended).lora / "pytorch_lora_weights.safetensors").keys()


def test_stop_keeps_the_weights_as_they_are(folder: Path, model: Path, ended: Path, capfd: Any) -> None:
    run = train(config(folder, model, monitor={"action": "stop"}))
    end = at(run, 5)
    assert len(runs.rows(run)) == 6 and "snapshot-best" not in end
    assert not equal(end["weights"], at(run, 1)["weights"])
    assert equal(at(run, 4)["weights"], at(ended, 4)["weights"])
    assert "redness fell from 0.7 (iteration 1) to 0.2: training ends" in "".join(capfd.readouterr())


@pytest.mark.parametrize("done", [2, 4], ids=["between", "one before the last"])
def test_gone_on_with(ended: Path, tmp_path: Path, done: int) -> None:
    again = runs.resumed(ended, tmp_path, done)
    assert runs.differences(ended, again) == []
    train(load(Run(again).config), again)  # it has ended: nothing is done again
    assert runs.differences(ended, again) == []


@pytest.mark.slow
def test_a_rewriter_goes_back_with_the_model(folder: Path, model: Path) -> None:
    """The two are saved as they were evaluated together; also where the run was left after the best evaluation."""
    rewriter = {"path": str(TINY_LM), "instruction": "{prompt}", "max_new_tokens": 16, "lr": 1e-2}
    changes: dict[str, Any] = {
        "trainer": {"algorithm": "prompt_rl", "retained": 1, "rewriter": rewriter, "clip_range": 1e-2},
        "sampling": {"group_size": 4, "prompts_per_iteration": 2, "batch_size": 4},
        "monitor": {"action": "roll_back", "patience": 1},
    }
    straight = train(config(folder, model, **changes))
    again = runs.resumed(straight, folder, 1)
    assert runs.differences(straight, again) == []
    for run in (straight, again):
        end, best = at(run, 2), at(run, 1)
        assert equal(end["weights"], best["snapshot-average"])
        assert equal(end["kept-rewriter"], best["kept-rewriter"])
        saved = load_peft_weights(str(run / "rewriter"))
        adapter = {key: value for key, value in best["kept-rewriter"].items() if key.startswith("adapter/")}
        assert saved and equal({f"adapter/{key}": value for key, value in saved.items()}, adapter)
        assert runs.rows(run)[2]["rewriter/grad_norm"] > 0  # it had learnt since


def test_what_cannot_be_watched(folder: Path, model: Path) -> None:
    for changes, message in (
        ({"monitor": {"reward": "rednes"}}, "no held-out figure is called 'rednes'; did you mean 'redness'"),
        ({"monitor": {"reward": "brightness"}}, "is trained on, and so no witness"),
        ({"monitor": {"patience": 8}}, "only 7 evaluations follow the first"),
        ({"evaluation": {"every": 0, "monitor": WATCH}}, "nothing is evaluated, so nothing can be watched"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(folder, model, **changes)


@pytest.mark.slow
def test_a_run_with_older_samples_goes_on_after_its_roll_back(folder: Path, model: Path) -> None:
    """The versions that draw are not put back: the number of iterations is not either."""
    older = {"sampling": {"staleness": 1}, "monitor": {"action": "roll_back", "patience": 1}, "ema": None}
    run = train(config(folder, model, **older))
    last = runs.last_state(run)
    assert last.step == 2 and not any("best" in name for name in last.tensors if name.startswith("kept"))
    train(config(folder, model, **{**older, "evaluation": {"every": 0}, "iterations": 4}), run)
    assert [row["staleness"] for row in runs.rows(run)[-2:]] == [1.0, 1.0]
