"""PromptRL: golden promptrl_joint, and properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import gaussian, noise
from genrl.objectives.advantages import prompt_rl
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.surrogates import policy_losses


def test_golden_joint_step(golden) -> None:
    data = golden("promptrl_joint")
    arrays = {name: torch.from_numpy(np.array(data[name])) for name in data.files}
    size, retained = arrays["num_generations_retained"].tolist()
    total = prompt_rl.joint_rewards(arrays["reward_generation"], arrays["format_refined"])
    prompts = len(total)
    group = torch.arange(prompts).repeat_interleave(size)
    advantages = group_advantages(total.flatten(), group, scale="group", eps=1e-4, clip=5.0).view(prompts, size)
    refined = advantages[:, : size - retained].flatten()

    log_prob = arrays["lm_logp"].clone().requires_grad_()
    mask = prompt_rl.completion_mask(arrays["lm_completion_ids"], int(arrays["lm_eos"]))
    lm_loss = prompt_rl.rewriter_loss(
        log_prob, arrays["lm_ref_logp"], refined, mask, kl_weight=float(arrays["lm_kl_coef"])
    ).mean()

    clip, beta = arrays["dit_clip_beta"].tolist()
    mean, std = arrays["dit_mean"].clone().requires_grad_(), arrays["dit_std"]
    per_edge = advantages.flatten().repeat_interleave(len(mean) // advantages.numel())
    density = gaussian.log_prob(arrays["dit_next"], mean, std)
    surrogate = policy_losses.clipped_surrogate(density, arrays["dit_old_logp"], per_edge, clip, clip)
    kl = policy_losses.kl_gaussian(mean, arrays["dit_ref_mean"], std)
    dit_loss = (surrogate.loss + beta * kl).mean()

    ours = {
        "reward_total": total,
        "advantages": advantages,
        "advantages_refined": refined,
        "lm_mask": mask.double(),
        "lm_loss": lm_loss,
        "lm_grad": torch.autograd.grad(lm_loss, log_prob)[0],
        "dit_adv_per_edge": per_edge,
        "dit_kl": kl,
        "dit_loss": dit_loss,
        "dit_grad_mean": torch.autograd.grad(dit_loss, mean)[0],
    }
    for name, value in ours.items():
        assert torch.allclose(value, arrays[name], rtol=1e-9, atol=1e-10), name
    inputs = {
        *("format_refined", "reward_generation", "num_generations_retained", "lm_logp", "lm_ref_logp", "lm_kl_coef"),
        *("lm_completion_ids", "lm_eos", "dit_mean", "dit_ref_mean", "dit_next", "dit_std", "dit_old_logp"),
        *("dit_clip_beta", "tags_per_prompt"),  # one for each prompt: groups are the same
    }
    assert ours.keys() | inputs == set(arrays)


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 99))
def test_retained_prompts_are_neither_helped_nor_harmed_by_the_format(
    prompts: int, refined: int, retained: int, seed: int
) -> None:
    generation = noise.keyed_noise((prompts, refined + retained), seed, "generation").double()
    formats = noise.keyed_noise((prompts, refined), seed, "format").double()
    total = prompt_rl.joint_rewards(generation, formats, generation_weight=2.0, format_weight=0.5)
    assert torch.allclose(total[:, :refined], 2.0 * generation[:, :refined] + 0.5 * formats)
    bonus = total[:, refined:] - 2.0 * generation[:, refined:]
    want = 0.5 * formats.mean(1, keepdim=True) if refined else torch.zeros(prompts, 1).double()
    assert torch.allclose(bonus, want.expand_as(bonus), atol=1e-12)


def test_the_mask_ends_with_the_first_end() -> None:
    tokens = torch.tensor([[5, 2, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8]])
    want = [[True, True, False, False], [True, False, False, False], [True, True, True, True]]
    assert prompt_rl.completion_mask(tokens, 2).tolist() == want


def test_masked_tokens_may_hold_anything_and_the_gradient_is_reinforce() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, float("nan")], [-0.5, float("inf"), -3.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -2.0, 5.0], [-0.5, 0.0, float("nan")]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    advantage = torch.tensor([2.0, -1.0])
    loss = prompt_rl.rewriter_loss(log_prob, reference, advantage, mask, kl_weight=0.3)
    loss.sum().backward()
    assert torch.allclose(loss.detach(), -advantage)
    assert log_prob.grad is not None and log_prob.grad.tolist() == [[-1.0, -1.0, 0.0], [1.0, 0.0, 0.0]]


def test_the_kl_pulls_towards_the_reference() -> None:
    log_prob = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-2.0, -0.5]])
    loss = prompt_rl.rewriter_loss(log_prob, reference, torch.zeros(1), torch.ones(1, 2), kl_weight=1.0)
    loss.sum().backward()
    assert loss.item() > 0 and log_prob.grad is not None
    assert log_prob.grad[0, 0] > 0 and log_prob.grad[0, 1] < 0


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="each refinement a picture"):
        prompt_rl.joint_rewards(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="same prompts"):
        prompt_rl.joint_rewards(torch.zeros(2, 3), torch.zeros(1, 2))
