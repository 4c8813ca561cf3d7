"""Evaluation: who acts in the first steps of DPPO, how it tells that it lives, what cannot be judged from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genrl.runtime.progress import Progress
from genrl.vla import train
from genrl.vla.evaluate import evaluate, success_rates
from genrl.vla.methods.diwa.settings import DiWA
from genrl.vla.policies.folder import load_first_steps, load_policy
from genrl.vla.policies.policy import ACTION
from genrl.vla.rollout.sampling import Acting, FlowSteps, Frozen, act
from genrl.vla.setup import export, load_trained, sampler_of
from genrl.vla.simulators.minitable import MiniTable
from tests.vla import vla_runs
from tests.vla.published import pi_folder
from tests.vla.published_runs import STATE3
from tests.vla.tiny_policies import flow, frames


def test_it_tells_of_every_decision_and_of_every_episode() -> None:
    """A round of slow simulators may take longer than a watchdog waits."""
    told: list[int] = []
    env = MiniTable(3, image_size=0, max_steps=8)
    found = evaluate(Acting(flow(), FlowSteps()), env, episodes=5, seed=1, advance=told.append)  # type: ignore[arg-type]
    assert told == [0, 0, 3, 0, 0, 2] and len(found.success) == 5


def test_the_judge_has_the_policy_before_fine_tuning_on_its_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vla_runs.config(tmp_path, sampler="diffusion")
    loaded: list[torch.nn.Module] = []
    load = train._on_device
    monkeypatch.setattr(train, "_on_device", lambda *a: loaded.append(load(*a)) or loaded[-1])
    seen: list[object] = []

    def watched(who, env, **rest):
        seen.extend([who.policy, who.frozen])
        return evaluate(who, env, **rest)

    monkeypatch.setattr(train, "evaluate", watched)
    with Progress(1, enabled=False) as progress:
        train.judge_policy(config, vla_runs.policy_of("diffusion"), progress)
    assert len(loaded) == 2 and seen == loaded


def test_an_exported_dppo_run_acts_as_it_did(tmp_path: Path) -> None:
    """Both halves are in the folder: the run's figure and actions, to the bit, without what the run began with."""
    evaluation = {"every": 1, "episodes": 6, "num_envs": 3}
    config = vla_runs.config(tmp_path, sampler="diffusion", evaluation=evaluation, optimizer={"lr": 1e-2})
    run = train.train(config)
    out = export(run, tmp_path / "out", None)
    lone = config.model_copy(update={"policy": config.policy.model_copy(update={"path": str(tmp_path / "gone")})})
    last = vla_runs.rows(run)[-1]
    with Progress(1, enabled=False) as progress:
        for model in (run, out):
            for name, value in success_rates(train.judge_policy(lone, model, progress)).items():
                assert value == last[name], name
    base, trained, exported = load_policy(vla_runs.policy_of("diffusion")), load_trained(run), load_policy(out)
    first = load_first_steps(out, 5, 3)
    observation = {name: value[:5] for name, value in frames(image=0).items() if name != ACTION}
    noise, sampler = torch.randn(5, 4, 3), sampler_of(config, base)
    with torch.no_grad():
        acted = [
            act(who, sampler, who.encode(observation), noise, frozen=Frozen(before, before.encode(observation)))
            for who, before in ((trained, base), (exported, first), (exported, exported))
        ]
    assert torch.equal(acted[0], acted[1]) and not torch.equal(acted[0], acted[2])

    on = config.model_copy(update={"policy": config.policy.model_copy(update={"path": str(out)})})
    frozen = train.frozen_of(on, exported)
    assert vla_runs.moved(frozen, {**frozen.state_dict(), **base.state_dict()}) == set()
    other = on.model_copy(update={"sampler": config.sampler.model_copy(update={"ft_denoising_steps": 2})})
    with pytest.raises(ValueError, match="does the last 3 of 5 denoising steps.*found 5 and 2"):
        train.train(other.model_copy(update={"output": str(tmp_path / "other")}))
    assert not (tmp_path / "other" / "config.yaml").exists()  # before anything is written
    whole = other.model_copy(update={"sampler": config.sampler.model_copy(update={"ft_denoising_steps": 5})})
    for refused in (lambda: train.frozen_of(whole, exported), lambda: train.judge_policy(whole, out, Progress(1))):
        with pytest.raises(ValueError, match="does the last 3 of 5 denoising steps.*found 5 and 5"):
            refused()
    with torch.no_grad():
        next(exported.encoder.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="an encoder of their own; write false"):
        train.frozen_of(on, exported)


def test_a_policy_that_does_not_act_alone_is_refused(tmp_path: Path) -> None:
    config = vla_runs.config(tmp_path)
    lone = config.model_copy(update={"trainer": DiWA()})
    with Progress(1, enabled=False) as progress, pytest.raises(ValueError, match="its world model.*metrics.jsonl"):
        train.judge_policy(lone, tmp_path / "none", progress)


def test_what_a_configuration_renames_is_renamed_for_the_judge(tmp_path: Path) -> None:
    features = {"observation.state": STATE3, "observation.images.base_0_rgb": {"type": "VISUAL", "shape": [3, 32, 32]}}
    pi_folder(tmp_path / "pi", adaptive=False, input_features=features)
    config = vla_runs.config(tmp_path)
    renamed = {"observation.image": "observation.images.base_0_rgb"}
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"rename": renamed})})
    assert "observation.image" in train._on_device(config, tmp_path / "pi").inputs
