"""GRPO on chunks: the advantage of an episode within its group, and what has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.vla.methods.grpo import train as grpo
from genrl.vla.methods.scores import Decisions, decisions
from genrl.vla.rollout.rollout import ChunkRollout, episode_returns
from genrl.vla.run import VLARun
from tests.vla import vla_runs
from tests.vla.methods.test_scores import by_hand, update_gradient

SIXTEEN = {"num_envs": 16, "group_size": 4}


def config(folder: Path, **changes: Any) -> Any:
    trainer = {**vla_runs.GRPO["trainer"], **changes.pop("trainer", {})}
    return vla_runs.config(
        folder, trainer=trainer, environment={**SIXTEEN, **changes.pop("environment", {})}, **changes
    )


def with_rewards(run: VLARun, rewards: Tensor, lost: tuple[int, ...] = ()) -> None:
    """Every rollout is as if its episodes had these returns; those of some slots were lost."""
    collect = run.collect

    def watched(settings: Any) -> ChunkRollout:
        rollout = collect(settings)
        paid = torch.zeros_like(rollout.rewards)
        paid[0, :, 0] = rewards
        valid = rollout.valid.clone()
        valid[:, list(lost)] = False
        return rollout._replace(rewards=paid, valid=valid)

    run.collect = watched  # type: ignore[method-assign, assignment]


def chosen_of(run: VLARun, settings: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ChunkRollout, Decisions]:
    """What the trainer learns from in its first iteration."""
    seen: list[tuple[ChunkRollout, Decisions]] = []
    monkeypatch.setattr(grpo, "learn", lambda run, rollout, chosen, *rest, **how: seen.append((rollout, chosen)))
    grpo.train(run, settings)
    return seen[0]


RETURNS = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 3, 1, 1, 0])


def test_an_episodes_advantage_is_its_return_within_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path)
    with vla_runs.opened(run) as opened:
        with_rewards(opened, RETURNS)
        rollout, chosen = chosen_of(opened, run.trainer, monkeypatch)
    slot = chosen.row % 16
    assert set(slot.tolist()) == {0, 1, 2, 3, 12, 13, 14, 15}  # the groups that have a spread
    for one in (0, 1, 12, 13, 14):
        own = RETURNS[one // 4 * 4 : one // 4 * 4 + 4].double()
        wanted = (RETURNS[one].double() - own.mean()) / (own.std() + 1e-6)
        found = chosen.advantage[slot == one]
        assert len(found) == int(rollout.valid[:, one].sum()) > 0
        torch.testing.assert_close(found, wanted.expand_as(found))
    assert bool((chosen.weight == 1).all())


def test_a_lost_episode_compares_with_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 1 is not a failure: the others of its group are compared among themselves."""
    run = config(tmp_path)
    with vla_runs.opened(run) as opened:
        with_rewards(opened, RETURNS, lost=(1, 12, 13))
        _, chosen = chosen_of(opened, run.trainer, monkeypatch)
    slot = chosen.row % 16
    assert set(slot.tolist()) == {0, 2, 3, 14, 15}
    own = RETURNS[[0, 2, 3]].double()
    found = {one: float(chosen.advantage[slot == one][0]) for one in (0, 2)}
    assert found[0] == pytest.approx(float((1 - own.mean()) / (own.std() + 1e-6)))
    assert found[2] == pytest.approx(float((0 - own.mean()) / (own.std() + 1e-6)))


def test_the_success_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path, trainer={"success_filter": [0.3, 0.9]})
    with vla_runs.opened(run) as opened:
        with_rewards(opened, torch.tensor([1.0, 0, 0, 0] + [1.0, 1, 0, 0] + [0.0] * 4 + [1.0] * 4))
        _, chosen = chosen_of(opened, run.trainer, monkeypatch)
    assert set((chosen.row % 16).tolist()) == {4, 5, 6, 7}


@pytest.mark.parametrize("kind", ["flow_sde", "flow_noise", "diffusion"])
def test_without_spread_nothing_is_learnt(kind: str, tmp_path: Path) -> None:
    run = config(tmp_path, sampler=kind, iterations=2, optimizer={"weight_decay": 0.1})
    with vla_runs.opened(run) as opened:
        before = vla_runs.weights(opened.policy)
        with_rewards(opened, torch.zeros(16))
        grpo.train(opened, run.trainer)
        assert vla_runs.moved(opened.policy, before) == set()
        rows = vla_runs.rows(opened.loop.process.run.folder)
        assert [row["updates"] for row in rows] == [0, 0] and "loss/policy" not in rows[0]
        assert rows[0]["rollout/mixed"] >= 0 and rows[1]["rollout/env_steps"] > rows[0]["rollout/env_steps"]


def test_the_first_gradient_is_reinforce(tmp_path: Path) -> None:
    """Where the ratio is 1, the gradient of the surrogate is that of -A ln pi: no critic, no clip."""
    run = config(tmp_path, trainer={"epochs": 1, "minibatch": 999})
    with vla_runs.opened(run) as opened:
        assert not opened.policy.critic
        rollout = opened.collect(run.trainer)
        advantage = torch.randn(rollout.valid.shape, generator=torch.Generator().manual_seed(1))
        chosen = decisions(rollout, advantage, advantage, torch.ones_like(advantage))
        found = update_gradient(opened, rollout, chosen, run.trainer, grpo.loss)
        log_prob = by_hand(opened.policy, rollout, chosen).flatten(1).sum(1)
        (-chosen.advantage.float() * log_prob).mean().backward()
        wanted = vla_runs.gradients(opened)
        largest = max(float(g.abs().max()) for g in wanted.values())
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=2e-4 * largest, msg=name)
        assert largest > 0


def test_a_whole_iteration_moves_the_policy_towards_what_succeeded(tmp_path: Path) -> None:
    """One step of plain gradient descent: the chunks of the better episodes become more likely."""
    run = config(tmp_path, trainer={"epochs": 1, "minibatch": 999}, optimizer={"lr": 1e-5})
    with vla_runs.opened(run) as opened:
        with_rewards(opened, RETURNS)
        rollouts, collect = [], opened.collect

        def watched(settings: Any) -> ChunkRollout:
            rollouts.append(collect(settings))
            return rollouts[-1]

        opened.collect = watched  # type: ignore[method-assign, assignment]
        grpo.train(opened, run.trainer)
        (rollout,) = rollouts
        every = decisions(rollout, *torch.ones(3, *rollout.valid.shape))
        now = by_hand(opened.policy, rollout, every).flatten(1).sum(1).detach()
        old = torch.where(
            (torch.arange(4) < rollout.n_executed.flatten()[every.row, None])[..., None],
            rollout.log_prob.flatten(0, 1)[every.row, 0],
            0.0,
        ).flatten(1)
        change, slot = now - old.sum(1), every.row % 16
        better, worse = change[(slot == 0) | (slot == 12)].mean(), change[(slot > 0) & (slot < 4)].mean()
        assert better > 0 > worse


def test_groups_begin_alike(tmp_path: Path) -> None:
    run = config(tmp_path)
    with vla_runs.opened(run) as opened:
        rollout = opened.collect(run.trainer)
        first = next(value for name, value in rollout.observations.items() if name.endswith("environment_state"))[0]
        for group in range(4):
            own = first[4 * group : 4 * group + 4]
            assert torch.equal(own, own[:1].expand_as(own))
        assert not torch.equal(first[0], first[4]) and len(set(rollout.instruction)) > 1
        assert episode_returns(rollout).shape == (16,)
