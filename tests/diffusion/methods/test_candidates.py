"""Chains with candidates for each next state: which are drawn from which noise, by how many model calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genrl.diffusion.methods.spo.train import chosen_rows, crawl, pair_of
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.steps.plans import last_step_is_drawn
from genrl.diffusion.steps.plans import replayed as replayed_step
from genrl.mdp.gaussian import sample
from genrl.mdp.noise import keyed_noise
from genrl.mdp.plan import SamplingPlan
from genrl.runtime.loop.recorded import Recorded
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

WAYS = 3


def crawled(name: str, kernel: Kernel, *, steps: int = 4, first: int = 1, last: bool | None = None) -> Any:
    """A policy, its plan, and two chains of it."""
    family = FAMILIES[name]()
    policy = Policy(family.pipe)
    last = last_step_is_drawn(policy) if last is None else last
    plan = SamplingPlan(
        roots=1,
        branching=tuple(WAYS if i >= first and (last or i < steps - 1) else 1 for i in range(steps)),
        noise_levels=tuple(kernel.noise_level if last or i < steps - 1 else None for i in range(steps)),
        continue_one=True,
    )
    call = {**family.call, **family.unguided, "num_inference_steps": steps}
    batch = Batch(["a cat", "two dogs"], [(0, 0, 0), (0, 0, 1)], call)
    calls = policy.model_calls
    with torch.no_grad():
        found, final, sigmas = crawl(policy, batch, plan, kernel)
    return policy, plan, batch, found, final, sigmas, policy.model_calls - calls


DDIM, SDE = ("sd15", Kernel("ddim", 1.0)), ("sd3", Kernel("flow_sde", 0.7))


@pytest.mark.parametrize(("name", "kernel", "first"), [(*DDIM, 0), (*SDE, 2)], ids=["ddim", "flow_sde"])
def test_calls_are_those_of_the_closed_form(name: str, kernel: Kernel, first: int) -> None:
    """Per chain first + 1 + k (T - first - 1): the parents, then every candidate that is not a picture."""
    _, plan, _, found, _, _, calls = crawled(name, kernel, first=first)
    assert calls == 2 * plan.calls == 2 * (first + 1 + WAYS * (4 - first - 1))
    assert list(found) == list(range(first, 4 if name == "sd15" else 3))


@pytest.mark.parametrize(("name", "kernel"), [DDIM, SDE], ids=["ddim", "flow_sde"])
def test_chains_go_on_from_one_of_their_candidates(name: str, kernel: Kernel) -> None:
    """Candidates are draws with their own noise from one state; the next state is the one that was picked."""
    policy, plan, batch, found, final, _, _ = crawled(name, kernel)
    chains = torch.arange(2)
    for i, candidates in found.items():
        both = torch.tensor([[0, 2], [1, 0]])
        settings = SimpleNamespace(kernel=kernel.name)
        with torch.no_grad():
            replayed = replayed_step(
                settings, policy, Recorded(batch, pair_of(batch, kernel, i, candidates, chains, both))
            )
        for row, (chain, j) in enumerate([(0, 0), (0, 2), (1, 1), (1, 0)]):
            noise = keyed_noise(candidates.state.shape[1:], *batch.keys[chain], "candidate", j, "step", i)
            made = sample(replayed.mean[row : row + 1], replayed.std[row : row + 1], noise[None])
            torch.testing.assert_close(made[0], candidates.drawn[chain, j])
        picked = chosen_rows(batch, WAYS, i + 1) - WAYS * chains
        state = found[i + 1].state if i + 1 in found else None
        if state is not None:
            assert torch.equal(state, candidates.drawn[chains, picked])
    if name == "sd15":
        assert torch.equal(final, found[3].drawn[chains, chosen_rows(batch, WAYS, 4) - WAYS * chains])
    else:  # the last step is deterministic: it ends in the clean sample that was predicted
        torch.testing.assert_close(final, found[2].clean[chains, chosen_rows(batch, WAYS, 3) - WAYS * chains])


def test_clean_samples_are_those_of_the_model() -> None:
    """x - sigma v of a flow, (x - sqrt(1 - ab) eps) / sqrt(ab) of a noise prediction."""
    for name, kernel in (DDIM, SDE):
        policy, _, batch, found, _, sigmas, _ = crawled(name, kernel)
        for i in (1, 2):
            for j in range(WAYS):
                x, level = found[i].drawn[:, j], sigmas[i + 1]
                with torch.no_grad():
                    out = policy.velocity(batch, x, level)
                if name == "sd3":
                    expected = x - level * out
                else:
                    ab = policy.head.alphas_cumprod[int(level)]
                    expected = (x - (1 - ab).sqrt() * out) / ab.sqrt()
                torch.testing.assert_close(found[i].clean[:, j], expected, atol=2e-4, rtol=1e-4)


def test_picks_are_uniform_and_differ() -> None:
    batch = Batch(["x"] * 600, [(7, 0, slot) for slot in range(600)], {})
    picks = chosen_rows(batch, WAYS, 2) - WAYS * torch.arange(600)
    assert (picks.bincount(minlength=WAYS) - 200).abs().max() < 50  # 4 standard deviations are 46
    assert not torch.equal(picks, chosen_rows(batch, WAYS, 3) - WAYS * torch.arange(600))


def test_a_last_step_that_ends_without_noise_is_not_compared() -> None:
    policy = Policy(FAMILIES["sd15"]().pipe)
    assert last_step_is_drawn(policy)
    policy.head.final_alpha_cumprod = torch.tensor(1.0)
    assert not last_step_is_drawn(policy)
    assert not last_step_is_drawn(Policy(FAMILIES["sd3"]().pipe))
    _, plan, _, found, final, _, calls = crawled("sd15", Kernel("ddim", 1.0), last=False)
    assert list(found) == [1, 2] and calls == 2 * plan.calls and final.isfinite().all()
