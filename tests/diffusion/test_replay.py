"""What stopped a run is run again from its dump: the same numbers, and the module where they stop being finite."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genrl.cli.runs import print_replay, replay_verdict
from genrl.config import dump as to_yaml
from genrl.config.method import code_of
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.loading import load_pipeline
from genrl.runtime.folder.run import Run, write_atomic
from genrl.runtime.loop.guards import NonFiniteError, non_finite
from genrl.runtime.loop.replay import first_not_finite, replay
from tests.diffusion import runs
from tests.run_folders import tiered

QUIET = {"evaluation": {"every": 0}}
pytestmark = pytest.mark.usefixtures("traced")
ROWS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {  # keys of the trainer, its last loss, other sections
    "flow_grpo": ({"kernel": "flow_cps", "noise_level": 0.8, "kl_weight": 0.1, "kl": "k2"}, 5, {"lora": None}),
    "flow_grpo in a window": (
        *({"window": {"size": 1, "low": 1}, "guidance_in_training": False}, 3),
        {"kernels": {"fused": True, "attention": "math"}},
    ),
    "diffusion_nft": ({"kl_weight": 0.1, "updates_per_iteration": 2, "inner_epochs": 2}, 10, {}),
}


@pytest.fixture(autouse=True)
def checkpoints_hold_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model too large for its weights to be in every dump."""
    monkeypatch.setattr("genrl.runtime.weights.weights.LARGEST_COPY", 0)


def stopped(config: Config, call: int, spoil: float = math.nan) -> tuple[Path, torch.Tensor]:
    """The dump of a run whose `call`-th loss (from 0) is multiplied by `spoil`, and that loss as it was."""
    write_atomic(Run(Path(config.output)).config, to_yaml(config))
    with runs.opened(config) as run, pytest.raises(NonFiniteError) as error:
        losses = runs.spoil(run, lambda number: number == call + 1, spoil)
        code_of(config.trainer).train(run, config.trainer)
    assert error.value.dump is not None
    return error.value.dump, losses[call]


@pytest.mark.parametrize("name", tiered(ROWS, ("flow_grpo",)))
def test_it_computes_what_the_run_computed(folder: Path, model: Path, name: str) -> None:
    """To the bit: the adapter is in the dump, other weights in the checkpoint of the iteration that was stopped."""
    keys, last, sections = ROWS[name]
    changes = {"trainer": {"algorithm": name.partition(" ")[0], **keys}, **sections, **QUIET}
    changes["sampling"] = {"guidance_scale": 3.0, "same_initial_noise": name != "diffusion_nft"}
    dump, loss = stopped(runs.config(folder, model, **changes), last)
    again = replay(dump)
    assert again.dump.step == 1 and again.weights.startswith(
        "step-000001's: as" if "lora" in sections else "the dump's"
    )
    assert torch.equal(again.tensors["loss"], loss)
    for key in ("model_output",) if name == "diffusion_nft" else ("model_output", "log_prob"):
        assert torch.equal(again.tensors[key], again.recorded[key])
    assert not non_finite(again.tensors) and not again.module and not again.gradients
    assert "everything is finite this time" in next(replay_verdict(again))


def test_the_first_bad_module_is_named(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights blown up by the first of two updates: attention overflows in the second's forward pass."""
    changes = {"trainer": {"algorithm": "flow_grpo", "updates_per_iteration": 2}, "iterations": 1, **QUIET}
    config = runs.config(folder, model, optimizer={"lr": 1e25, "weight_decay": 0}, **changes)
    again = replay(stopped(config, 0, spoil=1.0)[0])
    assert again.recorded["state"].isfinite().all() and again.recorded["next_state"].isfinite().all()
    assert non_finite(again.tensors)[0] == "model_output"
    assert again.module is not None and again.module.startswith("transformer.transformer_blocks.0.attn.")
    print_replay(again)
    shown = capsys.readouterr().out
    assert f"first module whose output is not finite: {again.module}" in shown.replace("\n", "")
    assert "loss not finite at step 0, trainer flow_grpo" in shown and "log_prob" in shown


def test_a_gradient_alone_is_found(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = runs.config(folder, model, trainer={"algorithm": "flow_grpo"}, iterations=1, **QUIET)
    load = load_pipeline

    def planted(settings: Any) -> Any:
        pipe = load(settings)
        pipe.transformer.proj_out.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], math.inf),))
        return pipe

    monkeypatch.setattr("genrl.diffusion.train.load_pipeline", planted)
    dump, _ = stopped(config, 0, spoil=1.0)
    assert "-gradient-rank-0" in dump.name
    again = replay(dump)
    assert again.dump.checked["loss"].isfinite().all() and not again.dump.checked["gradient"].isfinite()
    assert again.module is None and again.gradients and non_finite(again.tensors) == ["gradient"]
    assert again.gradients[-1] in next(replay_verdict(again))


def test_a_dump_elsewhere_needs_its_run(folder: Path, model: Path) -> None:
    """Here of a full fine-tuning before its first checkpoint."""
    config = runs.config(folder, model, lora=None, iterations=1, **QUIET)
    dump, loss = stopped(config, 0)
    moved = dump.rename(folder / "moved")
    with pytest.raises(ValueError, match="is not a run folder: it has no config.yaml. Name the dump's run by --run"):
        replay(moved)
    again = replay(moved, Path(config.output))
    assert again.weights.startswith("the model's before training") and torch.equal(again.tensors["loss"], loss)


def test_modules_are_watched_inside_tuples_and_dictionaries() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": (x, [x.log()])}

    network = nn.Sequential(nn.Identity(), Nested())
    with first_not_finite({"net": network}) as bad:
        network(torch.ones(2))
        assert bad == []
        network(torch.zeros(2))
    assert bad == ["net.1 (Nested)"]
    network(torch.zeros(2))  # no longer watched
    assert len(bad) == 1
