"""SPO from inside: its candidates, its scores, its gradient computed a second time by other means, its runs."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.spo import train as spo
from genrl.diffusion.methods.spo.train import CandidateTable, Pairs, chosen_rows, compare, crawl, draw, judge, pair_of
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.steps.plans import last_step_is_stochastic
from genrl.diffusion.steps.transitions import replayed as replayed_step
from genrl.mdp.kernels import sample
from genrl.mdp.noise import keyed_noise
from genrl.mdp.plan import SamplingPlan
from genrl.objectives.preferences import step_preference_loss
from genrl.runtime.loop.recorded import Recorded
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import DIFFUSION, QUIET, Bare, Given, Update, Watched, relative, run, trained_by

SPO = {"algorithm": "spo", "candidates": 3, "first": 1, "threshold": 0.0, "beta": 10.0}
FLOW = {**SPO, "kernel": "flow_sde", "noise_level": 0.7}
CHAINS = {"prompts_per_iteration": 2, "group_size": 2, "batch_size": 3}
WAYS = 3


def test_winners_by_hand_and_picks_are_uniform_and_differ() -> None:
    scores = torch.tensor([[[0.1, 0.9, 0.5], [0.4, 0.4, 0.3]], [[1.0, math.nan, 0.0], [2.0, 2.0, 2.0]]]).double()
    pairs = compare(scores, threshold=0.3)
    assert pairs.win[0].tolist() == [1, 0] and pairs.lose[0].tolist() == [0, 2]
    # tanh(.4) = .38 counts, tanh(.05) = .05 does not; without all scores, or without a difference, there is no pair
    assert pairs.valid.tolist() == [[True, False], [False, False]]
    assert pairs.gap[0].tolist() == pytest.approx([0.8, 0.1]) and pairs.gap[1].isnan().tolist() == [True, False]
    assert compare(scores, threshold=0.0).valid.tolist() == [[True, True], [False, False]]
    batch = Batch(["x"] * 600, [(7, 0, slot) for slot in range(600)], {})
    picks = chosen_rows(batch, WAYS, 2) - WAYS * torch.arange(600)
    assert (picks.bincount(minlength=WAYS) - 200).abs().max() < 50  # 4 standard deviations are 46
    assert not torch.equal(picks, chosen_rows(batch, WAYS, 3) - WAYS * torch.arange(600))


@dataclass
class Learnt:
    table: CandidateTable
    pairs: Pairs
    slots: list[list[int]]
    prompts: list[str]


def learning(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Watched, list[Learnt]]:
    learnt: list[Learnt] = []
    learn = spo.learn

    def watched(run: Any, settings: Any, rollouts: Any, result: CandidateTable, pairs: Pairs, *rest: Any) -> Any:
        slots = [micro_batch.slots for micro_batch in rollouts.mine.values()]
        learnt.append(Learnt(dict(result), pairs, slots, rollouts.prompts))
        return learn(run, settings, rollouts, result, pairs, *rest)

    monkeypatch.setattr(spo, "learn", watched)
    return run(config), learnt


def by_hand(config: Config, update: Update, learnt: Learnt) -> tuple[Given, float]:
    """Gradient and loss of an iteration by autograd, from a model loaded afresh and the paper's formulas."""
    bare = Bare(config, update.weights)
    bare.pipe.scheduler.set_timesteps(4)  # PNDM's grid is not DDIM's: the plain one is written out
    times, scheduler = [751, 501, 251, 1], bare.pipe.scheduler
    alphas = [*(float(scheduler.alphas_cumprod[t]) for t in times), float(scheduler.final_alpha_cumprod)]

    def log_prob(slot: int, i: int, state: Tensor, action: Tensor) -> Tensor:
        eps = bare.noise([learnt.prompts[slot]], state[None], torch.tensor(times[i]))[0]
        ab, ab_next = alphas[i], alphas[i + 1]
        std = math.sqrt((1 - ab_next) / (1 - ab) * (1 - ab / ab_next))
        clean = (state - math.sqrt(1 - ab) * eps) / math.sqrt(ab)
        mean = math.sqrt(ab_next) * clean + math.sqrt(1 - ab_next - std**2) * eps
        return torch.distributions.Normal(mean, std).log_prob(action).mean()

    def both(slot: int, i: int, state: Tensor, action: Tensor) -> list[Tensor]:
        with bare.untrained():
            reference = log_prob(slot, i, state, action)
        return [log_prob(slot, i, state, action)[None], reference[None]]

    losses, pairs = [], learnt.pairs
    for slots in learnt.slots:
        for column, (i, candidates) in enumerate(learnt.table[slots[0]].items()):
            for row, slot in enumerate(slots):
                if pairs.valid[slot, column]:
                    actions = (candidates.next_states[row, int(t[slot, column])] for t in (pairs.win, pairs.lose))
                    win, lose = (both(slot, i, candidates.state[row], action) for action in actions)
                    losses.append(step_preference_loss(*win, *lose, torch.ones(1), beta=10.0, clip=0.1).loss[0])
    loss = torch.stack(losses).mean()
    return bare.gradient(loss), float(loss)


