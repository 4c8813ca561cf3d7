"""Published policies in a simulator: imitated on MiniTable, and reinforced from the folder of that run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from genrl.config import load
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import IMAGE
from genrl.vla.train import train
from tests.run_folders import rows
from tests.vla.published_runs import made

SFT = {"algorithm": "sft", "steps_per_iteration": 2, "batch_size": 4}
PPO = {"algorithm": "ppo", "epochs": 1, "minibatch": 8, "critic_warmup": 0, "kl_stop": None}
SDE, NOISE = {"kind": "flow_sde", "steps": 2}, {"kind": "flow_noise", "steps": 2}
DPPO = {"kind": "diffusion", "steps": 3, "ft_denoising_steps": 3}
FROZEN = {"smolvla": "vlm_with_expert.vlm.", "groot": "backbone.", "diffusion": "diffusion.rgb_encoder."}


@pytest.mark.parametrize(
    ("kind", "sampler", "values"),
    [("pi05", NOISE, "chunk"), ("smolvla", NOISE, "action"), ("groot", SDE, "chunk"), ("pi0", SDE, "action")]
    + [("diffusion", DPPO, "chunk")],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_it_imitates_the_expert_and_is_reinforced_from_that_run(
    kind: str, sampler: dict[str, Any], values: str, tmp_path: Path
) -> None:
    policy = made(kind, tmp_path / "a")
    assert IMAGE in policy.inputs
    save_policy(policy, tmp_path / "base")
    common = {"environment": {"name": "minitable", "tasks": ["touch"], "num_envs": 4, "max_steps": 4, "chunk": 2}}
    common |= {"evaluation": {"every": 0, "episodes": 4, "videos": 0}, "trackers": [], "iterations": 1}

    def trained(name: str, path: str, **sections: Any) -> dict[str, torch.Tensor]:
        tree = common | sections | {"policy": {"path": path}, "sampler": sampler, "output": str(tmp_path / name)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        train(load(tmp_path / f"{name}.yaml"))  # type: ignore[arg-type]
        found: dict[str, torch.Tensor] = dict(load_policy(tmp_path / name / "policy").named_parameters())
        return found

    base = dict(load_policy(tmp_path / "base").named_parameters())
    one = trained("sft", str(tmp_path / "base"), trainer=SFT, demonstrations={"expert": 4})
    how = {"values": values, "level": "action", "discount": "smdp"} if values == "action" else {}
    two = trained("ppo", str(tmp_path / "sft"), trainer={**PPO, **how})
    assert rows(tmp_path / "ppo")[-1]["rollout/log_prob_off"] == 0.0
    assert any("value_head" in name for name in two) and any("noise_head" in name for name in two) == (sampler is NOISE)
    frozen = FROZEN.get(kind, "paligemma_with_expert.paligemma.")
    assert any(name.startswith(frozen) for name in base)
    for name in base.keys() & two.keys():
        if "value_head" not in name:
            still = name.startswith(frozen)
            assert torch.equal(base[name], one[name]) == still and torch.equal(one[name], two[name]) == still, name
