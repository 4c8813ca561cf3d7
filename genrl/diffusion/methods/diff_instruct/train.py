"""Diff-Instruct*: a one-step generator from a multi-step teacher, by score-based divergence (arXiv 2410.20898).

The generator is the pipeline itself at one step of its schedule; the teacher, s_ref, is the model before training
(with LoRA: without adapters) at all noise levels. One iteration, with x_t = a x_0 + s eps, t uniform in the middle 96 %
and eps drawn anew in (2) and (3):

1. collect   x_0 = g_theta(z, c), and its scores, for the log
2. follow    the assistant s_phi, a second network which begins as the teacher, learns the scores of the generator's
             samples by denoising score matching: s^2 |s_phi(x_t) + eps / s|^2
3. update    minimise  -alpha r(x_0, c) + L_reg,  with y = s_phi(x_t) - s_ref(x_t), of which the parameters are frozen,
             L_reg = -s^2 d'(y)^T (s_phi(x_t) + eps / s),  d'(y) = y / sqrt(|y|^2 + c^2)
             whose gradient is that of the divergence s^2 d(y), d pseudo-Huber (score projection, 2410.16794)

alpha are the rewards' weights; without any this is distillation. Guidance g of the teacher is in s_ref itself:
s_0 + g (s_c - s_0). docs/diff_instruct.md has metrics and figures.

Shapes of the losses: samples, noise and scores [B, ...]; sigma a float, [] or [B] in (0, 1); weights a float or [B];
losses [B], sums over the elements of a sample. The generator's gradient needs the graph through noisy = x_t(x_0): s_phi
and s_ref are evaluated at it with gradients on but their *parameters* frozen, and nothing is detached there (except
where a loss says so).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from genrl.diffusion.forward.direct import chain_loss, recorded_chain, reward_gradient, reward_loss
from genrl.diffusion.forward.noising import own_noise, solved
from genrl.diffusion.methods.diff_instruct.settings import DiffInstruct
from genrl.diffusion.policy.adapters import snapshot_base
from genrl.diffusion.policy.policy import Policy, guides_by_negative, without_prompts
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.kernels import per_sample
from genrl.mdp.noise import generator
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter, descend
from genrl.runtime.weights.optimizers import make_optimizer

ASSISTANT, OPTIMIZER = "assistant", "assistant_optimizer"

__all__ = ["loss", "train"]

Scalar = Tensor | float


def train(run: DiffusionRun, settings: DiffInstruct) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    weights = run.weights
    check_one_step(run.policy, run.probe)
    if ASSISTANT not in weights.snapshots:  # a resumed run has it
        lora = run.config.model.lora
        snapshot_base(weights, ASSISTANT, goes_on=lora is not None and lora.begin is not None)
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


def follow(run: DiffusionRun, rollouts: Rollouts, optimizer: torch.optim.Optimizer, k: int, meter: Meter) -> None:
    """Step 2: one step of the assistant on the generator's samples."""
    with run.weights.use(ASSISTANT):
        for recorded, micro_batch in noised(run.policy, rollouts, "assistant", k):
            score = score_of(run.policy, micro_batch.batch, recorded)
            conditional = score_from_noise(recorded.noise, recorded.sigma)
            loss = score_matching_loss(score, conditional, weight=recorded.sigma**2)
            (loss.sum() / rollouts.num_samples).backward()
            meter.add("assistant/error", loss / recorded.noisy[0].numel())
            run.loop.alive()
        meter.add("assistant/grad_norm", torch.tensor([run.loop.optimization.step_other(optimizer)]))


def update(run: DiffusionRun, settings: DiffInstruct, rollouts: Rollouts, meter: Meter) -> None:
    """Step 3: one step of the generator."""

    def prepare(part: tuple[Noised, MicroBatch]) -> Recorded:
        recorded, micro_batch = part
        batch, z = micro_batch.batch, micro_batch.pieces[0].trajectory.initial
        gradient, divergence = divergence_gradient(run, settings, batch, recorded)
        rewarded = reward_gradient(run, rollouts, micro_batch, reward_loss)
        meter.add("diff_instruct/divergence", divergence)
        meter.add("diff_instruct/pull", gradient.flatten(1).norm(dim=1))
        meter.add("diff_instruct/reward_pull", rewarded.gradient.flatten(1).norm(dim=1))
        return recorded_chain(batch, z, range(1), gradient + rewarded.gradient.to(gradient))

    parts = noised(run.policy, rollouts, "generator", 0)
    norms = descend(run.loop, settings, run.policy, parts, prepare, loss, divisor=rollouts.num_samples)
    meter.note({"grad_norm": norms["policy"]})


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
    noisy = given.noisy.detach().requires_grad_()
    given = given._replace(noisy=noisy)
    with torch.enable_grad():
        with weights.use(ASSISTANT):
            score = score_of(policy, batch, given)
        with weights.reference():
            reference = score_of(policy, batch, given)
            if settings.guidance_scale != 1:  # in calls of its own: the pipeline's guidance takes one level for all
                blank = score_of(policy, without_prompts(batch), given)
                reference = guided_score(blank, reference, settings.guidance_scale)
    ours, theirs = score.detach().requires_grad_(), reference.detach().requires_grad_()
    loss, divergence = regularisation(noisy, given.noise, given.sigma, ours, theirs)
    gradient, on_score, on_reference = torch.autograd.grad(loss.sum(), (noisy, ours, theirs), materialize_grads=True)
    with weights.use(ASSISTANT):
        gradient = gradient + torch.autograd.grad(score, noisy, on_score)[0]
    with weights.reference():
        gradient = gradient + torch.autograd.grad(reference, noisy, on_reference)[0]
    # x_t = a x_0 + s eps: the way back from x_t to the sample is a.
    return per_sample(given.signal, noisy, noisy.dtype) * gradient, divergence


