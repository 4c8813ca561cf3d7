"""PromptRL: a language model that rewrites prompts and the flow model that draws them learn jointly (arXiv 2602.01382).

One iteration of groups of n samples, of which m keep their prompt as it is:

1. write     n - m refinements y of each prompt c by the language model pi_phi, which may see the picture to be edited
2. collect   one sample of each refinement, m of c itself, as Flow-GRPO does
3. score     R = R_gen(x_0, c) + w R_fmt(y), by the prompt as it was; a retained sample has its group's mean R_fmt
4. estimate  A = (R - mean) / std over all n of the group
5. update    phi by -(exp(l - sg l) A - beta k3) on the tokens of the n - m, strictly on policy; theta by Flow-GRPO's
             clipped surrogate and KL on the samples of all n

The two have no weights and no gradient in common: what joins them is the group that both are judged in. The retained
samples keep the flow model good at prompts that nobody rewrote. docs/prompt_rl.md has metrics and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from accelerate.utils import gather_object
from PIL.Image import Image
from torch import Tensor

from genrl.data.prompts import Prompt
from genrl.diffusion.methods.prompt_rl.settings import PromptRL
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.rewriter import Rewriter, TextRoom, Written
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.forest import Draw, Samples
from genrl.diffusion.rollout.rollout import batch_inputs, call_arguments
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import check_on_policy, sampler, update
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import importance_ratio, kl_k3
from genrl.runtime.loop.updating import Meter

__all__ = ["loss", "train"]

OFF_POLICY = 0.05
"""Mean |ratio - 1| of tokens above which the texts were not written by the model that is trained."""


def train(run: DiffusionRun, settings: PromptRL) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    config = run.config
    size, retained = config.sampling.group_size, settings.retained
    fits = TextRoom(run.policy.pipe, call_arguments(config.sampling))
    fits.check(run.prompts, config.prompts.train, config.model.path)
    fits.check(run.eval_prompts, config.prompts.eval, config.model.path)
    rewriter = Rewriter(settings.rewriter, seed=config.seed, device=run.accelerator.device)
    if not rewriter.see:  # how long pictures are is known when they are read
        for row in (*run.prompts, *run.eval_prompts):
            rewriter.check_room(row.text, rewriter.asked(row.text))
    run.loop.keep("rewriter", rewriter)
    run.held_out.rewrite = partial(rewritten, run, rewriter, fits)
    for iteration in run.iterations():
        prompts = run.iteration_prompts
        # 1. Write.
        with run.loop.timed("rewrite"):
            mine, answers = write(run, rewriter, prompts, size - retained, fits)
        groups = [[*texts, *[p.text] * retained] for p, (texts, _) in zip(prompts, answers, strict=True)]
        # 2, 3. Collect and score.
        steps = Steps.of(config, settings, iteration)
        rollouts = run.collect(partial(from_texts, texts=sum(groups, []), draw=sampler(run, settings, steps)))
        first = not run.replays
        check_on_policy(run, rollouts, clip=min(settings.clip_bounds))
        generation = rollouts.total.view(-1, size)
        formats = torch.tensor([[float(right) for right in formed] for _, formed in answers], dtype=torch.float64)
        total = joint_rewards(generation, formats)
        rollouts = replace(rollouts, total=total.flatten())
        # 4, 5. Estimate and update; the flow model's advantages are the same function of the same rewards.
        relative = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
        advantages = relative.clamp(-settings.advantage_clip, settings.advantage_clip).view(-1, size)
        meter = Meter()
        edges = estimate(run, settings, rollouts, steps, relative, meter)
        update(run, settings, rollouts, edges, loss, meter)
        metrics = meter.result() | steps.metrics
        metrics |= learn_to_write(run, settings, rewriter, mine, advantages, check=first)
        metrics |= compared(generation, formats, [texts for texts, _ in answers])
        del rollouts
        run.finish(metrics)
    if run.is_main and run.loop.is_complete:
        rewriter.save_pretrained(run.process.run.folder / "rewriter")


def learn_to_write(
    run: DiffusionRun, settings: PromptRL, rewriter: Rewriter, mine: dict[int, Written], advantages: Tensor, check: bool
) -> dict[str, float]:
    """One optimiser step of the language model on the answers of all processes; returns its metrics.

    advantages: of all samples, [P, n], refined ones first. check: raise RuntimeError, in all processes, where the model
    in training is not the one that wrote.
    """
    meter = Meter()
    answers = len(advantages) * (advantages.shape[1] - settings.retained)
    for p, written in mine.items():
        with torch.no_grad(), rewriter.model.disable_adapter():
            reference = rewriter.log_probs(written)
        new = rewriter.log_probs(written)
        count, mask = len(written.texts), written.mask
        advantage = advantages[p, :count].to(new.device)
        loss = rewriter_loss(new, reference, advantage, mask, kl_weight=settings.rewriter.kl_weight)
        (loss.sum() / answers).backward()
        run.loop.alive()
        ratio = (new.detach() - written.log_probs).expm1().abs()[mask]
        meter.add("rewriter/ratio/max_abs_dev", ratio)
        meter.add("rewriter/ratio/mean_abs_dev", ratio)
        meter.add("rewriter/loss", loss)
        meter.add("rewriter/kl", kl_k3(new.detach(), reference)[mask])
        meter.add("rewriter/tokens", mask.sum(1))
    metrics = meter.result()
    if check and not metrics["rewriter/ratio/mean_abs_dev"] <= OFF_POLICY:
        raise RuntimeError(
            "before the first update the ratio of the language model in training to the one that wrote is off 1 by "
            f"{metrics['rewriter/ratio/mean_abs_dev']:.3g} in the mean over tokens: its answers cannot be learnt from. "
            "Usual causes: low precision (trainer.rewriter.dtype: float32), or attention that answers otherwise with a "
            "cache than without"
        )
    return metrics | {"rewriter/grad_norm": run.loop.optimization.step_other(rewriter.optimizer)}


def compared(generation: Tensor, formats: Tensor, refinements: Sequence[Sequence[str]]) -> dict[str, float]:
    """What all processes know alike of the answers: generation [P, n], formats [P, n - m], texts [P][n - m]."""
    count = formats.shape[1]
    metrics = {
        "rewriter/format": float(formats.mean()),
        "rewriter/distinct": sum(len(set(texts)) for texts in refinements) / (len(refinements) * count),
    }
    if count < generation.shape[1]:
        gain = generation[:, :count].nanmean(1) - generation[:, count:].nanmean(1)
        metrics["rewriter/gain"] = float(gain.nanmean())
    return metrics


T = TypeVar("T")


def from_texts(
    policy: Policy, batch: Batch, slots: list[int], *, beat: Callable[[], None], texts: Sequence[str], draw: Draw
) -> Samples:
    """`draw`, with each slot's own text in place of its prompt. Scores are of the prompts all the same."""
    return draw(policy, replace(batch, prompts=[texts[slot] for slot in slots]), slots, beat=beat)


