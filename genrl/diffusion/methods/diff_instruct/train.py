"""Diff-Instruct*: a one-step generator from a multi-step teacher, by score-based divergence (arXiv 2410.20898).

The generator is the pipeline itself at one step of its schedule; the teacher, s_ref, is the model before training
(with LoRA: without adapters) at all noise levels. One iteration, with x_t = a x_0 + s eps, t uniform in the middle 96 %
and eps drawn anew in (2) and (3):

1. collect   x_0 = g_theta(z, c), and its scores, for the log
2. follow    the assistant s_phi, a second network which begins as the teacher, learns the scores of the generator's
             samples by denoising score matching: s^2 |s_phi(x_t) + eps / s|^2
3. update    minimise  -alpha r(x_0, c) + L_reg,  with y = s_phi(x_t) - s_ref(x_t), of which the parameters are frozen,
             L_reg = -s^2 d'(y)^T (s_phi(x_t) + eps / s),  d'(y) = y / sqrt(|y|^2 + c^2)
             whose gradient is that of the divergence s^2 d(y), d pseudo-Huber (score projection, 2410.16794);
             divergence: kl takes s^2 sg(y)^T x_t instead (Diff-Instruct, 2305.18455)

alpha are the rewards' weights; without any this is distillation. Guidance g of the teacher: in s_ref itself ("inner":
s_0 + g (s_c - s_0)), or as a reward of its own ("outer": -g s^2 sg(s_c - s_0)^T x_t). docs/diff_instruct.md has
metrics and figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from genrl.diffusion.methods.diff_instruct.settings import DiffInstruct
from genrl.diffusion.methods.direct import chain_loss, check, recorded_chain, reward_gradient
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.noising import guides_by_negative, own_noise, solved
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.scores import Noised, noised_at, score_of
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.gaussian import per_sample
from genrl.mdp.noise import generator
from genrl.objectives.forward.diff_instruct import (
    diff_instruct_loss,
    diff_instruct_star_loss,
    guided_score,
    huber_constant,
    outer_guidance_loss,
    score_divergence,
    score_from_noise,
    score_matching_loss,
)
from genrl.objectives.forward.direct_reward import reward_loss
from genrl.runtime.optimizers import make_optimizer
from genrl.runtime.recorded import Recorded
from genrl.runtime.weights import Weights

ASSISTANT, OPTIMIZER = "assistant", "assistant_optimizer"
LOW, HIGH = 0.02, 0.98  # of the noise levels (flow) or of the training timesteps, as DMD2 has them (2405.14867)
LARGEST_SIGNAL = 0.9  # alpha_bar where the generator reads its noise; .43 at timestep 399 of Stable Diffusion

__all__ = ["check", "loss", "train"]


def train(run: DiffusionRun, settings: DiffInstruct) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    weights = run.weights
    check_generator(run)
    if ASSISTANT not in weights.snapshots:  # a resumed run has it
        begin_assistant(weights)
    optimizer = make_optimizer([{"params": weights.parameters}], run.config.optimizer, lr=settings.assistant_lr)
    run.loop.keep(OPTIMIZER, optimizer)

    for _ in run.iterations():
        rollouts = run.collect(solved)
        meter = Meter()
        meter.add("diff_instruct/spread", spread(rollouts))
        run.start_training(len(rollouts.mine))
        for k in range(settings.assistant_steps):
            follow(run, rollouts, optimizer, k, meter)
        update(run, settings, rollouts, meter)
        del rollouts
        run.finish(meter.result())


def check_generator(run: DiffusionRun) -> None:
    """Raise ValueError where the one step would return its noise, or is guided."""
    policy, probe = run.policy, run.probe
    if guides_by_negative(policy, probe):
        raise ValueError(
            "sampling.pipeline_args: the generator itself has no guidance, and this pipeline guides by a negative "
            "prompt; write true_cfg_scale: 1"
        )
    head = policy.head
    if head.parametrisation == "flow":
        return
    with torch.no_grad(), policy.uncounted():
        policy.roll_out(probe)  # puts the step where a run of the pipeline has it
    time = int(head.timesteps[0])
    if (alpha_bar := float(head.alphas_cumprod[time])) > LARGEST_SIGNAL:
        raise ValueError(
            f"model.scheduler: the one step is at timestep {time}, where alpha_bar is {alpha_bar:.3f} and the network "
            "hardly changes what it reads; write {timestep_spacing: trailing} for the last timestep, or "
            "{timestep_spacing: leading, steps_offset: 399}"
        )


def begin_assistant(weights: Weights) -> None:
    """The assistant begins as the teacher: of an adapter that training goes on with (`model.lora.from`) the second
    factor is left out, which is 0 in a new one."""
    weights.snapshot(ASSISTANT)
    for name, value in weights.snapshots[ASSISTANT].items():
        if ".lora_B." in name:
            value.zero_()


def spread(rollouts: Rollouts) -> Tensor:
    """Standard deviation of a number of x_0 over the samples of a prompt, its mean over numbers: for each prompt of
    which this process has two samples or more."""
    samples: dict[int, list[Tensor]] = defaultdict(list)
    for micro_batch in rollouts.mine.values():
        for slot, final in zip(micro_batch.slots, micro_batch.final, strict=True):
            samples[int(rollouts.group[slot])].append(final.float())
    return torch.tensor([float(torch.stack(same).std(dim=0).mean()) for same in samples.values() if len(same) > 1])


def follow(run: DiffusionRun, rollouts: Rollouts, optimizer: torch.optim.Optimizer, k: int, meter: Meter) -> None:
    """Step 2: one step of the assistant on the generator's samples."""
    with run.weights.use(ASSISTANT):
        for given, micro_batch in noised(run.policy, rollouts, "assistant", k):
            score = score_of(run.policy, micro_batch.batch, given)
            loss = score_matching_loss(score, score_from_noise(given.noise, given.sigma), weight=given.sigma**2)
            (loss.sum() / rollouts.num_samples).backward()
            meter.add("assistant/error", loss / given.noisy[0].numel())
            run.loop.alive()
        meter.add("assistant/grad_norm", torch.tensor([run.loop.step_other(optimizer)]))