def noised(policy: Policy, rollouts: Rollouts, name: str, k: int) -> Iterator[tuple[Noised, MicroBatch]]:
    """This process's samples, noised by their keys, `name` and `k`, and the micro-batches that they are of."""
    for micro_batch in rollouts.mine.values():
        noise, level = own_noise(micro_batch, name, k), own_levels(micro_batch.batch, name, k)
        yield noised_at(policy, micro_batch.final, noise, level), micro_batch


def spread(rollouts: Rollouts) -> Tensor:
    """Standard deviation of a number of x_0 over the samples of a prompt, its mean over numbers: for each prompt of
    which this process has two samples or more."""
    samples: dict[int, list[Tensor]] = defaultdict(list)
    for micro_batch in rollouts.mine.values():
        for slot, final in zip(micro_batch.slots, micro_batch.final, strict=True):
            samples[int(rollouts.group[slot])].append(final.float())
    return torch.tensor([float(torch.stack(same).std(dim=0).mean()) for same in samples.values() if len(same) > 1])


LARGEST_SIGNAL = 0.9  # alpha_bar where the generator reads its noise; .43 at timestep 399 of Stable Diffusion


def check_one_step(policy: Policy, probe: Batch) -> None:
    """Raise ValueError where the one step would return its noise, or is guided."""
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


LOW, HIGH = 0.02, 0.98  # of the noise levels (flow) or of the training timesteps, as DMD2 has them (2405.14867)
GRID = 100  # steps of the schedule by which a noise level becomes the model's time: one step is too coarse a grid


class Noised(NamedTuple):
    """Samples on the forward process: x_t and eps, [B, ...]; the `time` that the network is told (sigma of a flow, else
    the timestep), a (`signal`) and s (`sigma`), [B]."""

    noisy: Tensor
    noise: Tensor
    time: Tensor
    signal: Tensor
    sigma: Tensor


def own_levels(batch: Batch, *names: int | str) -> Tensor:
    """Levels for `noised_at`, uniform between LOW and HIGH, by each sample's key and `names`, [B]."""
    uniform = torch.cat([torch.rand(1, generator=generator(*key, "level", *names)) for key in batch.keys])
    return LOW + (HIGH - LOW) * uniform


def noised_at(policy: Policy, clean: Tensor, noise: Tensor, level: Tensor) -> Noised:
    """clean, noise [B, ...]; level [B] in [0, 1): sigma of a flow, else the share of the training timesteps."""
    if policy.head.parametrisation == "flow":
        time = sigma = level.to(noise)
        signal = 1.0 - sigma
    else:
        alphas = policy.head.alphas_cumprod
        time = (level * len(alphas)).long()
        alpha_bar = alphas[time.to(alphas.device)].to(noise)
        time, signal, sigma = time.to(noise.device), alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt()
    a, s = (per_sample(value, noise, noise.dtype) for value in (signal, sigma))
    return Noised(a * clean + s * noise, noise, time, signal, sigma)


def score_of(policy: Policy, batch: Batch, given: Noised) -> Tensor:
    """The score of the model under its present weights at x_t, [B, ...]."""
    head = policy.head
    if head.parametrisation == "diffusion":
        output = policy.velocity(batch, given.noisy, given.time)
        return score_from_prediction(given.noisy, output, given.signal**2, head.prediction_type)
    fine = replace(batch, sampling={**batch.sampling, "num_inference_steps": GRID})
    return score_from_velocity(given.noisy, policy.velocity(fine, given.noisy, given.time), given.sigma)


def score_from_velocity(noisy: Tensor, velocity: Tensor, sigma: Scalar) -> Tensor:
    """`s = -(x + (1 - sigma) v) / sigma`, [B, ...]: the score of a flow model, `x + (1 - sigma) v` being the noise."""
    time = _column(sigma, noisy)
    return -(noisy + (1.0 - time) * velocity) / time


