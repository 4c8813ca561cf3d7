"""A gradient that stops being finite, once per method: `genrl replay` computes to the bit what the run had computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import brief_runs
from genrl.config import load
from genrl.config.method import KINDS, Method, built_in
from genrl.runtime import frame
from genrl.runtime.guards import NonFiniteError
from genrl.runtime.optimization import Optimization
from genrl.runtime.recorded import Recorded
from genrl.runtime.replay import Replay, replay

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    ("diffusion", "dynamic_tree_rpo"): "diffusion/tree_rpo.yaml",
    ("diffusion", "flow_grpo"): "flow_grpo.yaml",
    ("vla", "ppo"): "vla/flow_sde.yaml",
    ("vlm", "answers"): "vlm/grpo.yaml",
    ("vlm", "episodes"): "vlm/vl_dac.yaml",
}
"""(kind, method) -> its file in configs/, where it is not `kind/method.yaml`."""
OTHERS = [
    *("diffusion/branch_grpo.yaml", "diffusion/mix_grpo_flash.yaml"),
    *("vla/dppo.yaml", "vla/flow_noise.yaml", "vla/reinflow.yaml", "vla/sft_diffusion.yaml"),
    *("vlm/ar_image_grpo.yaml", "vlm/bgpo.yaml", "vlm/grpo_care.yaml", "vlm/grid_grpo.yaml"),
]
"""Where the loss of one of these methods is made of something else."""
EVERY = [FILES.get((kind, name), f"{kind}/{name}.yaml") for kind in KINDS for name in built_in(kind)] + OTHERS


class Planted(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, iteration: int) -> Iterator[list[Tensor]]:
    """The first loss of that iteration has a gradient of NaN; the list gets the norm that it had."""
    norms: list[Tensor] = []
    backward = Optimization.backward

    def plant(
        self: Optimization, settings: Method, results: Mapping[str, Tensor], recorded: Recorded, divisor: float
    ) -> None:
        loss = results["loss"]
        if not norms and self.iteration == iteration and loss.requires_grad:
            parameters = list(self.weights.named.values())
            whole = loss.sum() / divisor * self.loss_scale
            found = torch.autograd.grad(whole, parameters, retain_graph=True, allow_unused=True)
            norms.append(torch.stack(torch._foreach_norm([g for g in found if g is not None])).sum())
            results = {**results, "loss": Planted.apply(loss)}
        backward(self, settings, results, recorded, divisor)

    with monkeypatch.context() as patched:
        patched.setattr(Optimization, "backward", plant)
        yield norms


def replayed(config: Any, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Train, stop in the second iteration, and replay: all that the loss was made of and came to is as it was."""
    with planted(monkeypatch, 1) as norms, pytest.raises(NonFiniteError) as error:
        frame.train(config)
    assert error.value.dump is not None
    again = replay(error.value.dump)
    assert again.dump.step == 1 and again.dump.results.keys() <= again.tensors.keys()
    for name, tensor in again.dump.results.items():
        torch.testing.assert_close(again.tensors[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert torch.equal(again.tensors["gradient"], norms[0]) and norms[0] > 0
    return again


def test_every_embedded_file_is_there() -> None:
    assert [name for name in EVERY if not (ROOT / "configs" / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # deprecations within diffusers
@pytest.mark.parametrize("name", EVERY)
def test_a_planted_nan_is_replayed_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs" / name
    small = brief_runs.overrides(brief_runs.load(file), 2) | {"evaluation.every": 0}
    config = load(file, [*(f"{key}={value}" for key, value in small.items()), f"output={tmp_path}", "trackers=[]"])
    replayed(config, monkeypatch)
