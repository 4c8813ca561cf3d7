"""RLFR (arXiv 2510.10201): answer, estimate, charge tokens by the flow, update the policy, fit the flow.

    A[b,t] = A[b] - c sum_{s >= t} u[b,s]           A[b]: the advantage of the preset, a z-score for grpo

u: the velocity error of token s from 0 to 1 within its answer, where it is among the largest
(`unlikely_tokens`; the authors' code). The error is that of a flow over hidden states given the state of the token
before, at t = .8. The flow learns by the mean of the same errors over the tokens of each right answer (rejection
sampling): one step an iteration, after the policy's. Time runs as in the paper, against that of `genrl.mdp`: t = 0 is
noise, t = 1 is data, and the velocity is data - noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from genrl.mdp.noise import derive_seed, generator
from genrl.objectives.token_advantages import token_returns
from genrl.objectives.tokens import masked, per_token, row_mean, token_mean
from genrl.vlm.common import Estimated
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.rlfr.settings import RLFR
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.rollout.data import tell
from genrl.vlm.rollout.rollout import Answers, is_right
from genrl.vlm.run import AnswersRun

WAVES = 16
"""Frequencies by which the network is told a number."""


class Latents(NamedTuple):
    """Hidden states [N, L, H] of N tokens after L layers, and those of the token before each, float32. places [L]: of
    the layers, as shares of the model's depth."""

    states: Tensor
    before: Tensor
    places: Tensor


@torch.no_grad()
def latents(
    policy: Policy, prompts: Sequence[Encoded], tokens: Tensor, mask: Tensor, shares: Sequence[float]
) -> Latents:
    """States at the tokens of answers [B, T], one to each prompt, row by row without those that the mask leaves out."""
    valid = mask.bool().to(policy.device)
    read = torch.where(mask.bool(), tokens.cpu(), policy.pad_id)  # padding, which no answer sees, may be an image's
    output = policy.body(**policy.inputs(prompts, read), use_cache=False, output_hidden_states=True).hidden_states
    layers = layers_of(shares, len(output) - 1)
    read_at = [output[layer + 1][:, -1 - tokens.shape[1] :].float() for layer in layers]
    return Latents(
        torch.stack([states[:, 1:][valid] for states in read_at], 1),
        torch.stack([states[:, :-1][valid] for states in read_at], 1),
        torch.tensor([layer / (len(output) - 1) for layer in layers], device=policy.device),
    )


def layers_of(shares: Sequence[float], number: int) -> list[int]:
    """The layers, 0 to number - 1, at these shares of a model's depth, each once."""
    return sorted({min(round(share * number), number - 1) for share in shares})


class LatentFlow(nn.Module):
    """Velocities of hidden states: a residual network whose blocks are scaled and shifted by the time, the layer and
    the hidden state before. It begins as 0."""

    def __init__(self, width: int, depth: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.enter, self.before = nn.Linear(width, width), nn.Linear(width, width)
            self.numbers = nn.Linear(4 * WAVES, width)
            self.norm = nn.RMSNorm(width, elementwise_affine=False)
            self.modulation = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])
            self.inner = nn.ModuleList(
                [nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(depth)]
            )
            self.leave = nn.Linear(width, width)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, t: Tensor, before: Tensor, places: Tensor) -> Tensor:
        """x and before [N, H], t and places [N] -> [N, H]."""
        frequencies = math.pi * torch.arange(1, WAVES + 1, device=x.device) / 2
        angles = torch.cat([t[:, None] * frequencies, places[:, None] * frequencies], -1)
        hidden = nn.functional.silu(self.before(before) + self.numbers(torch.cat([angles.sin(), angles.cos()], -1)))
        x = self.enter(x)
        for modulation, inner in zip(self.modulation, self.inner, strict=True):
            shift, scale, gate = modulation(hidden).chunk(3, -1)
            x = x + gate * inner(self.norm(x) * (1 + scale) + shift)
        velocity: Tensor = self.leave(self.norm(x))
        return velocity

    def deviation(self, of: Latents, noise: Tensor, times: Sequence[float]) -> Deviation:
        """At fixed times, means over the layers, [N]; noise [N, L, H]."""
        deviations = velocity_deviation(self._given(of), *_rows(of, noise), times)
        return Deviation(*(each.view(of.states.shape[:2]).mean(1) for each in deviations))

    def error(self, of: Latents, noise: Tensor, t: Tensor) -> Tensor:
        """At a time of each token, [N], a mean over the layers; t [N], noise [N, L, H]."""
        at = t.to(of.states.device).repeat_interleave(of.states.shape[1])
        return velocity_error(self._given(of), *_rows(of, noise), at).view(of.states.shape[:2]).mean(1)

    def _given(self, of: Latents) -> Velocity:
        before, places = of.before.flatten(0, 1), of.places.repeat(len(of.before))
        return lambda x, t: self(x, t, before, places)