def score_from_noise(prediction: Tensor, sigma: Scalar) -> Tensor:
    """`s = -eps / sigma`, [B, ...]: the score of a noise prediction; of the noise itself, the conditional score of x_t
    given x_0.

    sigma is the std of the noise in x_t: sqrt(1 - alpha_bar) for models of that kind.
    """
    return -prediction / _column(sigma, prediction)


def score_from_prediction(noisy: Tensor, prediction: Tensor, alpha_bar: Scalar, prediction_type: str) -> Tensor:
    """The score of a model on `x_t = sqrt(ab) x_0 + sqrt(1 - ab) eps`, [B, ...], by what it predicts.

    `s = -eps / sqrt(1 - ab)` (arXiv 2011.13456, section 3.4), with eps itself (epsilon), `sqrt(ab) v + sqrt(1 - ab) x`
    (v_prediction, arXiv 2202.00512, appendix D) or `(x - sqrt(ab) x_0) / sqrt(1 - ab)` (sample). alpha_bar a float, []
    or [B] in (0, 1). Raises ValueError for another name.
    """
    level = _column(alpha_bar, noisy)
    signal, sigma = level.sqrt(), (1.0 - level).sqrt()
    if prediction_type == "epsilon":
        return -prediction / sigma
    if prediction_type == "v_prediction":
        return -(signal * prediction + sigma * noisy) / sigma
    if prediction_type == "sample":
        return -(noisy - signal * prediction) / sigma**2
    raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {prediction_type!r}")


def guided_score(unconditional: Tensor, conditional: Tensor, guidance_scale: float) -> Tensor:
    """`s_0 + g (s_c - s_0)`: in place of the reference score, it makes guidance an implicit reward.

    [B, ...]; classifier-free guidance (arXiv 2207.12598, eq. 6).
    """
    return unconditional + guidance_scale * (conditional - unconditional)


def huber_constant(elements: int) -> float:
    """`.00054 sqrt(D)`: c of the pseudo-Huber distance for samples of D elements (arXiv 2310.14189, section 3.3)."""
    return 0.00054 * math.sqrt(elements)


def score_divergence(score: Tensor, ref_score: Tensor, *, weight: Scalar, huber_c: float) -> Tensor:
    """`w (sqrt(|s_phi - s_ref|^2 + c^2) - c)`: the divergence itself, [B], to be logged; the loss below is not it."""
    norm = (score - ref_score).flatten(1).square().sum(dim=1)
    return _row(weight, norm) * ((norm + huber_c**2).sqrt() - huber_c)


def diff_instruct_star_loss(
    score: Tensor, ref_score: Tensor, conditional_score: Tensor, *, weight: Scalar, huber_c: float
) -> Tensor:
    """`-w d'(y)^T (s_phi - grad log q(x_t | x_0))`, [B], y = s_phi - s_ref, d'(y) = y / sqrt(|y|^2 + c^2).

    Its gradient in the generator's parameters is that of the divergence (score-projection identity, arXiv 2410.16794);
    its value is not: it is 0 on average where s_phi is exact. All three scores must carry their graph through x_t.
    conditional_score: `score_from_noise(noise, sigma)`. weight sigma^2 keeps the loss of order 1 at all levels.
    """
    difference = (score - ref_score).flatten(1)
    # c keeps the direction finite where the two scores agree, as they do at the start.
    direction = difference / (difference.square().sum(dim=1, keepdim=True) + huber_c**2).sqrt()
    residual = (score - conditional_score).flatten(1)
    product = (direction * residual).sum(dim=1)
    return -_row(weight, product) * product


def regularisation(
    noisy: Tensor, noise: Tensor, sigma: Tensor, score: Tensor, ref_score: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss of the generator, score divergence without gradient), [B], with weight sigma^2, and c set by the size of
    a sample.

    noisy, noise [B, ...], sigma [B]: x_t, and the noise in it. Gradients go through the scores.
    """
    weight, huber_c = sigma**2, huber_constant(noisy[0].numel())
    divergence = score_divergence(score, ref_score, weight=weight, huber_c=huber_c).detach()
    conditional = score_from_noise(noise, sigma)
    return diff_instruct_star_loss(score, ref_score, conditional, weight=weight, huber_c=huber_c), divergence


def score_matching_loss(score: Tensor, conditional_score: Tensor, *, weight: Scalar) -> Tensor:
    """`w |s_phi - grad log q(x_t | x_0)|^2`, [B]: denoising score matching (arXiv 2011.13456, eq. 7), by which s_phi
    follows the generator.

    x_t is data here (no gradient to the generator). With weight sigma^2 it is the usual squared error of the noise.
    """
    squares = (score - conditional_score.detach()).flatten(1).square().sum(dim=1)
    return _row(weight, squares) * squares


def _column(value: Scalar, like: Tensor) -> Tensor:
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tensor.reshape(-1, *[1] * (like.dim() - 1))


def _row(value: Scalar, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)