def test_gradient_and_loss_by_hand(folder: Path, sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second iteration, where the policy is no longer the reference."""
    config = runs.config(folder, sd, trainer=SPO, sampling={**DIFFUSION, **CHAINS}, **QUIET)
    seen, learnt = learning(config, monkeypatch)
    assert learnt[1].pairs.valid.any() and seen.rows[0]["loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    expected, loss = by_hand(config, seen.updates[1], learnt[1])
    assert seen.rows[1]["loss"] == pytest.approx(loss, abs=1e-6) and loss != pytest.approx(math.log(2.0), abs=1e-4)
    assert any(bool(g.any()) for g in expected.values()) and relative(seen.updates[1].gradient, expected) < 1e-3


def test_scores_are_the_rewards_of_predicted_pictures(folder: Path, sd: Path) -> None:
    """Brightness of every decoded prediction, at its chain, step and place, in whatever calls it was decoded."""
    config = runs.config(folder, sd, trainer=SPO, sampling={**DIFFUSION, **CHAINS}, **QUIET)
    with runs.opened(config) as opened:
        plan = config.trainer.plan(config.sampling, last=True)  # type: ignore[attr-defined]
        kernel, result = Kernel("ddim", 1.0), CandidateTable()
        drawing = partial(draw, plan=plan, kernel=kernel, batch_size=3, candidates=result)
        rollouts = next(opened.collect(drawing) for _ in opened.iterations())
        scores = judge(opened, rollouts, result, plan)
        assert scores.shape == (4, 3, WAYS) and not scores.isnan().any() and len(scores.unique()) > 20
        for micro_batch in rollouts.mine.values():
            for column, i in enumerate(plan.splits):
                for row, slot in enumerate(micro_batch.slots):
                    clean = result[micro_batch.slots[0]][i].clean[row]
                    with torch.no_grad():
                        images = opened.policy.decode(micro_batch.batch.take([row] * WAYS), clean)
                    torch.testing.assert_close(scores[slot, column].float(), images.mean(dim=(1, 2, 3)))


def test_a_pair_is_evaluated_once_by_each_model(folder: Path, sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {**SPO, "inner_epochs": 2, "updates_per_iteration": 2}
    config = runs.config(folder, sd, trainer=trainer, sampling={**DIFFUSION, **CHAINS}, iterations=1, **QUIET)
    _, (learnt,) = learning(config, monkeypatch)
    (row,) = runs.rows(Path(config.output))
    assert row["model_calls/sample"] == 4 * (2 + WAYS * 2)
    assert row["model_calls/train"] == 2 * 2 * int(learnt.pairs.valid.sum()) and row["updates"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["adapters", "shards"])
def test_two_processes_learn_as_one(folder: Path, model: Path, fsdp: bool) -> None:
    """The same samples, pairs and gradients: 3 micro-batches, cut anew in equal shares; a model in shards."""
    sampling = {"prompts_per_iteration": 4 if fsdp else 3, "group_size": 2, "batch_size": 2, "num_inference_steps": 4}
    common: dict[str, Any] = {"trainer": FLOW, "sampling": sampling, "lora": None if fsdp else runs.LORA, **QUIET}
    result = []
    for count in (1, 2):
        runs.config(folder, model, distributed={"fsdp": fsdp and count == 2}, iterations=1, **common)
        result.append(runs.rows(trained_by(count, folder))[0])
    one, two = result
    assert one["spo/valid_ratio"] > 0 and one["grad_norm"] > 0
    for key in one.keys() - {"model_calls/train"} if fsdp else one.keys():  # in shards, pairs that do not count too
        assert two[key] == pytest.approx(one[key], rel=1e-4), key


def crawled(name: str, kernel: Kernel) -> Any:
    """A policy, its plan, and two chains of it."""
    family = FAMILIES[name]()
    policy = Policy(family.pipe)
    noisy = 4 if last_step_is_stochastic(policy) else 3
    ways = tuple(WAYS if 1 <= i < noisy else 1 for i in range(4))
    levels = tuple(kernel.noise_level if i < noisy else None for i in range(4))
    plan = SamplingPlan(roots=1, branching=ways, noise_levels=levels, continue_one=True)
    batch, calls = family.batch(**family.unguided), policy.model_calls
    with torch.no_grad():
        result, final, sigmas = crawl(policy, batch, plan, kernel)
    return policy, plan, batch, result, final, sigmas, policy.model_calls - calls


DDIM, SDE = ("sd15", Kernel("ddim", 1.0)), ("sd3", Kernel("flow_sde", 0.7))


@pytest.mark.parametrize(("name", "kernel"), [DDIM, SDE], ids=["ddim", "flow_sde"])
def test_chains_go_on_from_one_of_their_candidates(name: str, kernel: Kernel) -> None:
    """Candidates are draws with their own noise from one state; the next state is the one that was picked. The calls
    per chain are first + 1 + k (T - first - 1): the parents, then every candidate that is not a picture."""
    policy, plan, batch, result, final, _, calls = crawled(name, kernel)
    assert calls == 2 * plan.calls == 2 * (1 + 1 + WAYS * (4 - 1 - 1))
    assert list(result) == list(range(1, 4 if name == "sd15" else 3))
    chains, settings = torch.arange(2), SimpleNamespace(kernel=kernel.name)
    for i, candidates in result.items():
        pair = pair_of(batch, kernel, i, candidates, chains, torch.tensor([[0, 2], [1, 0]]))
        with torch.no_grad():
            replayed = replayed_step(settings, policy, Recorded(batch, pair))
        for row, (chain, j) in enumerate([(0, 0), (0, 2), (1, 1), (1, 0)]):
            noise = keyed_noise(candidates.state.shape[1:], *batch.keys[chain], "candidate", j, "step", i)
            made = sample(replayed.mean[row : row + 1], replayed.std[row : row + 1], noise[None])
            torch.testing.assert_close(made[0], candidates.next_states[chain, j])
        picked = chosen_rows(batch, WAYS, i + 1) - WAYS * chains
        if i + 1 in result:
            assert torch.equal(result[i + 1].state, candidates.next_states[chains, picked])
        elif name == "sd15":
            assert i == 3 and torch.equal(final, candidates.next_states[chains, picked])
        else:  # the last step is deterministic: it ends in the clean sample that was predicted
            assert i == 2
            torch.testing.assert_close(final, candidates.clean[chains, picked])


def test_clean_samples_are_those_of_the_model() -> None:
    """x - sigma v of a flow, (x - sqrt(1 - ab) eps) / sqrt(ab) of a noise prediction."""
    for name, kernel in (DDIM, SDE):
        policy, _, batch, actual, _, sigmas, _ = crawled(name, kernel)
        for i, j in product((1, 2), range(WAYS)):
            x, level = actual[i].next_states[:, j], sigmas[i + 1]
            with torch.no_grad():
                out = policy.velocity(batch, x, level)
            expected = x - level * out
            if name == "sd15":
                ab = policy.head.alphas_cumprod[int(level)]
                expected = (x - (1 - ab).sqrt() * out) / ab.sqrt()
            torch.testing.assert_close(actual[i].clean[:, j], expected, atol=2e-4, rtol=1e-4)
