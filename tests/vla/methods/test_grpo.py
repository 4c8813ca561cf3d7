"""GRPO on chunks: the advantage of an episode within its group, and what has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.vla.methods.grpo import train as grpo
from genrl.vla.rollout.rollout import ChunkRollout, episode_returns
from genrl.vla.run import VLARun
from tests.vla import vla_runs

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


RETURNS = [1.0, 0, 0, 0] + [1.0] * 4 + [0.0] * 4 + [3.0, 1, 1, 0]


@pytest.mark.parametrize(
    ("returns", "lost", "trainer", "learned"),
    [
        (RETURNS, (), {}, [0, 1, 2, 3, 12, 13, 14, 15]),  # the groups that have a spread
        (RETURNS, (1, 12, 13), {}, [0, 2, 3, 14, 15]),  # slot 1 is not a failure
        ([1.0, 0, 0, 0] + [1.0, 1, 0, 0] + [0.0] * 8, (), {"success_filter": [0.3, 0.9]}, [4, 5, 6, 7]),
    ],
    ids=["all", "some were lost", "success filter"],
)
def test_an_episodes_advantage_is_its_return_within_its_group(
    returns: list[float], lost: tuple[int, ...], trainer: Any, learned: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    run, seen = config(tmp_path, trainer=trainer), []
    monkeypatch.setattr(grpo, "learn", lambda run, rollout, chosen, *rest, **how: seen.append((rollout, chosen)))
    with vla_runs.opened(run) as opened:
        with_rewards(opened, torch.tensor(returns), lost)
        grpo.train(opened, run.trainer)
    rollout, chosen = seen[0]
    slot = chosen.row % 16
    assert sorted(set(slot.tolist())) == learned and bool((chosen.weight == 1).all())
    for one in learned:
        group = range(one // 4 * 4, one // 4 * 4 + 4)
        own = torch.tensor([returns[other] for other in group if other not in lost], dtype=torch.float64)
        wanted = (returns[one] - own.mean()) / (own.std() + 1e-6)
        found = chosen.advantage[slot == one]
        assert len(found) == int(rollout.valid[:, one].sum()) > 0
        torch.testing.assert_close(found, wanted.expand_as(found))


def test_without_spread_nothing_is_learnt(tmp_path: Path) -> None:
    run = config(tmp_path, iterations=2, optimizer={"weight_decay": 0.1})
    with vla_runs.opened(run) as opened:
        before = vla_runs.weights(opened.policy)
        with_rewards(opened, torch.zeros(16))
        grpo.train(opened, run.trainer)
        assert vla_runs.moved(opened.policy, before) == set()
        rows = vla_runs.rows(opened.loop.process.run.folder)
        assert [row["updates"] for row in rows] == [0, 0] and "loss/policy" not in rows[0]
        assert rows[0]["rollout/mixed"] >= 0 and rows[1]["rollout/env_steps"] > rows[0]["rollout/env_steps"]


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
