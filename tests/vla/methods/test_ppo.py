"""PPO on chunks: what is trained when, with which weights, and what is left as it was."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.runtime.show import sheet
from genrl.vla.evaluate import sheet_of_rollout
from genrl.vla.methods.grpo import train as grpo
from genrl.vla.methods.ppo import train as ppo
from genrl.vla.rollout.collect import ChunkRollout, episode_returns
from genrl.vla.rollout.scores import normalised
from genrl.vla.run import VLARun
from tests.vla import vla_runs

Opened = Callable[..., AbstractContextManager[VLARun]]
BY_ACTION: dict[str, Any] = {"values": "action", "level": "action", "discount": "smdp"}


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return lambda **changes: vla_runs.opened(vla_runs.config(tmp_path, **changes))


def trained(run: VLARun) -> list[dict[str, Any]]:
    ppo.train(run, run.settings)
    return vla_runs.rows(run.loop.process.run.folder)


@pytest.mark.parametrize(("staleness", "alone", "freeze"), [(0, 1, "encoder"), (1, 2, "nothing")])
def test_warm_up_is_the_critics_alone(staleness: int, alone: int, freeze: str, opened: Opened) -> None:
    """To the bit: neither decay nor momentum moves the policy. An encoder that is not frozen is trained and saved."""
    changes: dict[str, Any] = {"trainer": {"critic_warmup": 1}, "environment": {"staleness": staleness}}
    changes["policy"] = {"freeze": freeze}
    with opened(optimizer={"weight_decay": 0.1}, iterations=alone + 1 + staleness, **changes) as run:
        seen, finish = [vla_runs.weights(run.policy)], run.loop.finish

        def watched(metrics: dict[str, float]) -> None:
            seen.append(vla_runs.weights(run.policy))
            finish(metrics)

        run.loop.finish = watched  # type: ignore[method-assign, assignment]
        rows = trained(run)
    changed = [
        {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
        for before, after in zip(seen, seen[1:], strict=False)
    ]
    assert changed[:alone] == [{"value_head"}] * alone
    trains = {"value_head", "prefix", "expert", "norm", "out"} | ({"encoder"} if freeze == "nothing" else set())
    assert changed[alone:] == [trains] * (1 + staleness)
    saved = vla_runs.last_state(run.loop.process.run.folder).tensors["weights"]
    assert {name.split(".")[0] for name in saved} == trains
    for row in rows[:alone]:
        assert "loss/policy" not in row and "grad_norm/policy" not in row and row["grad_norm/critic"] > 0
    assert all({"loss/policy", "kl/updates", "grad_norm/policy"} <= row.keys() for row in rows[alone:])


def test_the_divergence_ends_them(tmp_path: Path, opened: Opened) -> None:
    """The first minibatch cannot diverge; a later one does, and is not stepped."""
    result = {}
    for bound in (1e-4, None):
        changes = {"trainer": {"kl_stop": bound, "epochs": 8}, "output": str(tmp_path / str(bound))}
        with opened(optimizer={"lr": 1e-2}, **changes) as run:
            result[bound] = trained(run)[-1]
            assert all(p.grad is None for p in run.policy.parameters())
    stopped, free = result[1e-4], result[None]
    assert 1 <= stopped["updates"] < 8 <= free["updates"] and free["updates"] % 8 == 0
    assert stopped["kl/updates"] > 1e-4 / (stopped["updates"] + 1)  # what passed the bound is in the mean


def test_an_iteration_that_teaches_nothing_changes_nothing(opened: Opened) -> None:
    """All groups always fail: the filter leaves no decision. The run goes on."""
    changes: dict[str, Any] = {"environment": {"group_size": 4, "max_steps": 4}, "iterations": 2}
    with opened(trainer={"success_filter": [0.1, 0.9]}, optimizer={"weight_decay": 0.1}, **changes) as run:
        before = vla_runs.weights(run.policy)
        with_rewards(run, torch.zeros(8))
        rows = trained(run)
        assert vla_runs.moved(run.policy, before) == set()
    assert [row["step"] for row in rows] == [1, 2] and rows[-1]["updates"] == 0
    assert rows[-1]["critic/explained_variance"] == 0.0


@pytest.fixture
def rollout(opened: Opened) -> ChunkRollout:
    """With values, which a new critic has not."""
    with opened() as run:
        result = run.collect(run.settings)
    assert result.values is not None
    values = 1.0 + torch.rand(len(result.values) + 1, 8, 4, generator=torch.Generator().manual_seed(5))
    return result._replace(values=values[:-1], next_values=values[1:, :, 0])


def settings(tmp_path: Path, **trainer: Any) -> Any:
    return vla_runs.config(tmp_path, trainer=trainer).trainer


@pytest.mark.parametrize("how", [{}, BY_ACTION], ids=["chunks", "actions"])
def test_returns_by_hand(how: dict[str, Any], rollout: ChunkRollout, tmp_path: Path) -> None:
    """A time limit is bootstrapped and success is not. Discounted per chunk, or per executed action; actions after an
    end have no return."""
    result, partial, cut = ppo.estimate(rollout, settings(tmp_path, **how, gamma=0.9, lam=1.0)), 0, 0
    for slot in range(8):
        last = int(rollout.valid[:, slot].sum()) - 1
        assert rollout.done[last, slot]
        ended = bool(rollout.terminated[last, slot])
        value, cut = 0.0 if ended else float(rollout.next_values[last, slot]), cut + (not ended)
        for t in range(last, -1, -1):
            count = int(rollout.n_executed[t, slot])
            partial += count < 4
            if not how:
                value = float(rollout.rewards[t, slot].sum()) + 0.9 * value
                assert float(result.returns[t, slot]) == pytest.approx(value, abs=1e-5)
                continue
            for j in range(count - 1, -1, -1):
                value = float(rollout.rewards[t, slot, j]) + 0.9 * value
                assert float(result.returns[t, slot, j]) == pytest.approx(value, abs=1e-5)
            assert not result.returns[t, slot, count:].any() and not result.advantages[t, slot, count:].any()
    assert partial > 0 and 0 < cut < 8


@pytest.mark.parametrize("how", [{}, BY_ACTION], ids=["chunks", "actions"])
def test_every_episode_may_weigh_the_same(how: dict[str, Any], rollout: ChunkRollout, tmp_path: Path) -> None:
    even, plain = (settings(tmp_path, **how, weighting=name) for name in ("episodes", "decisions"))
    valid = rollout.valid.clone()
    valid[:, :3] = False
    kept = ppo.estimated(rollout, valid, even)
    assert len(set(valid.sum(0).tolist())) > 2
    assert int(kept.sum()) == int((rollout.n_executed * valid if how else valid).sum())
    weight = ppo.weights(rollout, kept, even)
    assert weight.view(*valid.shape, -1).sum((0, 2)).tolist() == pytest.approx([0.0] * 3 + [1.0] * 5)
    assert not weight[~kept].any() and torch.equal(ppo.weights(rollout, kept, plain), kept.double())


def test_the_mean_weight_of_what_is_trained_on_is_one(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ppo, "learn", lambda run, rollout, chosen, *rest, **how: seen.append(chosen))
    with opened(trainer={"weighting": "episodes"}) as run:
        trained(run)
    (chosen,) = seen
    assert float(chosen.weight.mean()) == pytest.approx(1.0) and float(chosen.weight.std()) > 0
    assert float(chosen.advantage.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(chosen.advantage.std()) == pytest.approx(1.0, abs=1e-3)


def test_advantages_are_normalised_and_returns_explained_by_what_is_kept(rollout: ChunkRollout, opened: Opened) -> None:
    advantage, kept = torch.randn(rollout.valid.shape, dtype=torch.float64) * 3 + 5, rollout.valid.clone()
    kept[:, 0] = False
    own = advantage[kept]
    torch.testing.assert_close(normalised(advantage, kept), (advantage - own.mean()) / (own.std() + 1e-5))
    assert not normalised(advantage, torch.zeros_like(kept)).any()
    with opened() as run:
        actual = ppo.estimate(rollout, run.settings)
        for advantages, wanted in ((0 * actual.returns, 1.0), (actual.returns, 0.0)):  # values that are returns; or 0
            explained = ppo.explained_variance(run, actual._replace(advantages=advantages), rollout.valid)
            assert explained["critic/explained_variance"] == pytest.approx(wanted)


def test_all_episodes_that_fit_or_first_ones_as_long_as_they_may_be(opened: Opened) -> None:
    with opened(environment={"max_steps": 10}, trainer={"episodes": "all", "decisions": 9}) as run:
        every = run.collect(run.settings)
        assert len(every.valid) == 9 and bool((every.valid & (every.episode > 0)).any())
        first = run.collect(run.settings.model_copy(update={"episodes": "first"}))
        assert len(first.valid) == 3 and (first.episode[first.valid] == 0).all()
        assert first.n_executed.sum(0).max() == 10


def test_the_row_says_what_the_rollout_was(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts: list[ChunkRollout] = []
    with opened(iterations=2) as run:
        collect = run.collect
        monkeypatch.setattr(run, "collect", lambda how: rollouts.append(collect(how)) or rollouts[-1])
        rows = trained(run)
    executed = 0
    for row, rollout in zip(rows, rollouts, strict=True):
        executed += int(rollout.n_executed.sum())
        assert row["rollout/env_steps"] == executed
        assert row["rollout/success"] == float(episode_returns(rollout).mean()) == row["rollout/return_mean"]
        lengths = (rollout.n_executed * (rollout.episode == 0)).sum(0).double()
        assert row["rollout/length_mean"] == pytest.approx(float(lengths.mean()))
        assert row["rollout/dropped"] == 0 and 0 < row["rollout/action_std"] < 1
    # without evaluation the report opens with the first iteration's episodes
    seen = sheet.read(run.process.run.samples / sheet.NAME)
    won = (rollouts[0].success & (rollouts[0].episode == 0)).any(0)
    assert [look["text"] for look in seen["looks"]] == rollouts[0].instruction[:4]
    assert [look["facts"]["success"] for look in seen["looks"]] == [str(bool(flag)) for flag in won[:4]]
    assert {row[0] for row in seen["numbers"]} >= {"observation.environment_state[0]", "action[0]"}
    lost = rollouts[0]._replace(valid=torch.zeros_like(rollouts[0].valid))
    assert sheet_of_rollout(run.acting, lost, run.config) == sheet.ContactSheet([])


# -- GRPO on chunks: the advantage of an episode within its group, and what has none
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
    sixteen, seen = {"num_envs": 16, "group_size": 4}, []
    run = vla_runs.config(tmp_path, trainer=vla_runs.GRPO["trainer"] | trainer, environment=sixteen)
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
        actual = chosen.advantage[slot == one]
        assert len(actual) == int(rollout.valid[:, one].sum()) > 0
        torch.testing.assert_close(actual, wanted.expand_as(actual))