def write(
    run: DiffusionRun, rewriter: Rewriter, prompts: Sequence[Prompt], count: int, fits: TextRoom
) -> tuple[dict[int, Written], list[tuple[list[str], list[bool]]]]:
    """(answers that this process wrote by the index of their prompt, new prompts and formats of all prompts).

    The generator is that of (seed, iteration, prompt): nobody's answers depend on who else writes.
    """
    mine = {}
    for p, prompt in own(run, prompts):
        key = (run.config.seed, "rewrite", run.iteration, p)
        mine[p] = rewriter.write(prompt.text, count, key, fits, pictures(run, prompt))
        run.loop.advance_or_leave(0)
    return mine, of_all({p: (written.texts, written.well_formed) for p, written in mine.items()})


def rewritten(run: DiffusionRun, rewriter: Rewriter, fits: TextRoom, prompts: Sequence[Prompt]) -> list[str]:
    """A new prompt for each of the prompts, the same in all processes."""
    texts = {}
    for row, prompt in own(run, prompts):
        key = (run.config.evaluation.seed, row)
        texts[row] = rewriter.rewrite(prompt.text, key, fits, pictures(run, prompt))
        run.loop.alive()
    return of_all(texts)


def own(run: DiffusionRun, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Prompt]]:
    """The prompts for which this process writes, with their numbers."""
    return islice(enumerate(prompts), run.accelerator.process_index, None, run.accelerator.num_processes)


def of_all(mine: Mapping[int, T]) -> list[T]:
    """What was written for each prompt, by whichever process."""
    joint = dict(gather_object([*mine.items()]))
    return [joint[number] for number in sorted(joint)]


def pictures(run: DiffusionRun, prompt: Prompt) -> list[Image]:
    """What the pipeline is given with a prompt, such as the picture that is to be edited."""
    return [picture for (picture,) in batch_inputs(run.config.sampling.inputs, [prompt]).values()]


def joint_rewards(generation: Tensor, format_refined: Tensor) -> Tensor:
    """`R = R_generation + R_format`, [P, n] from the pictures' [P, n] and the refinements' [P, n - m].

    A retained prompt has no format of its own: it counts as the mean of its group's, so that it is neither helped nor
    harmed by it (without any refinement: 0). Raises ValueError for more refinements than pictures.
    """
    prompts, size = generation.shape
    refined = format_refined.shape[1]
    if format_refined.shape[0] != prompts or refined > size:
        raise ValueError(
            f"{list(generation.shape)} pictures cannot have {list(format_refined.shape)} refinements: both need the "
            "same prompts, and each refinement a picture"
        )
    mean = format_refined.mean(dim=1, keepdim=True) if refined else generation.new_zeros(prompts, 1)
    complete = torch.cat([format_refined, mean.expand(-1, size - refined)], dim=1)
    return generation + complete


def rewriter_loss(
    log_prob: Tensor, ref_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, kl_weight: float = 0.01
) -> Tensor:
    """`-(exp(l - sg l) A - kl_weight k3)` per token, mean over the tokens of each refinement: [B]; take its mean.

    log_prob, ref_log_prob [B, L] of the written tokens, mask [B, L] of those that count, advantage [B] of the whole
    refinement. Strictly on policy: the ratio is 1, its gradient that of l A. Masked tokens may hold anything.
    Gradient through `log_prob` only.
    """
    written = mask.bool()
    new, reference = torch.where(written, log_prob, 0.0), torch.where(written, ref_log_prob, 0.0)
    # Its value is 1, its gradient that of log p: on policy there is nothing else to divide by.
    gain = importance_ratio(new, new) * advantage.detach().to(new.dtype)[:, None]
    loss = torch.where(written, kl_weight * kl_k3(new, reference) - gain, 0.0)
    return loss.sum(dim=1) / written.sum(dim=1).clamp(min=1)
