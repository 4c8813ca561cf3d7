"""Layers whose activations are computed again in the backward pass, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from genrl.mdp.noise import keyed_noise
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.layers import compute_again
from genrl.vla.policies.policy import TOKENS
from genrl.vla.train import open_policy, train
from tests.vla import published_runs, vla_runs
from tests.vla.published import LINES, pi_folder, pi_observation, smol_folder


def passed(policy: Any) -> tuple[dict[str, Tensor], int]:
    """Outputs and gradients of an encoding, two denoising steps, the heads; bytes that the graph keeps."""
    held = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    observation = pi_observation(3) | {TOKENS: policy.tokenise(LINES)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = dict(policy.encode(observation))
        for step, sigma in enumerate((1.0, 0.5)):
            outputs = policy.velocity_and_noise(found, keyed_noise((3, 6, 32), step), torch.full((3,), sigma))
            found |= {f"velocity-{step}": outputs[0], f"noise-{step}": outputs[1]}
        found["value"] = policy.value(found)
        loss = sum(value.float().square().mean() for name, value in found.items() if name != "valid")
    loss.backward()  # type: ignore[union-attr]
    gradients = {f"gradient/{name}": p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {**found, **gradients}, sum(kept.values())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("pi0", torch.float32), ("pi05", torch.bfloat16), ("smolvla", torch.float32), ("smolvla", torch.bfloat16)],
)
def test_computing_again_gives_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bfloat16: of a frozen language model."""
    settings = published_runs.ALL if dtype == torch.float32 else {"train_expert_only": True}
    if kind == "smolvla":
        weights = smol_folder(tmp_path)
        smol_folder(tmp_path, weights={name: value.to(dtype) for name, value in weights.items()}, **settings)
    else:
        pi_folder(tmp_path, adaptive=kind == "pi05", dtype=dtype, **settings)
    found = []
    for again in (False, True):
        policy = load_policy(tmp_path).with_heads(critic=1, noise_head="expert", seed=0)
        if again:
            compute_again(policy)
        found.append(passed(policy))
    (kept, most), (computed, least) = found
    assert kept.keys() == computed.keys() and sum(name.startswith("gradient/") for name in kept) > 40
    for name, value in kept.items():
        assert torch.equal(computed[name], value), name
    assert least < 0.5 * most


def test_a_run_that_computes_again_is_the_same_run(tmp_path: Path) -> None:
    runs = []
    for again in (False, True):
        policy, output = {"gradient_checkpointing": again}, str(tmp_path / str(again))
        runs.append(train(published_runs.config(tmp_path, "pi05", policy=policy, output=output)))
    assert vla_runs.differences(*runs) == []
    assert vla_runs.rows(runs[1])[0]["updates"] == 2


def test_passes_without_gradient_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts have nothing to compute again."""
    pi_folder(tmp_path, **published_runs.ALL)
    policy, made = load_policy(tmp_path).with_heads(critic=1, noise_head="expert", seed=0), []

    def counted(*given: Any, **settings: Any) -> Any:
        made.append(settings)
        return checkpoint(*given, **settings)

    monkeypatch.setattr("genrl.vla.policies.layers.checkpoint", counted)
    compute_again(policy)
    observation = pi_observation(3) | {TOKENS: policy.tokenise(LINES)}
    with torch.no_grad():
        before = policy.encode(observation)
    assert not made
    after = policy.encode(observation)
    assert made and all(torch.equal(value, before[name]) for name, value in after.items())


def test_what_has_no_such_layers_is_refused(tmp_path: Path) -> None:
    again = {"gradient_checkpointing": True}
    with pytest.raises(ValueError, match="policy.gradient_checkpointing: .* a TinyFlowVLA has none; leave it out"):
        open_policy(vla_runs.config(tmp_path, policy=again))
