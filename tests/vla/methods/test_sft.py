"""Supervised training: the gradient of flow matching and of noise prediction, shared out or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.vla.data.demonstrations import frames_of
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.methods.sft import train as sft
from genrl.vla.offline.imitation import imitation_loss, recorded_frames
from genrl.vla.policies.policy import ACTION, rows
from genrl.vla.setup import load_trained
from genrl.vla.train import open_policy, train
from tests.vla import vla_runs
from tests.vla.tiny_policies import diffusion, flow, frames

DIFFUSION: dict[str, Any] = {
    "policy": {"path": None, "new": {"type": "diffusion_mlp", "image_size": 0, "train_steps": 20}},
    "sampler": {"kind": "diffusion", "steps": 20, "ft_denoising_steps": 10},
}


def config(folder: Path, *, kind: str = "flow", **changes: Any) -> Any:
    trainer = {**vla_runs.SFT["trainer"], **changes.pop("trainer", {})}
    sections = {**vla_runs.SFT, **(DIFFUSION if kind == "diffusion" else {}), **changes, "trainer": trainer}
    return vla_runs.config(folder, **sections)


@pytest.mark.parametrize("kind", ["flow", "diffusion"])
def test_the_gradient_of_a_step_is_that_of_the_formula(kind: str, tmp_path: Path) -> None:
    run = config(tmp_path, kind=kind, trainer={"steps_per_iteration": 1})
    _, shown = open_policy(run)
    with vla_runs.opened(run) as opened:
        policy = opened.policy
        with torch.no_grad():
            torch.nn.init.normal_(policy.out.weight, std=0.1)  # zero at first: nothing else would have a gradient
        start, found, step = vla_runs.weights(policy), [], opened.loop.optimization.step
        opened.loop.optimization.step = lambda groups: found.append(vla_runs.gradients(opened)) or step(groups)  # type: ignore[method-assign, assignment, func-returns-value]
        opened.frames = shown
        sft.train(opened, run.trainer)

        policy.load_state_dict(start)
        rng = generator(run.seed, "imitation", 0)
        index = torch.randint(len(shown[ACTION]), (16,), generator=rng)
        batch = rows(shown, index)
        actions = policy.normalised(batch[ACTION])
        context = policy.encode({name: batch[name] for name in policy.inputs})
        noise = torch.randn(actions.shape, generator=rng)
        if kind == "flow":
            time = 0.999 * torch.rand(16, generator=rng) ** (1 / 1.5) + 0.001
            x = (1 - time[:, None, None]) * actions + time[:, None, None] * noise
            error = policy.velocity(context, x, time) - (noise - actions)
        else:
            step = torch.randint(20, (16,), generator=rng)
            bars = ddpm.cosine_alpha_bars(20)[step].float()[:, None, None]
            error = policy.noise(context, bars.sqrt() * actions + (1 - bars).sqrt() * noise, step) - noise
        error.square().mean().backward()
        wanted = vla_runs.gradients(opened)
        largest = max(float(g.abs().max()) for g in wanted.values())
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[0][name], gradient, rtol=1e-3, atol=1e-4 * largest, msg=name)
        assert largest > 1e-3 and any(g.abs().max() > 0 for name, g in wanted.items() if name.startswith("encoder"))


@pytest.mark.parametrize("policy", [flow(), diffusion()], ids=["flow", "diffusion"])
def test_the_parts_of_the_processes_add_up(policy: Any) -> None:
    """Also where one has more padding than the other: the mean is over what was demonstrated."""
    shown = dict(frames(8, 0))
    shown[ACTION_IS_PAD] = torch.arange(4) >= 4 - (torch.arange(len(shown[ACTION])) % 3)[:, None]
    index, bars = torch.arange(11), ddpm.cosine_alpha_bars(20)

    def loss(mine: slice) -> float:
        given = recorded_frames(policy, shown, index, generator(0, "x"), bars, mine)
        return float(imitation_loss(policy, given).detach())

    whole = loss(slice(None))
    for processes in (2, 3, 12):  # of twelve, one has nothing
        parts = [loss(slice(rank, None, processes)) for rank in range(processes)]
        assert all(math.isfinite(part) for part in parts)
        assert sum(parts) == pytest.approx(whole, rel=1e-5)


def test_iterations_steps_and_what_is_logged(tmp_path: Path) -> None:
    run = config(tmp_path, iterations=3, optimizer={"lr": 1e-3, "schedule": "cosine"})
    _, shown = open_policy(run)
    with vla_runs.opened(run) as opened:
        opened.frames = shown
        sft.train(opened, run.trainer)
        assert opened.loop.optimizer_steps == 9
        logged = vla_runs.rows(opened.loop.process.run.folder)
        assert [row["updates"] for row in logged] == [3, 3, 3]
        assert [row["lr"] for row in logged] == pytest.approx([1e-3, 0.75e-3, 0.25e-3])
        assert all(row["loss"] > 0 and row["grad_norm/policy"] > 0 for row in logged)


def test_a_loaded_policy_goes_on_with_its_own_words_and_statistics(tmp_path: Path) -> None:
    run = config(tmp_path, policy={"path": str(vla_runs.folder("flow")), "new": None})
    policy, shown = open_policy(run)
    assert policy.config.inputs.vocabulary == vla_runs.WORDS and not policy.critic
    assert int(shown["observation.language.tokens"].max()) <= len(vla_runs.WORDS)
    assert not any(p.requires_grad for p in policy.encoder.parameters())
    assert all(p.requires_grad for p in policy.expert.parameters())


def test_the_frames_and_the_new_policy_are_those_of_the_seed(tmp_path: Path) -> None:
    one, other = (open_policy(config(tmp_path, seed=seed)) for seed in (1, 2))
    again = open_policy(config(tmp_path, seed=1))
    assert vla_runs.moved(one[0], vla_runs.weights(again[0])) == set()
    assert torch.equal(one[1][ACTION], again[1][ACTION])
    assert vla_runs.moved(one[0], vla_runs.weights(other[0])) and len(one[1][ACTION]) != len(other[1][ACTION])


def test_an_environment_without_an_expert(tmp_path: Path) -> None:
    run = config(tmp_path, environment={"name": "gym_pusht/PushT-v0", "tasks": None})
    with pytest.raises(ValueError, match="has no scripted expert; give a dataset instead"):
        frames_of(run, None)


POINTS: dict[str, Any] = {"policy": {"path": None, "new": {"image_size": 0, "points": 14}}}


@pytest.mark.slow
def test_points_are_imitated_and_then_reinforced(tmp_path: Path) -> None:
    """A policy's encoder of points is trained, saved, and kept as it is by PPO, which trains the rest."""
    for name in ("taught", "reinforced"):
        (tmp_path / name).mkdir()
    how = config(tmp_path / "taught", **POINTS)
    begun, taught = open_policy(how)[0].state_dict(), train(how)
    learned = load_trained(taught).state_dict()
    moved = {name for name in begun if not torch.equal(begun[name], learned[name])}
    assert {"encoder.cloud.each.0.weight", "encoder.cloud.project.0.weight"} <= moved
    after = load_trained(train(vla_runs.config(tmp_path / "reinforced", policy={"path": str(taught)}))).state_dict()
    moved = {name for name in learned if not torch.equal(learned[name], after[name])}
    assert moved and not any(name.startswith("encoder.") for name in moved)


def test_data_sets_hold_no_points(tmp_path: Path) -> None:
    nowhere = {"expert": None, "dataset": str(tmp_path)}
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    with pytest.raises(ValueError, match="data sets hold no clouds of points"):
        open_policy(config(tmp_path, demonstrations=nowhere, **POINTS))
