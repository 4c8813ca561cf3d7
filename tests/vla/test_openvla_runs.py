"""Runs of tiny OpenVLA-OFTs on MiniTable: imitated, reinforced, resumed, exported; what a configuration cannot ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.cli.arguments import is_policy
from genrl.config import ConfigError, check_files
from genrl.runtime.loop.progress import Progress
from genrl.vla.config.schema import VLAConfig
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.layers import is_adapter
from genrl.vla.policies.policy import TOKENS
from genrl.vla.setup import export, load_trained
from genrl.vla.train import judge_policy, train
from tests.run_folders import assert_resumes
from tests.vla import vla_runs
from tests.vla.openvla_folders import observation
from tests.vla.openvla_runs import GRPO, OFT, PPO, SFT, config


def logits(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        given = observation(state=3) | {TOKENS: policy.tokenise(["touch the red block"] * 3)}
        found: torch.Tensor = policy.encode(given)["logits"]
    return found


RUNS: dict[str, dict[str, Any]] = {
    "sft": {**SFT, "evaluation": {"every": 2}},
    "ppo": {"trainer": {**PPO, "values": "action", "level": "action", "discount": "smdp", "entropy_weight": 0.01}},
    "sft of the continuous head": {**SFT, "head": True, "evaluation": {"every": 2}},
    "ppo of adapters": {"policy": {"lora": {"rank": 2}, "gradient_checkpointing": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("kind", ["sft", "ppo", *(pytest.param(k, marks=pytest.mark.slow) for k in list(RUNS)[2:])])
def test_a_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    assert_resumes(train, config(tmp_path, **RUNS[kind], iterations=2), tmp_path)
    rows = vla_runs.rows(tmp_path / "run")
    if kind.startswith("sft"):
        assert len([row for row in rows if "eval/success_mean" in row]) == 2
    if kind.startswith("ppo"):
        assert [row["rollout/log_prob_off"] for row in rows] == [0.0, 0.0] and rows[0]["rollout/action_std"] > 0.1


@pytest.mark.slow
def test_groups_are_compared_from_the_run_of_an_imitation(tmp_path: Path) -> None:
    first = train(config(tmp_path, **SFT, output=str(tmp_path / "sft")))
    told = {"group_size": 8, "num_envs": 32, "max_steps": 16}
    changes = {"policy": {"path": str(first), "oft": None}, "environment": told, "trainer": GRPO}
    assert_resumes(train, config(tmp_path, **changes, iterations=2), tmp_path)
    rows = vla_runs.rows(tmp_path / "run")
    assert [row["rollout/log_prob_off"] for row in rows] == [0.0, 0.0] and rows[0]["rollout/mixed"] > 0
    assert load_policy(tmp_path / "run" / "policy").horizon == 4


def test_adapters_are_merged_into_an_exported_folder(tmp_path: Path) -> None:
    changes = {"policy": {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}, "optimizer": {"lr": 1e-2}}
    run = train(config(tmp_path, **changes))
    names = vla_runs.last_state(run).tensors["weights"]
    assert {n.split(".")[0] for n in names if is_adapter(n)} == {"language_model"}
    assert {n.split(".lora_")[0].split(".")[-1] for n in names if is_adapter(n)} == {"q_proj", "down_proj"}
    out = export(run, tmp_path / "out")
    written, base = load_policy(out), load_policy(run / "policy")
    assert torch.equal(logits(written), logits(base)) and torch.equal(logits(written), logits(load_trained(run)))
    original = load_trained(tmp_path / "base", adapt=None)
    assert written.horizon == 4 and original.horizon == 8  # the chunk is written with the policy
    files = {f.name for f in (tmp_path / "base").iterdir()} | {"oft.json", "genrl_heads.safetensors"}
    assert {f.name for f in out.iterdir()} == files
    with Progress(1, unit="episodes") as progress:  # as `genrl eval` does, of a configuration that has policy.oft
        assert len(judge_policy(config(tmp_path, **changes), run, progress).success) == 8


def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"head": True}, "ppo cannot train .* predicts actions: a policy that computes its actions has no likelihood"),
        ({"trainer": {"algorithm": "rl100"}}, "rl100 cannot train .* tokens: it works on denoising steps; take sft"),
        ({"policy": {"path": None, "new": {}}, **SFT}, "tiny_flow_vla predicts velocity; write sampler.kind: flow_sde"),
    ]
    for changes, text in refused:
        with pytest.raises(ConfigError, match=text):
            config(tmp_path, **changes)


def test_the_check_reads_the_folder(tmp_path: Path) -> None:
    """Without weights: the data set, the sort of head, the chunk."""

    def found(run: VLAConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            check_files(run)
        return str(caught.value)

    run = config(tmp_path)
    check_files(run)
    assert is_policy(tmp_path / "base")
    (tmp_path / "base" / "action_head--5_checkpoint.pt").touch()
    assert "tokens does not fit" in found(run) and "which predicts actions; write regression" in found(run)
    (tmp_path / "base" / "action_head--5_checkpoint.pt").unlink()
    wrong = config(tmp_path, policy={"oft": {**OFT, "unnorm_key": "minitabel"}})
    assert "found 'minitabel'; the nearest: minitable" in found(wrong)
    assert "5 actions cannot be executed of chunks of 4" in found(config(tmp_path, environment={"chunk": 5}))