def update(run: DiffusionRun, settings: DiffInstruct, rollouts: Rollouts, meter: Meter) -> None:
    """Step 3: one step of the generator."""
    for given, micro_batch in noised(run.policy, rollouts, "generator", 0):
        batch, z = micro_batch.batch, micro_batch.pieces[0].trajectory.initial
        gradient, divergence = divergence_gradient(run, settings, batch, given)
        rewarded = reward_gradient(run, rollouts, micro_batch, reward_loss)
        recorded = recorded_chain(batch, z, range(1), gradient + rewarded.gradient.to(gradient))
        run.backward(settings, loss(settings, run.policy, recorded), recorded, divisor=rollouts.num_samples)
        meter.add("diff_instruct/divergence", divergence)
        meter.add("diff_instruct/pull", gradient.flatten(1).norm(dim=1))
        meter.add("diff_instruct/reward_pull", rewarded.gradient.flatten(1).norm(dim=1))
    meter.add("grad_norm", torch.tensor([run.step()]))


def loss(settings: DiffInstruct, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """The generator's step again, with gradients: g . x_0, [B]."""
    return chain_loss(policy, given)


def divergence_gradient(
    run: DiffusionRun, settings: DiffInstruct, batch: Batch, given: Noised
) -> tuple[Tensor, Tensor]:
    """d L_reg / d x_0, [B, ...], and the divergence itself, [B].

    Each network is differentiated by its own weights: the gradients at the two scores first, then each one's way back
    to x_t while its weights are in place.
    """
    policy, weights = run.policy, run.weights
    through = settings.divergence == "score"  # the Kullback-Leibler form takes the scores as constants
    leaf = given.noisy.detach().requires_grad_()
    at = given._replace(noisy=leaf)
    with torch.set_grad_enabled(through):
        with weights.use(ASSISTANT):
            score = score_of(policy, batch, at)
        with weights.reference():
            conditioned, blank = teacher_scores(policy, settings, batch, at)
    scale = settings.guidance_scale if settings.guidance == "inner" else 1.0
    reference = guided_score(blank, conditioned, scale)
    weight, huber_c = given.sigma**2, huber_constant(leaf[0].numel())
    ours, theirs = score.detach().requires_grad_(), reference.detach().requires_grad_()
    divergence = score_divergence(ours, theirs, weight=weight, huber_c=huber_c).detach()
    if through:
        conditional = score_from_noise(given.noise, given.sigma)
        loss = diff_instruct_star_loss(ours, theirs, conditional, weight=weight, huber_c=huber_c)
    else:
        loss = diff_instruct_loss(leaf, ours, theirs, weight=weight)
    if settings.guidance == "outer":
        loss = loss + settings.guidance_scale * outer_guidance_loss(leaf, blank, conditioned, weight=weight)
    gradient, *on_scores = torch.autograd.grad(loss.sum(), (leaf, ours, theirs), materialize_grads=True)
    if through:
        for network, output, on_output in zip(
            (weights.use(ASSISTANT), weights.reference()), (score, reference), on_scores, strict=True
        ):
            with network:
                gradient = gradient + torch.autograd.grad(output, leaf, on_output)[0]
    return per_sample(given.signal, leaf, leaf.dtype) * gradient, divergence


def teacher_scores(policy: Policy, settings: DiffInstruct, batch: Batch, given: Noised) -> tuple[Tensor, Tensor]:
    """s_ref with the prompt, and without where guidance needs it (else the same again).

    Two calls and not the pipeline's own guidance, which takes one noise level for all samples.
    """
    conditioned = score_of(policy, batch, given)
    if settings.guidance == "none":
        return conditioned, conditioned
    negative = batch.sampling.get("negative_prompt") or ""
    return conditioned, score_of(policy, replace(batch, prompts=[negative] * len(batch)), given)


def noised(policy: Policy, rollouts: Rollouts, name: str, k: int) -> Iterator[tuple[Noised, MicroBatch]]:
    """This process's samples, noised by their keys, `name` and `k`, and the micro-batches that they are of."""
    for micro_batch in rollouts.mine.values():
        noise, keys = own_noise(micro_batch, name, k), micro_batch.batch.keys
        uniform = torch.cat([torch.rand(1, generator=generator(*key, "level", name, k)) for key in keys])
        yield noised_at(policy, micro_batch.final, noise, LOW + (HIGH - LOW) * uniform), micro_batch
