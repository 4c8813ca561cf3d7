"""RLFR (arXiv 2510.10201): answer, estimate, charge tokens by the flow, update the policy, fit the flow.

    A[b,t] = A[b] - c sum_{s >= t} u[b,s]           A[b]: the advantage of the preset, a z-score for grpo

u: the velocity error of token s from 0 to 1 within its answer, where it is among the largest
(`objectives.tokens.flow_rewards`). The error is that of a flow over hidden states given the state of the token before,
at t = .8. The flow learns by the mean of the same errors over the tokens of each right answer (rejection sampling): one
step an iteration, after the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp.noise import derive_seed, generator
from genrl.objectives.tokens.flow_rewards import flow_returns, unlikely_tokens
from genrl.objectives.tokens.tokens import per_token, row_mean, token_mean
from genrl.vlm.common import Estimated
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.rlfr.flow import LatentFlow, Latents, latents, noise_of
from genrl.vlm.methods.rlfr.settings import RLFR
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.rollout.targets import tell
from genrl.vlm.run import AnswersRun

loss = answering.loss


def train(run: AnswersRun, settings: RLFR) -> None:
    """All iterations that are left."""
    flow, optimizer = opened(run, settings)
    for _ in run.loop.iterations():
        answers, row = run.draw()
        ready = run.estimate(answers)
        if ready is not None:
            row |= answering.estimated(run, ready)
            ready, figures = shaped(run, settings, flow, answers, ready)
            row |= figures | answering.learn(run, answers, ready)
            row["grad_norm/flow"] = run.loop.optimization.step_other(optimizer)
        run.finish(row)


def opened(run: AnswersRun, settings: RLFR) -> tuple[LatentFlow, torch.optim.Optimizer]:
    """The flow and its optimiser: those of the checkpoint in a resumed run, else fitted to demonstrations."""
    loop, own = run.loop, settings.flow
    width = run.policy.model.config.get_text_config().hidden_size
    flow = LatentFlow(width, own.depth, derive_seed(run.config.seed, "flow")).to(run.policy.device)
    optimizer = torch.optim.AdamW(flow.parameters(), lr=own.lr)
    if not loop.kept.knows("flow"):
        run.enter()
        pretrain(run, settings, flow, optimizer)
    loop.keep("flow", flow)
    loop.keep("flow_optimizer", optimizer)
    return flow, optimizer


def pretrain(run: AnswersRun, settings: RLFR, flow: LatentFlow, optimizer: torch.optim.Optimizer) -> None:
    """Fit the flow to the demonstrations, at logit-normal times. A run that is stopped here begins it anew."""
    loop, own, accelerator, seed = run.loop, settings.flow, run.loop.process.accelerator, run.config.seed
    if own.demonstrations is None:
        return
    loop.phase("fitting the flow", own.pretraining)
    errors = []
    for step in range(own.pretraining):
        numbers = run.questions.asked(loop.iteration, step * own.batch_size, own.batch_size)
        rows = [run.questions[k] for k in numbers[accelerator.process_index :: accelerator.num_processes]]
        told = tell(run.policy, rows, own.demonstrations)
        tokens = sum(gather_object([int(told.mask.sum())]))
        error = 0.0
        if rows:
            found = latents(run.policy, told.prompts, told.tokens, told.mask, own.layers)
            keys = [(seed, "flow", run.stage, step, row.name) for row in rows]
            times = [
                torch.randn(int(n), generator=generator(*key, "t"))
                for key, n in zip(keys, told.mask.sum(1), strict=True)
            ]
            part = flow.error(found, noise(found, keys, told.mask), torch.cat(times).sigmoid()).sum() / tokens
            part.backward()
            error = float(part.detach())
        loop.optimization.step_other(optimizer)
        loop.optimization.other_updates = 0  # of no iteration: the process can be left here
        loop.advance(1)
        loop.check_stop()
        errors.append(sum(gather_object([error])))
    loop.process.progress.say(
        f"flow: velocity error {errors[0]:.4g} at first, {errors[-1]:.4g} after {len(errors)} steps"
    )


def noise(of: Latents, keys: Sequence[Sequence[int | str]], mask: Tensor) -> Tensor:
    """For hidden states of answers, a key to each."""
    return noise_of(keys, mask.sum(1).tolist(), (of.states.shape[1], of.states.shape[2]))


def shaped(
    run: AnswersRun, settings: RLFR, flow: LatentFlow, answers: Answers, ready: Estimated
) -> tuple[Estimated, dict[str, float]]:
    """The same with advantages per token, charged by the flow as it is, and figures; the gradient of the flow's own
    loss is left in its parameters."""
    config, loop, own = run.config, run.loop, settings.flow
    right = answers.scores[config.reward_labels[0]] >= config.evaluation.right_at - 1e-9  # not where there is no score
    counts = gather_object([(len(right), int(right.sum()))])
    number, first = sum(n for _, n in counts), sum(n for n, _ in counts[: loop.process.rank])
    names = [f"{answers.rows[k].name}/{n}" for n, k in enumerate(answers.group.tolist(), first)]  # of all processes'
    error, score = torch.zeros(answers.mask.shape), torch.zeros(answers.mask.shape)
    flow.zero_grad(set_to_none=True)
    with loop.timed("estimate"), loop.fitting():
        for rows in [part for update in ready.updates for part in update.parts]:
            mask = answers.mask[rows].bool()
            prompts = [answers.prompts[k] for k in answers.group[rows].tolist()]
            found = latents(run.policy, prompts, answers.tokens[rows], mask, own.layers)
            keys = [(config.seed, "flow", loop.iteration, names[k]) for k in rows.tolist()]
            each = flow.deviation(found, noise(found, keys, mask), own.times)
            errors = torch.zeros(mask.shape).masked_scatter(mask, each.error.cpu())
            if right[rows].any():
                (row_mean(errors, mask)[right[rows]].sum() / number).backward()
            error[rows] = errors.detach()
            score[rows] = torch.zeros(mask.shape).masked_scatter(mask, each.score.detach().cpu())
    loop.check_stop()
    unlikely = unlikely_tokens(score, answers.mask, threshold=own.threshold, most=own.most)
    batch = ready.batch
    assert batch.advantage is not None and batch.rewards is not None
    added = flow_returns(unlikely, answers.mask, coefficient=own.coefficient) * ~batch.rewards.isnan()[:, None]
    advantage = per_token(batch.advantage, batch.mask) + added
    return ready._replace(batch=replace(batch, advantage=advantage)), figures(
        answers.mask, right, error, unlikely, added
    )


def figures(mask: Tensor, right: Tensor, error: Tensor, unlikely: Tensor, added: Tensor) -> dict[str, float]:
    """Means over the tokens of all processes."""
    of_right, of_wrong = mask.bool() & right[:, None], mask.bool() & ~right[:, None]
    named = {
        "flow/error_right": (error, of_right),
        "flow/error_wrong": (error, of_wrong),
        "flow/charged": ((unlikely > 0).double(), mask),
        "flow/advantage": (added.abs(), mask),
    }
    mine = {
        name: (float(token_mean(value, kept)) * int(kept.sum()), int(kept.sum()))
        for name, (value, kept) in named.items()
    }
    every = gather_object([mine])
    totals = {name: [sum(one[name][k] for one in every) for k in (0, 1)] for name in named}
    return {name: total / count for name, (total, count) in totals.items() if count}
