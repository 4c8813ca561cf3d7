"""PPO on chunks: what is trained when, with which weights, and what is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.runtime.guards import NonFiniteError, read_dump
from genrl.runtime.recorded import Recorded
from genrl.vla.methods import gae
from genrl.vla.methods.ppo import train as ppo
from genrl.vla.methods.scores import decisions, score
from genrl.vla.methods.update import Figures, learn
from genrl.vla.rollout.rollout import ChunkRollout, episode_returns
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun
from tests.vla import vla_runs


BY_ACTION: dict[str, Any] = {"values": "action", "level": "action", "discount": "smdp"}


class TestWhatIsTrained:
    @pytest.mark.parametrize(("warmup", "staleness", "alone"), [(1, 0, 1), (1, 1, 2)])
    def test_warm_up_is_the_critics_alone(self, warmup: int, staleness: int, alone: int, tmp_path: Path) -> None:
        """To the bit: neither decay nor momentum moves the policy. It learns from values of a critic that had it."""
        config = vla_runs.config(
            tmp_path,
            trainer={"critic_warmup": warmup},
            environment={"staleness": staleness},
            optimizer={"weight_decay": 0.1},
            iterations=alone + 1 + staleness,
        )
        with vla_runs.opened(config) as run:
            seen, finish = [vla_runs.weights(run.policy)], run.loop.finish

            def watched(metrics: dict[str, float]) -> None:
                seen.append(vla_runs.weights(run.policy))
                finish(metrics)

            run.loop.finish = watched  # type: ignore[method-assign, assignment]
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
            changed = [
                {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
                for before, after in zip(seen, seen[1:], strict=False)
            ]
            assert changed[:alone] == [{"value_head"}] * alone
            assert changed[alone:] == [{"value_head", "prefix", "expert", "norm", "out"}] * (1 + staleness)
            rows = vla_runs.rows(run.loop.process.run.folder)
            for row in rows[:alone]:
                assert "loss/policy" not in row and "grad_norm/policy" not in row and row["grad_norm/critic"] > 0
            assert all({"loss/policy", "kl/updates", "grad_norm/policy"} <= row.keys() for row in rows[alone:])

    @pytest.mark.parametrize(("freeze", "moves"), [("encoder", False), ("nothing", True)])
    def test_a_frozen_encoder_stays_as_it_was(self, freeze: str, moves: bool, tmp_path: Path) -> None:
        config = vla_runs.config(tmp_path, policy={"freeze": freeze}, optimizer={"weight_decay": 0.1})
        with vla_runs.opened(config) as run:
            before = vla_runs.weights(run.policy)
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
            changed = {name.split(".")[0] for name in vla_runs.moved(run.policy, before)}
            assert ("encoder" in changed) is moves and len(changed) > 2
            saved = vla_runs.last_state(run.loop.process.run.folder).tensors["weights"]
            assert any(name.startswith("encoder.") for name in saved) is moves  # a checkpoint has what is trained

    def test_the_frozen_half_of_dppo_stays_as_it_was(self, tmp_path: Path) -> None:
        config = vla_runs.config(tmp_path, sampler="diffusion")
        with vla_runs.opened(config) as run:
            before = vla_runs.weights(run.frozen)
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
            assert vla_runs.moved(run.frozen, before) == set()
            assert vla_runs.moved(run.policy, before)
        sampler = config.sampler.model_copy(update={"ft_denoising_steps": 5})
        with vla_runs.opened(config.model_copy(update={"sampler": sampler})) as run:
            assert run.frozen is None  # all steps are trained


class TestUpdates:
    def test_the_divergence_ends_them(self, tmp_path: Path) -> None:
        """The first minibatch cannot diverge; a later one does, and is not stepped."""
        config = vla_runs.config(tmp_path, trainer={"kl_stop": 1e-4, "epochs": 8}, optimizer={"lr": 1e-2})
        with vla_runs.opened(config) as run:
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
            row = vla_runs.rows(run.loop.process.run.folder)[-1]
            assert 1 <= row["updates"] < 8
            assert row["kl/updates"] > 1e-4 / (row["updates"] + 1)  # what passed the bound is in the mean
            assert all(p.grad is None for p in run.policy.parameters())
        free = vla_runs.config(tmp_path, trainer={"kl_stop": None, "epochs": 8}, output=str(tmp_path / "free"))
        with vla_runs.opened(free) as run:
            ppo.train(run, free.trainer)  # type: ignore[arg-type]
            rows = int(vla_runs.rows(tmp_path / "free")[-1]["updates"])
            assert rows % 8 == 0 and rows >= 8

    def test_an_iteration_that_teaches_nothing_changes_nothing(self, tmp_path: Path) -> None:
        """All groups always fail: the filter leaves no decision. The run goes on."""
        changes: dict[str, Any] = {"environment": {"group_size": 4, "max_steps": 4}, "iterations": 2}
        config = vla_runs.config(tmp_path, trainer={"success_filter": [0.1, 0.9]}, **changes)
        with vla_runs.opened(config) as run:
            before = vla_runs.weights(run.policy)
            collect = run.collect

            def hopeless(settings: Any) -> ChunkRollout:
                rollout = collect(settings)
                return rollout._replace(rewards=torch.zeros_like(rollout.rewards))

            run.collect = hopeless  # type: ignore[method-assign, assignment]
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
            assert vla_runs.moved(run.policy, before) == set()
            rows = vla_runs.rows(run.loop.process.run.folder)
            assert [row["step"] for row in rows] == [1, 2] and rows[-1]["updates"] == 0
            assert rows[-1]["critic/explained_variance"] == 0.0

    def test_figures_of_partial_chunks_are_means(self, tmp_path: Path) -> None:
        """Value losses are over decisions, whatever the number of ratios in one, or of passes."""
        rows = []
        for level, part in (("chunk", None), ("element", None), ("chunk", 5)):
            place = tmp_path / f"{level} {part}"
            trainer = {"level": level, "microbatch": part, "epochs": 1, "minibatch": 999}
            config = vla_runs.config(tmp_path, trainer=trainer, output=str(place))
            with vla_runs.opened(config) as run:
                ppo.train(run, config.trainer)  # type: ignore[arg-type]
            rows.append(vla_runs.rows(place)[-1])
        for row in rows:
            assert row["loss/value"] == pytest.approx(rows[0]["loss/value"], rel=1e-4)
            assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        for name in ("loss/policy", "kl/updates", "grad_norm/policy", "grad_norm/critic"):
            assert rows[2][name] == pytest.approx(rows[0][name], rel=1e-3, abs=1e-6)


class TestEstimates:
    @pytest.fixture
    def rollout(self, tmp_path: Path) -> ChunkRollout:
        """With values, which a new critic has not."""
        config = vla_runs.config(tmp_path)
        with vla_runs.opened(config) as run:
            found = run.collect(config.trainer)  # type: ignore[arg-type]
            assert found.values is not None
            values = 1.0 + torch.rand(len(found.values) + 1, 8, 4, generator=torch.Generator().manual_seed(5))
            return found._replace(values=values[:-1], next_values=values[1:, :, 0])

    def settings(self, tmp_path: Path, **trainer: Any) -> Any:
        return vla_runs.config(tmp_path, trainer=trainer).trainer

    def test_a_time_limit_is_bootstrapped_and_success_is_not(self, rollout: ChunkRollout, tmp_path: Path) -> None:
        settings = self.settings(tmp_path, gamma=0.9, lam=1.0)
        found = gae.estimate(rollout, settings)
        ended = {"truncated": 0, "terminated": 0}
        for slot in range(8):
            last = int(rollout.valid[:, slot].sum()) - 1
            assert rollout.done[last, slot]
            tail = 0.0
            if rollout.truncated[last, slot] and not rollout.terminated[last, slot]:
                tail = float(rollout.next_values[last, slot])
            ended["truncated" if tail else "terminated"] += 1
            value = tail
            for t in range(last, -1, -1):
                value = float(rollout.rewards[t, slot].sum()) + 0.9 * value
                assert float(found.returns[t, slot]) == pytest.approx(value, abs=1e-5)
        assert min(ended.values()) > 0

    def test_actions_of_partial_chunks_by_hand(self, rollout: ChunkRollout, tmp_path: Path) -> None:
        """Every executed action's return is its rewards, discounted per action, and the value of what it was left in;
        actions after an end have none, and no weight."""
        settings = self.settings(tmp_path, **BY_ACTION, gamma=0.9, lam=1.0)
        found, partial = gae.estimate(rollout, settings), 0
        for slot in range(8):
            last = int(rollout.valid[:, slot].sum()) - 1
            ended = rollout.terminated[last, slot]
            value = 0.0 if ended else float(rollout.next_values[last, slot])
            for t in range(last, -1, -1):
                count = int(rollout.n_executed[t, slot])
                partial += count < 4
                for j in range(count - 1, -1, -1):
                    value = float(rollout.rewards[t, slot, j]) + 0.9 * value
                    assert float(found.returns[t, slot, j]) == pytest.approx(value, abs=1e-5)
                assert not found.returns[t, slot, count:].any() and not found.advantages[t, slot, count:].any()
        kept = gae.estimated(rollout, rollout.valid, settings)
        assert partial and int(kept.sum()) == int((rollout.n_executed * rollout.valid).sum())
        even = gae.weights(rollout, kept, settings.model_copy(update={"weighting": "episodes"}))
        torch.testing.assert_close(even.sum((0, 2)), torch.ones(8, dtype=torch.float64))
        assert not even[~kept].any() and torch.equal(gae.weights(rollout, kept, settings), kept.double())

    def test_every_episode_may_weigh_the_same(self, rollout: ChunkRollout, tmp_path: Path) -> None:
        settings = self.settings(tmp_path, weighting="episodes")
        kept = rollout.valid.clone()
        weight = gae.weights(rollout, kept, settings)
        torch.testing.assert_close(weight.sum(0), torch.ones(8, dtype=torch.float64))
        assert len(set(rollout.valid.sum(0).tolist())) > 1 and (weight[~kept] == 0).all()
        kept[:, :3] = False
        assert gae.weights(rollout, kept, settings).sum(0).tolist() == pytest.approx([0.0] * 3 + [1.0] * 5)
        plain = gae.weights(rollout, kept, self.settings(tmp_path))
        assert torch.equal(plain, kept.double())

    def test_the_mean_weight_of_what_is_trained_on_is_one(self, tmp_path: Path, monkeypatch: Any) -> None:
        config = vla_runs.config(tmp_path, trainer={"weighting": "episodes"})
        seen = []
        monkeypatch.setattr(ppo, "learn", lambda run, rollout, chosen, *rest, **how: seen.append(chosen))
        with vla_runs.opened(config) as run:
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
        (chosen,) = seen
        assert float(chosen.weight.mean()) == pytest.approx(1.0) and float(chosen.weight.std()) > 0
        assert float(chosen.advantage.mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(chosen.advantage.std()) == pytest.approx(1.0, abs=1e-3)

    def test_advantages_are_normalised_by_what_is_kept(self, rollout: ChunkRollout, tmp_path: Path) -> None:
        config = vla_runs.config(tmp_path)
        with vla_runs.opened(config) as run:
            advantage = torch.randn(rollout.valid.shape, dtype=torch.float64) * 3 + 5
            kept = rollout.valid.clone()
            kept[:, 0] = False
            found = run.normalised(advantage, kept)
            own = advantage[kept]
            torch.testing.assert_close(found, (advantage - own.mean()) / (own.std() + 1e-5))
            assert not run.normalised(advantage, torch.zeros_like(kept)).any()

    def test_explained_variance(self, rollout: ChunkRollout, tmp_path: Path) -> None:
        with vla_runs.opened(vla_runs.config(tmp_path)) as run:
            settings = run.config.trainer
            found = gae.estimate(rollout, settings)  # type: ignore[arg-type]
            none = torch.zeros_like(found.returns)
            for advantages, wanted in ((none, 1.0), (found.returns, 0.0)):  # values that are the returns; that are 0
                told = gae.explained_variance(run, found._replace(advantages=advantages), rollout.valid)
                assert told["critic/explained_variance"] == pytest.approx(wanted)


class TestRollouts:
    def test_all_episodes_that_fit_or_first_ones_as_long_as_they_may_be(self, tmp_path: Path) -> None:
        config = vla_runs.config(tmp_path, environment={"max_steps": 10}, trainer={"episodes": "all", "decisions": 9})
        with vla_runs.opened(config) as run:
            every = run.collect(config.trainer)  # type: ignore[arg-type]
            assert len(every.valid) == 9 and bool((every.valid & (every.episode > 0)).any())
            first = run.collect(config.trainer.model_copy(update={"episodes": "first"}))  # type: ignore[arg-type]
            assert len(first.valid) == 3 and (first.episode[first.valid] == 0).all()
            assert first.n_executed.sum(0).max() == 10

    def test_noise_is_annealed_over_the_iterations(self, tmp_path: Path) -> None:
        config = vla_runs.config(tmp_path, sampler="flow_sde")
        sampler = config.sampler.model_copy(update={"anneal": (0.2, 4)})
        with vla_runs.opened(config.model_copy(update={"sampler": sampler})) as run:
            levels = []
            for iteration in (0, 1, 2, 4, 9):
                run.loop.iteration = iteration
                levels.append(run.collect(config.trainer).sampler.noise_level)  # type: ignore[arg-type]
            assert levels == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])

    def test_the_row_says_what_the_rollout_was(self, tmp_path: Path) -> None:
        config = vla_runs.config(tmp_path, iterations=2)
        with vla_runs.opened(config) as run:
            rollouts, collect = [], run.collect

            def watched(settings: Any) -> ChunkRollout:
                rollouts.append(collect(settings))
                return rollouts[-1]

            run.collect = watched  # type: ignore[method-assign, assignment]
            ppo.train(run, config.trainer)  # type: ignore[arg-type]
            executed = 0
            for row, rollout in zip(vla_runs.rows(run.loop.process.run.folder), rollouts, strict=True):
                executed += int(rollout.n_executed.sum())
                assert row["rollout/env_steps"] == executed
                assert row["rollout/success"] == float(episode_returns(rollout).mean()) == row["rollout/return_mean"]
                assert row["rollout/length_mean"] == pytest.approx(
                    float((rollout.n_executed * (rollout.episode == 0)).sum(0).double().mean())
                )
                assert row["rollout/dropped"] == 0 and 0 < row["rollout/action_std"] < 1


def test_a_loss_that_is_not_finite_leaves_what_it_was_made_from(tmp_path: Path) -> None:
    """The dump alone, with the weights, gives its log-probabilities again."""
    config = vla_runs.config(tmp_path, sampler="diffusion", trainer={"epochs": 1, "minibatch": 9})
    with vla_runs.opened(config) as run:
        rollout = run.collect(config.trainer)  # type: ignore[arg-type]
        nothing = torch.full(rollout.valid.shape, float("nan"))
        chosen = decisions(rollout, nothing, nothing, torch.ones_like(nothing))
        with pytest.raises(NonFiniteError, match="loss is not finite.*genrl replay") as stopped:
            learn(run, rollout, chosen, config.trainer, Figures(), gae.loss, policy=True, critic=True)  # type: ignore[arg-type]
        assert stopped.value.dump is not None
        found = Recorded(None, read_dump(stopped.value.dump).batch)
        scored = score(config.trainer, Acting(run.policy, rollout.sampler), found)  # type: ignore[arg-type]
        assert len(scored.log_prob) == 9
        torch.testing.assert_close(scored.log_prob, scored.old_log_prob)
