"""Low-rank adapters of published policies: what they train, how a run goes on, the folder in which they are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl.mdp.noise import keyed_noise
from genrl.runtime.weights.weights import put_back
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.layers import is_adapter
from genrl.vla.policies.policy import TOKENS
from genrl.vla.setup import load_trained
from genrl.vla.train import open_policy, train
from tests.run_folders import assert_resumes
from tests.vla import published_runs, vla_runs
from tests.vla.published import LINES

LORA: dict[str, Any] = {"lora": {"rank": 2}}
MERGED = 2e-5
"""A sum of products in float32, taken in another order: of velocities up to 3.6. Largest seen: 2.1e-6."""


def velocity(policy: Any) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    observation = {"observation.state": torch.randn(3, 3, generator=rng), TOKENS: policy.tokenise(LINES)}
    observation["observation.image"] = torch.randint(0, 256, (3, 32, 32, 3), generator=rng, dtype=torch.uint8)
    with torch.no_grad():
        found: torch.Tensor = policy.velocity(policy.encode(observation), keyed_noise((3, 6, 32), 0), torch.ones(3))
    return found


@pytest.mark.parametrize("kind", ["pi0", "smolvla", pytest.param("pi05", marks=pytest.mark.slow)])
def test_adapters_are_trained_and_merged_into_what_is_saved(kind: str, tmp_path: Path) -> None:
    config = published_runs.config(tmp_path, kind, policy=LORA, optimizer={"lr": 1e-2}, iterations=2)
    run = train(config)
    rows = vla_runs.rows(run)
    assert [row["rollout/log_prob_off"] for row in rows] == [0.0, 0.0] and rows[0]["updates"] == 2
    trained = vla_runs.last_state(run).tensors["weights"]
    adapters = {name for name in trained if is_adapter(name)}
    assert {name for name in trained if name not in adapters} == {n for n in trained if n.startswith("value_head.")}
    moved = {name.split(".lora_")[0] for name in adapters if "lora_B" in name and trained[name].abs().max() > 0}
    assert (
        len(moved) == 2 * 4 * 4 - 2
    )  # of four layers each; nothing reads what the last one of the language model adds

    base, written = load_policy(tmp_path / "base"), load_policy(run / "policy")
    for name, value in base.state_dict().items():
        stays = name.removesuffix(".weight") not in moved and not name.startswith("value_head.")
        assert torch.equal(written.state_dict()[name], value) == stays, name
    live = open_policy(config)[0]
    put_back({name: p for name, p in live.named_parameters() if p.requires_grad}, trained, run)
    merged = load_trained(run)
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in written.state_dict().items())
    apart = (velocity(written) - velocity(live)).abs().max()
    assert apart < MERGED < 1e3 * MERGED < (velocity(base) - velocity(live)).abs().max()
    files = [load_file(folder / "model.safetensors") for folder in (tmp_path / "base", run / "policy")]
    assert files[0].keys() == files[1].keys()

    assert not torch.equal(velocity(load_trained(run, step=1)), velocity(merged))
    own = {name for name, p in base.named_parameters() if p.requires_grad}
    assert own == {name for name, p in merged.named_parameters() if p.requires_grad}
    more = published_runs.config(tmp_path, kind, policy={**LORA, "path": str(run)}, output=str(tmp_path / "more"))
    on = load_policy(train(more) / "policy")
    assert torch.equal(on.action_in_proj.weight, written.action_in_proj.weight)
    assert not torch.equal(velocity(on), velocity(written))


def test_a_run_of_adapters_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With activations that are computed again, and an average of the adapters."""
    policy = {**LORA, "gradient_checkpointing": True}
    config = published_runs.config(tmp_path, "smolvla", policy=policy, ema={"decay": 0.5}, iterations=2)
    assert_resumes(train, config, tmp_path)
    average = vla_runs.last_state(tmp_path / "run").tensors["snapshot-average"]
    assert any(map(is_adapter, average))


def test_a_frozen_encoder_has_none(tmp_path: Path) -> None:
    policy = open_policy(published_runs.config(tmp_path, "pi0", policy={**LORA, "freeze": "encoder"}))[0]
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert {name.split(".layers.")[0] for name in trained if is_adapter(name)} == {
        "paligemma_with_expert.gemma_expert.model"
    }


def test_a_policy_that_has_changed_is_not_merged_with(tmp_path: Path) -> None:
    run = train(published_runs.config(tmp_path, "pi0", policy=LORA))
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("action_in_proj.weight"))
    save_file(weights | {name: weights[name] + 1.0}, file)
    with pytest.raises(ValueError, match="is not what the run began with, and its checkpoints hold adapters alone"):
        load_trained(run)


def test_what_takes_no_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy.lora: .* a TinyFlowVLA has none; leave it out"):
        open_policy(vla_runs.config(tmp_path, policy=LORA))
    targets = {"lora": {"targets": ["q_prj"]}}
    with pytest.raises(ValueError, match=r"policy.lora.targets: no layer .* named \['q_prj'\]; there are .*'q_proj'"):
        open_policy(published_runs.config(tmp_path, "smolvla", policy=targets))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("pi0", LORA),
        pytest.param("pi05", {"freeze": "encoder"}, marks=pytest.mark.slow),
        pytest.param("smolvla", LORA, marks=pytest.mark.slow),
    ],
)
def test_what_is_not_trained_in_bfloat16(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Nothing else is; what is trained learns as in float32 within bfloat16's rounding, and the run resumes."""
    plain = published_runs.config(tmp_path, kind, policy=changes)
    config = published_runs.config(tmp_path, kind, policy={**changes, "dtype": "bfloat16"}, iterations=2)
    policy = open_policy(config)[0]
    held = {(parameter.requires_grad, parameter.dtype) for parameter in policy.parameters()}
    assert held == {(True, torch.float32), (False, torch.bfloat16)}
    found, exact = velocity(policy), velocity(open_policy(plain)[0])
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    assert (found - exact).norm() < 0.03 * exact.norm()
    assert_resumes(train, config, tmp_path)
    assert [row["rollout/log_prob_off"] for row in vla_runs.rows(tmp_path / "run") if row["step"]] == [0.0, 0.0]
