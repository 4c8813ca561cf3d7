"""Training in half precision goes where training in float32 goes: nothing that is small is lost in rounding.

Both precisions take 20 steps on the micro-batches of one rollout, at a learning rate far below the spacing of bfloat16.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config import RunConfig
from genrl.config.method import code_of
from genrl.diffusion.train import KIND as PIPELINES
from genrl.runtime.loop.frame import Kind
from genrl.runtime.weights.optimization import Optimization
from genrl.runtime.weights.optimizers import AdamW
from genrl.vla.train import KIND as POLICIES
from genrl.vlm.train import KIND as ANSWERS
from tests.diffusion import runs
from tests.diffusion.conftest import model as model
from tests.opened import opened
from tests.vla import vla_runs
from tests.vlm import vlm_runs

Given = list[tuple[Any, Any, float]]
HALF = torch.bfloat16


def micro_batches(config: RunConfig, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Given:
    """(settings, recorded, divisor) of the first iteration's backward passes."""
    result: Given = []

    def kept(self: Optimization, settings: Any, results: Any, recorded: Any, *, divisor: float = 1.0) -> None:
        result.append((settings, recorded, divisor))
        backward(self, settings, results, recorded, divisor=divisor)

    backward = Optimization.backward
    with monkeypatch.context() as patched, opened(config, kind) as run:
        patched.setattr(Optimization, "backward", kept)
        run.begin(None)
        code_of(config.trainer).train(run, config.trainer)
    return result


def displacement(config: RunConfig, kind: Kind, given: Given, prepare: Callable[[Any], None]) -> tuple[Tensor, Any]:
    """Of all trained numbers after 20 steps, from weights that bfloat16 can hold; and the optimiser."""
    with opened(config, kind) as run:
        prepare(run)
        loop = run.loop
        named = loop.weights.named
        start = {name: p.detach().to(torch.float32, copy=True) for name, p in named.items()}
        policy = run.acting if kind is POLICIES else run.policy
        for _ in range(20):
            for settings, recorded, divisor in given:
                with torch.autocast("cpu", HALF, enabled=prepare is halved):
                    results = code_of(settings).loss(settings, policy, recorded)
                loop.optimization.backward(settings, results, recorded, divisor=divisor)
            loop.optimization.step()
        state = loop.optimizer.state
        end = {name: state[p].get("master", p.detach()).float() for name, p in named.items() if p in state}
        return torch.cat([(end[name] - start[name]).flatten() for name in end]), loop.optimizer


def rounded(run: Any) -> None:
    """Weights that bfloat16 holds exactly, and away from the zeros of new adapters."""
    rng = torch.Generator().manual_seed(0)
    for p in run.loop.weights.named.values():
        values = p.data.float() if p.data.any() else 0.02 * torch.randn(p.shape, generator=rng)
        p.data = values.to(HALF).to(p.dtype)


def halved(run: Any) -> None:
    rounded(run)
    for p in run.loop.weights.named.values():
        p.data = p.data.to(HALF)


def judge(whole: Tensor, half: Tensor) -> None:
    assert float(torch.nn.functional.cosine_similarity(whole, half, dim=0)) > 0.99
    assert float(half.norm() / whole.norm()) == pytest.approx(1.0, abs=0.02)


SLOW = {"optimizer": {"lr": 1e-6}}
ADAPTER = pytest.param({"rank": 4, "alpha": 8}, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["full", "lora"])
def test_a_vision_language_model(lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(dtype: str) -> Any:
        return vlm_runs.config(tmp_path, vlm={"dtype": dtype, "lora": lora}, **SLOW)

    given = micro_batches(config("float32"), ANSWERS, monkeypatch)
    whole, _ = displacement(config("float32"), ANSWERS, given, rounded)
    half, optimizer = displacement(config("bfloat16"), ANSWERS, given, rounded)
    judge(whole, half)
    assert (optimizer.applied is None) is (lora is not None)  # adapters are float32


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, runs.LORA], ids=["full", "lora"])
def test_a_pipeline(lora: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full fine-tuning holds the denoiser in float32 and computes in bfloat16; of a LoRA only the base is rounded."""
    runs.write_folder(tmp_path)

    def config(**half: Any) -> Any:
        common = {"lora": lora, "iterations": 1, "evaluation": {"every": 0}, **SLOW}
        whole = runs.config(tmp_path, model, trainer=runs.NFT, **common)  # no ratio, which would be clipped
        return whole.model_copy(update={"model": whole.model.model_copy(update=half)})

    given = micro_batches(config(), PIPELINES, monkeypatch)
    whole, _ = displacement(config(), PIPELINES, given, rounded)
    change = {"autocast": "bfloat16"} if lora is None else {"dtype": "bfloat16"}
    half, optimizer = displacement(config(**change), PIPELINES, given, rounded)
    judge(whole, half)
    assert optimizer.applied is None


def test_a_policy_in_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vla_runs.config(tmp_path, **SLOW)
    given = micro_batches(config, POLICIES, monkeypatch)
    whole, _ = displacement(config, POLICIES, given, rounded)
    half, optimizer = displacement(config, POLICIES, given, halved)
    judge(whole, half)
    assert isinstance(optimizer, AdamW) and optimizer.applied is not None