def _rows(of: Latents, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and noise [N, L, H] -> [N L, H]."""
    return of.states.flatten(0, 1), noise.to(of.states.device).flatten(0, 1)


def noise_of(keys: Sequence[Sequence[int | str]], lengths: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Noise of the tokens of answers, [N, L, H], each answer's by its key: the same however they are shared out."""
    noise = [torch.randn(n, *shape, generator=generator(*key)) for key, n in zip(keys, lengths, strict=True)]
    return torch.cat(noise)


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
        demonstrations = tell(run.policy, rows, own.demonstrations)
        tokens = sum(gather_object([int(demonstrations.mask.sum())]))
        error = 0.0
        if rows:
            states = latents(run.policy, demonstrations.prompts, demonstrations.tokens, demonstrations.mask, own.layers)
            keys = [(seed, "flow", run.stage, step, row.name) for row in rows]
            times = [
                torch.randn(int(n), generator=generator(*key, "t"))
                for key, n in zip(keys, demonstrations.mask.sum(1), strict=True)
            ]
            part = (
                flow.error(states, noise(states, keys, demonstrations.mask), torch.cat(times).sigmoid()).sum() / tokens
            )
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
    """Estimates with advantages per token, charged by the flow as it is, and figures; the gradient of the flow's own
    loss is left in its parameters."""
    config, loop, own = run.config, run.loop, settings.flow
    right = is_right(config, answers.scores[config.reward_labels[0]])
    counts = gather_object([(len(right), int(right.sum()))])
    number, first = sum(n for _, n in counts), sum(n for n, _ in counts[: loop.process.rank])
    names = [f"{answers.rows[k].name}/{n}" for n, k in enumerate(answers.group.tolist(), first)]  # of all processes'
    error, score = torch.zeros(answers.mask.shape), torch.zeros(answers.mask.shape)
    flow.zero_grad(set_to_none=True)
    with loop.timed("estimate"), loop.fitting():
        for rows in [part for update in ready.updates for part in update.parts]:
            mask = answers.mask[rows].bool()
            prompts = [answers.prompts[k] for k in answers.group[rows].tolist()]
            states = latents(run.policy, prompts, answers.tokens[rows], mask, own.layers)
            keys = [(config.seed, "flow", loop.iteration, names[k]) for k in rows.tolist()]
            each = flow.deviation(states, noise(states, keys, mask), own.times)
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
    local = {
        name: (float(token_mean(value, counted)) * int(counted.sum()), int(counted.sum()))
        for name, (value, counted) in named.items()
    }
    every = gather_object([local])
    totals = {name: [sum(part[name][k] for part in every) for k in (0, 1)] for name in named}
    return {name: total / count for name, (total, count) in totals.items() if count}


Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x [N, H], t [N]) -> [N, H]."""


class Deviation(NamedTuple):
    """error [N]: mean over the given times of the mean square that a velocity is off; score [N]: the same with each
    time's error multiplied by t / (1 - t), which estimates how unlikely the data is."""

    error: Tensor
    score: Tensor


def velocity_error(velocity: Velocity, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """`mean_h (v(t x + (1 - t) n, t) - (x - n))^2`, [N], of data x and noise n [N, H] at t [N] in (0, 1)."""
    share = t[:, None]
    predicted = velocity(share * data + (1 - share) * noise, t)
    return (predicted - (data - noise)).square().mean(-1)


def velocity_deviation(velocity: Velocity, data: Tensor, noise: Tensor, times: Sequence[float]) -> Deviation:
    """Deviation of the velocities of data [N, H], with the same noise [N, H] at all times."""
    errors = [velocity_error(velocity, data, noise, torch.full_like(data[:, 0], t)) for t in times]
    weighted = [t / (1 - t) * error for t, error in zip(times, errors, strict=True)]
    return Deviation(torch.stack(errors).mean(0), torch.stack(weighted).mean(0))


def unlikely_tokens(score: Tensor, mask: Tensor, *, threshold: float, most: int | None) -> Tensor:
    """Unlikeliness, from 0 to 1 between the lowest and the highest score of an answer, [B, T] float64; 0 unless above
    the threshold and, where there are more of these than `most`, among that many highest. An answer whose scores are
    all equal has 0."""
    valid, values = mask.bool(), score.detach().double()
    low = torch.where(valid, values, torch.inf).amin(1, keepdim=True)
    high = torch.where(valid, values, -torch.inf).amax(1, keepdim=True)
    spread = high - low
    share = masked((values - low) / torch.where(spread > 0, spread, 1.0), valid)
    share = torch.where(share > threshold, share, 0.0)
    if most is not None and most < share.shape[1]:
        top = share.topk(most, dim=1).indices
        share = torch.zeros_like(share).scatter(1, top, share.gather(1, top))
    return share


def flow_returns(unlikely: Tensor, mask: Tensor, *, coefficient: float) -> Tensor:
    """What is added to the advantages of tokens, float64 [B, T]: `-coefficient sum_{t' >= t} unlikely_t'`."""
    return token_returns(-coefficient * unlikely, mask)
