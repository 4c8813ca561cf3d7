"""Evaluation: who acts in the first steps of DPPO, how it tells that it lives, what cannot be judged from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import vla_runs
from published import pi_folder
from test_published_rollout import STATE3
from tiny_policies import flow

from genrl.runtime.progress import Progress
from genrl.vla import train
from genrl.vla.evaluate import evaluate
from genrl.vla.minitable import MiniTable
from genrl.vla.sampling import FlowSteps


def test_it_tells_of_every_decision_and_of_every_episode() -> None:
    """A round of slow simulators may take longer than a watchdog waits."""
    told: list[int] = []
    env = MiniTable(3, image_size=0, max_steps=8)
    found = evaluate(flow(), FlowSteps(), env, episodes=5, seed=1, advance=told.append)  # type: ignore[arg-type]
    assert told == [0, 0, 3, 0, 0, 2] and len(found.success) == 5


def test_the_judge_has_the_policy_before_fine_tuning_on_its_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vla_runs.config(tmp_path, sampler="diffusion")
    loaded: list[torch.nn.Module] = []
    load = train._on_device
    monkeypatch.setattr(train, "_on_device", lambda *a: loaded.append(load(*a)) or loaded[-1])
    seen: list[object] = []

    def watched(policy, sampler, env, *, frozen, **rest):
        seen.extend([policy, frozen])
        return evaluate(policy, sampler, env, frozen=frozen, **rest)

    monkeypatch.setattr(train, "evaluate", watched)
    with Progress(1, enabled=False) as progress:
        train.judge_policy(config, vla_runs.policy_of("diffusion"), progress)
    assert len(loaded) == 2 and seen == loaded


def test_a_policy_that_does_not_act_alone_is_refused(tmp_path: Path) -> None:
    config = vla_runs.config(tmp_path)
    lone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"algorithm": "diwa"})})
    with Progress(1, enabled=False) as progress, pytest.raises(ValueError, match="its world model.*metrics.jsonl"):
        train.judge_policy(lone, tmp_path / "none", progress)


def test_what_a_configuration_renames_is_renamed_for_the_judge(tmp_path: Path) -> None:
    features = {"observation.state": STATE3, "observation.images.base_0_rgb": {"type": "VISUAL", "shape": [3, 32, 32]}}
    pi_folder(tmp_path / "pi", adaptive=False, input_features=features)
    config = vla_runs.config(tmp_path)
    renamed = {"observation.image": "observation.images.base_0_rgb"}
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"rename": renamed})})
    assert "observation.image" in train._on_device(config, tmp_path / "pi").inputs
