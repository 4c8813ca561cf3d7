"""DiffusionNFT: golden trainers_diffusion_nft and trainers_schedules, and its properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from genrl.diffusion.forward import direct as direct_reward
from genrl.diffusion.methods.diff_instruct import train
from genrl.mdp import noise
from genrl.objectives import matching, policy_losses, preferences
from genrl_rewards.scorers.preference.adversary import top_patches
from tests.golden_cases import Arrays
from tests.reference.adv_grpo import adversarial_reward


def test_golden_losses_and_gradients(golden) -> None:
    a = Arrays(golden("trainers_diffusion_nft"))
    velocity, old, reference, noisy = (a.given(f"in_{name}") for name in ("v_new", "v_old", "v_ref", "xt"))
    velocity.requires_grad_()
    clean, sigmas, bound = a.given("in_x0"), a.given("in_sigma"), a.number("in_adv_clip_max")
    for actual in a.matches(r"out_(\w+?)_(loss|unweighted|grad_v)_beta([\dp]+)"):
        weight = matching.nft_reward_weight(a.given("in_advantage"), bound)
        options = {"beta": float(actual[3].replace("p", ".")), "advantage_clip": bound}
        rows = zip(velocity, old, noisy, sigmas, strict=True)
        policy = torch.stack(
            [matching.diffusion_nft_loss(v, o, x, clean, s, weight, **options).mean() for v, o, x, s in rows]
        )
        kl = [policy_losses.kl_velocity(*pair).mean() for pair in zip(velocity, reference, strict=True)]
        total = policy + a.number("in_kl_beta") * torch.stack(kl)
        gradient = torch.autograd.grad(total.sum(), velocity)[0]
        a.near(actual[0], {"loss": total, "unweighted": policy / bound, "grad_v": gradient}[actual[2]])
    a.all_used("out_.*", but=r".*_(only|binary)")  # modes that nobody uses


def test_golden_decays(golden) -> None:
    a = Arrays(golden("trainers_schedules"), double=True)
    steps = a.given("in_steps").tolist()
    for i, kind in enumerate(("none", "ramp", "delayed_ramp")):
        a.check(f"out_nft_return_decay_type{i}", [matching.nft_old_policy_decay(step, kind) for step in steps])
    a.check("out_flow_grpo_ema_current_decay", [matching.ema_decay(step) for step in steps])
    path = a.given("in_param_path")
    for actual in a.matches(r"out_flow_grpo_ema_path_interval(\d+)"):
        average, averages = torch.zeros_like(path[0]), []  # the parameter before the first step
        for step, value in enumerate(path):
            if (step + 1) % int(actual[1]) == 0:
                decay = matching.ema_decay(step)
                average = decay * average + (1 - decay) * value
            averages.append(average)
        a.near(actual[0], torch.stack(averages))
    a.all_used("out_(nft|flow_grpo).*")


def sample(seed: int) -> dict[str, Tensor]:
    shape = (4, 3, 2)
    names = ("clean", "noise", "velocity", "old")
    return {name: noise.keyed_noise(shape, seed, name).double() for name in names}


def test_a_perfect_velocity_is_not_divided_by_zero() -> None:
    clean, source = (noise.keyed_noise((4, 3, 2), 4, name).double() for name in ("clean", "noise"))
    velocity, noisy = (source - clean).requires_grad_(), 0.5 * clean + 0.5 * source
    loss = matching.diffusion_nft_loss(velocity, velocity.detach(), noisy, clean, 0.5, torch.ones(4), beta=1.0)
    loss.sum().backward()
    assert loss.abs().max() < 1e-9 and velocity.grad is not None and velocity.grad.isfinite().all()


# -- Adv-GRPO: golden trainers_adv_disc and trainers_adv_pickscore_criterion, and properties
def test_golden_discriminator(golden) -> None:
    """One head (linear, GELU, linear) on the class token, which comes first, and on drawn patches."""
    a = Arrays(golden("trainers_adv_disc"))
    hidden, width = a.given("in_head_0_weight").shape
    head = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
    head.load_state_dict({name: a.given(f"in_head_{name.replace('.', '_')}") for name in head.state_dict()})
    share = a.number("in_patch_weight")

    def logits(features: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        every: Tensor = head(features)[..., 0]
        return every[:, 0], every[:, 1:].gather(1, patches)

    fake = a.given("in_feat_fake")
    with torch.no_grad():  # the released reward sees features of unit length, its discriminator raw ones
        cls, patch = logits(fake / (fake.norm(dim=-1, keepdim=True) + 1e-6), a.given("in_idx_reward"))
        a.near("out_reward_cls", cls)
        a.near("out_reward_patch", patch)
        a.near("out_reward", adversarial_reward(cls, patch, patch_weight=share))
        a.near("out_reward_multi_top20_sigmoid", torch.sigmoid(top_patches(head(fake)[:, 1:, 0]) / 0.2))
    sides = [logits(a.given(f"in_feat_{side}"), a.given(f"in_idx_{side}")) for side in ("real", "fake")]
    out = preferences.adversary_loss(*sides, patch_weight=share)
    optimizer = torch.optim.Adam(head.parameters(), lr=a.number("in_lr"), betas=tuple(a.given("in_betas").tolist()))
    out.loss.backward()
    a.near("out_d_loss", out.loss.detach())
    a.near("out_d_accuracy", torch.tensor(out.accuracy))
    optimizer.step()
    for name, parameter in head.named_parameters():
        a.near(f"out_grad_{name.replace('.', '_')}", parameter.grad)
        a.near(f"out_updated_{name.replace('.', '_')}", parameter.detach())
    a.all_used("out_.*")


def test_golden_preference_criterion(golden) -> None:
    a = Arrays(golden("trainers_adv_pickscore_criterion"))
    scale, text = a.given("in_logit_scale"), a.given("in_text")
    sides = ("reference", "generated")
    images = [a.given(f"in_img_{side}").requires_grad_() for side in sides]
    loss = preferences.preference_loss(*(scale * (text * image).sum(-1) for image in images)).mean()
    a.near("out_loss_ref_preferred", loss)
    for side, gradient in zip(sides, torch.autograd.grad(loss, images), strict=True):
        a.near(f"out_grad_{side}_ref_preferred", gradient)
    a.all_used("out_.*", but=".*_tie")


def test_real_and_fake_images_need_not_be_equally_many_and_only_the_best_patches_count() -> None:
    """The released code cuts the longer list of images."""
    sides = torch.tensor([0.5, 3.0]), torch.tensor([-0.5, 1.0, -9.0])
    assert preferences.discriminator_loss(*sides).item() == pytest.approx((0.5 / 2 + 2.5 / 3) / 2)
    entropy = (math.log1p(math.exp(-0.5)) + math.log1p(math.exp(-3))) / 2
    entropy += (math.log1p(math.exp(-0.5)) + math.log1p(math.exp(1)) + math.log1p(math.exp(-9))) / 3
    assert preferences.discriminator_loss(*sides, kind="bce").item() == pytest.approx(entropy / 2)
    logits = torch.tensor([[3.0, -50.0, 1.0, -50.0, -50.0, -50.0, -50.0, -50.0, -50.0, -50.0]])
    assert top_patches(logits).item() == 2.0  # a fifth of ten
    assert top_patches(logits[:, 1:4]).item() == 1.0  # at least one


def test_the_reward_model_lags_where_it_rates_samples_above_references() -> None:
    high, low = torch.tensor([2.0, float("nan")]), torch.tensor([1.0, 1.5, float("nan")])
    assert preferences.reward_model_lags(low, high) and not preferences.reward_model_lags(high, low)
    assert not preferences.reward_model_lags(low, low)


# -- Diff-Instruct*: golden onestep_diff_instruct_star, and the identity that the loss rests on


def test_golden_linear_generator(golden) -> None:
    a = Arrays(golden("onestep_diff_instruct_star"))
    matrix, bias = a.given("lin_A").requires_grad_(), a.given("lin_b").requires_grad_()
    e, t, weight, huber_c = (*(a.given(f"lin_{name}") for name in ("eps", "t", "wt")), a.number("lin_huber_c"))
    alpha_reward, alpha_cfg, scale = a.given("lin_arew_acfg_guidance").tolist()
    sample = a.given("lin_z") @ matrix.T + bias
    noisy = (1 - t)[:, None] * sample + t[:, None] * e
    score = noisy @ a.given("lin_Wphi").T + a.given("lin_cphi")
    ref_score = noisy @ a.given("lin_Wref").T + a.given("lin_cref")
    unconditional = noisy @ a.given("lin_Wuncond").T
    conditional = train.score_from_noise(e, t)

    def regulariser(reference: Tensor) -> Tensor:
        loss = train.diff_instruct_star_loss(score, reference, conditional, weight=weight, huber_c=huber_c)
        return loss.mean()

    terms = {
        "reg": regulariser(ref_score),
        "reg_cfg_in": regulariser(train.guided_score(unconditional, ref_score, scale)),
        "reward": -alpha_reward * torch.tanh(sample @ a.given("lin_reward_dir")).mean(),
    }
    terms["total_in"] = terms["reg_cfg_in"] + terms["reward"]
    matching = train.score_matching_loss(score.detach(), conditional, weight=weight).mean()
    a.check("lin_ta_dsm_loss", matching)
    for name, loss in terms.items():
        a.check(f"lin_{name}_loss", loss)
        for part, gradient in zip("Ab", torch.autograd.grad(loss, (matrix, bias), retain_graph=True), strict=True):
            a.check(f"lin_{name}_grad{part}", gradient)
    a.all_used("lin_.*(_loss|_grad[Ab])", but="lin_(cfg|total)_out.*")


@given(st.integers(0, 99), st.floats(0.05, 0.95))
def test_scores_of_velocity_and_noise_are_one(seed: int, sigma: float) -> None:
    clean, e = (noise.keyed_noise((3, 2, 4), seed, name).double() for name in ("clean", "noise"))
    noisy = (1 - sigma) * clean + sigma * e
    levels = torch.tensor([sigma, 0.5, sigma], dtype=torch.float64)
    of_velocity = train.score_from_velocity(noisy, e - clean, sigma)
    assert torch.allclose(of_velocity, train.score_from_noise(e, sigma), rtol=1e-9, atol=1e-9)
    assert torch.allclose(of_velocity, -(noisy - (1 - sigma) * clean) / sigma**2, rtol=1e-6, atol=1e-9)
    each = train.score_from_noise(e, levels)
    assert torch.allclose(each[1], -2 * e[1]) and torch.allclose(each[0], of_velocity[0])
    assert train.huber_constant(10_000) == pytest.approx(0.054)
    apart = train.score_divergence(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, -4.0]]), weight=2.0, huber_c=12.0)
    assert apart.tolist() == [2 * (13 - 12)]
    a, s = 1 - sigma, (1 - (1 - sigma) ** 2) ** 0.5  # of a diffusion: its noise, its v or the sample as predicted
    predicted = {"epsilon": e, "v_prediction": a * e - s * clean, "sample": clean}
    for kind, output in predicted.items():
        result = train.score_from_prediction(a * clean + s * e, output, a * a, kind)
        torch.testing.assert_close(result, -e / s, rtol=1e-8, atol=1e-8)


# -- Losses of direct reward back-propagation
def test_a_reward_is_raised_up_to_its_margin() -> None:
    rewards = torch.tensor([-1.0, 1.0, 3.0], requires_grad=True)
    direct_reward.reward_loss(rewards).sum().backward()
    assert rewards.grad is not None and rewards.grad.tolist() == [-1.0, -1.0, -1.0]
    rewards.grad = None
    loss = direct_reward.reward_loss(rewards, margin=2.0)
    loss.sum().backward()
    assert loss.tolist() == [3.0, 1.0, 0.0] and rewards.grad.tolist() == [-1.0, -1.0, 0.0]
