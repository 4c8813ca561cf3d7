"""PromptRL: golden promptrl_joint, and properties."""

from __future__ import annotations

import pytest
import torch

from genrl.diffusion.methods.prompt_rl import train
from genrl.diffusion.policy.rewriter import completion_mask
from genrl.mdp import kernels
from genrl.objectives import policy_losses
from genrl.objectives.groups import group_advantages
from tests.golden_cases import Arrays


def test_golden_joint_step(golden) -> None:
    a = Arrays(golden("promptrl_joint"))
    size, retained = a.given("num_generations_retained").tolist()
    total = train.joint_rewards(a.given("reward_generation"), a.given("format_refined"))
    prompts = len(total)
    group = torch.arange(prompts).repeat_interleave(size)
    advantages = group_advantages(total.flatten(), group, scale="group", eps=1e-4, clip=5.0).view(prompts, size)
    refined = advantages[:, : size - retained].flatten()
    a.check("reward_total", total)
    a.check("advantages", advantages)
    a.check("advantages_refined", refined)

    log_prob, reference = a.given("lm_logp").requires_grad_(), a.given("lm_ref_logp")
    mask = completion_mask(a.given("lm_completion_ids"), int(a.given("lm_eos")))
    weight = a.number("lm_kl_coef")
    loss = train.rewriter_loss(log_prob, reference, refined, mask, kl_weight=weight).mean()
    a.check("lm_mask", mask.double())
    a.check("lm_loss", loss)
    a.check("lm_grad", torch.autograd.grad(loss, log_prob)[0])

    clip, beta = a.given("dit_clip_beta").tolist()
    mean, std = a.given("dit_mean").requires_grad_(), a.given("dit_std")
    per_edge = advantages.flatten().repeat_interleave(len(mean) // advantages.numel())
    density = kernels.log_prob(a.given("dit_next"), mean, std)
    surrogate = policy_losses.clipped_surrogate(density, a.given("dit_old_logp"), per_edge, clip, clip)
    kl = policy_losses.kl_gaussian(mean, a.given("dit_ref_mean"), std)
    loss = (surrogate.loss + beta * kl).mean()
    a.check("dit_adv_per_edge", per_edge)
    a.check("dit_kl", kl)
    a.check("dit_loss", loss)
    a.check("dit_grad_mean", torch.autograd.grad(loss, mean)[0])
    a.all_used(but="tags_per_prompt")  # one for each prompt: groups are the same


def test_masked_tokens_may_hold_anything_and_the_gradient_is_reinforce() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, float("nan")], [-0.5, float("inf"), -3.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -2.0, 5.0], [-0.5, 0.0, float("nan")]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    advantage = torch.tensor([2.0, -1.0])
    loss = train.rewriter_loss(log_prob, reference, advantage, mask, kl_weight=0.3)
    loss.sum().backward()
    assert torch.allclose(loss.detach(), -advantage)
    assert log_prob.grad is not None and log_prob.grad.tolist() == [[-1.0, -1.0, 0.0], [1.0, 0.0, 0.0]]


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="each refinement a picture"):
        train.joint_rewards(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="same prompts"):
        train.joint_rewards(torch.zeros(2, 3), torch.zeros(1, 2))


def test_retained_prompts_get_the_mean_format_score() -> None:
    generation, formats = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 1.0]])
    total = train.joint_rewards(generation, formats, generation_weight=2.0, format_weight=0.5)
    assert total.tolist() == [[2.0, 4.5, 6.25]]
    alone = train.joint_rewards(generation, torch.zeros(1, 0), generation_weight=2.0, format_weight=0.5)
    assert alone.tolist() == [[2.0, 4.0, 6.0]]
