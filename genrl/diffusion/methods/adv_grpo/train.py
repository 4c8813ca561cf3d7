"""Adv-GRPO: Flow-GRPO under a reward R that is trained beside it, to tell references from samples (arXiv 2511.20256).

One iteration, with the paper's symbols:

1. collect   G samples x of each prompt c from pi_old, as Flow-GRPO                                 (genrl flow_grpo)
2. score     sum_k w_k R_k(x, c), R one term of it beside frozen rewards; R of references y of the same prompts
3. train R   hinge, on h of whole pictures and of their patches p:
                 L = (<max(0, 1 - h(y))> + <max(0, 1 + h(x))>) / 2 + .3 (the same of h(p(y)) and h(p(x)))
             or preference, s = e^tau cos(text, picture):  L = -log e^s(y) / (e^s(y) + e^s(x))
4. train pi  Flow-GRPO's estimate and update on the scores of 2

Which iterations do 3 and which 4: in turns, nine of ten 3 (`alternate`); 3 while <R(y)> < <R(x)>, else 4 (`lag`); or
both (`together`). All processes decide alike, and sum their gradients. docs/adv_grpo.md has metrics and curves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from accelerate.utils import broadcast
from torch import Tensor

import rewards
from genrl.config import Config
from genrl.data.preferences import as_tensor
from genrl.data.prompts import Prompt, PromptError
from genrl.data.references import References
from genrl.data.references import read as read_references
from genrl.diffusion.methods.adv_grpo.settings import AdvGRPO
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.on_policy import check_on_policy
from genrl.diffusion.methods.plans import sampling_plan
from genrl.diffusion.methods.transitions import clipped_loss as loss
from genrl.diffusion.methods.transitions import collect, flow_grpo_update, sampler
from genrl.diffusion.rollout.rollout import Rollouts, to_bytes
from genrl.diffusion.rollout.scoring import Scorers, plain, score
from genrl.diffusion.run import DiffusionRun
from genrl.mdp.noise import generator
from genrl.objectives.advantages.groups import group_advantages
from genrl.objectives.forward.adversarial import (
    DiscriminatorOutput,
    accuracy,
    discriminator_loss,
    patch_discriminator_loss,
    preference_loss,
    reward_model_lags,
)
from genrl.runtime import checkpoint, state
from genrl.runtime.run import Run
from rewards.calls import inner
from rewards.scorers.preference.adversary import Logits, Trainable, check_trainable

__all__ = ["ADVERSARY", "load_trained", "loss", "references_of", "train", "trainable_of"]

ADVERSARY = "adversary"


@dataclass(frozen=True)
class Pairs:
    """Samples of one micro-batch, each with a reference of its prompt."""

    slots: list[int]
    prompts: list[str]
    real: Tensor
    """uint8 [B, 3, H, W], as the samples."""
    fake: Tensor


def train(run: DiffusionRun, settings: AdvGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    label, adversary = trainable_of(run.scorers)
    references = references_of(settings, run.prompts, run.config.prompts.train)
    for parameter in adversary.parameters():  # one reward in all processes, whatever a user's drew its weights from
        parameter.data.copy_(broadcast(parameter.data.clone()))
    optimizer = torch.optim.Adam(adversary.parameters(), lr=settings.adversary.lr, betas=settings.adversary.betas)
    run.loop.keep(ADVERSARY, adversary)
    run.loop.keep("adversary_optimizer", optimizer)
    for iteration in run.iterations():
        # 1, 2. Collect and score.
        plan = sampling_plan(run.config, settings, iteration)
        keeps = settings.keep_graph and settings.trains_model(iteration)  # else no update would go back through them
        drawn = settings.model_copy(update={"keep_graph": keeps})
        rollouts = collect(run, plan, partial(sampler, run, drawn))
        check_on_policy(run, rollouts, clip=min(settings.clip_bounds))
        with run.scorers.placed():
            pairs = paired(run, references, rollouts)
            real, fake = scored_references(run, label, pairs, rollouts), rollouts.scored.values[label]
            trains_model, trains_adversary = turns(settings, iteration, real, fake)
            # 3. Train the reward.
            meter = Meter()
            for step in range(settings.adversary.steps if trains_adversary else 0):
                judge(run, adversary, pairs, rollouts.num_samples, meter if step == 0 else None)
                meter.add("adversary/grad_norm", torch.tensor([run.loop.step_other(optimizer)]))
            if not trains_adversary:
                with torch.no_grad():
                    judge(run, adversary, pairs, rollouts.num_samples, meter)
        metrics = meter.result() | {
            "adversary/reference_mean": float(real.nanmean()),
            "adversary/margin": float(real.nanmean() - fake.nanmean()),
            "adversary/updates": float(settings.adversary.steps if trains_adversary else 0),
        }
        del pairs
        # 4. Train the model.
        if trains_model:
            advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
            metrics |= flow_grpo_update(run, settings, rollouts, plan, advantages)
        del rollouts
        run.finish(metrics)


def turns(settings: AdvGRPO, iteration: int, real: Tensor, fake: Tensor) -> tuple[bool, bool]:
    """Whether this iteration trains the model, and whether it trains the reward. real, fake: scores, the same in all
    processes."""
    model, schedule = settings.trains_model(iteration), settings.adversary.schedule
    if schedule == "lag" and model:
        model = not reward_model_lags(real, fake)
    return model, schedule == "together" or not model


def judge(run: DiffusionRun, adversary: Trainable, pairs: list[Pairs], num_samples: int, meter: Meter | None) -> None:
    """The loss of the reward on all pairs of this process; outside `no_grad` its gradient is added to the parameters'.

    A loss is a mean over its micro-batch: weighted by samples / all samples of all processes they make the whole mean.
    Raises ValueError for logits without a graph to train by.
    """
    for one in pairs:
        real, fake = (adversary.logits(x.float() / 255, one.prompts) for x in (one.real, one.fake))
        found = loss_of(adversary, real, fake, len(one.slots))
        if torch.is_grad_enabled():
            if not found.loss.requires_grad:
                raise ValueError(f"reward {rewards.name_of(adversary)!r}: its logits have no graph to its parameters()")
            (found.loss * len(one.slots) / num_samples).backward()
        if meter is not None:
            weight = torch.tensor([float(len(one.slots))])
            meter.add("adversary/loss", found.loss[None], weight)
            meter.add("adversary/accuracy", torch.tensor([found.accuracy]), weight)
        run.loop.alive()


def loss_of(adversary: Trainable, real: Logits, fake: Logits, count: int) -> DiscriminatorOutput:
    """The reward's own loss of the logits of `count` references and as many samples, and how often it is right.

    Raises ValueError for logits of another shape than [count], or [count] and [count, P].
    """
    sides = [side if isinstance(side, tuple) else (side,) for side in (real, fake)]
    for whole, *patches in sides:
        shapes = [tuple(x.shape) for x in (whole, *patches)]
        if whole.shape != (count,) or any(x.ndim != 2 or len(x) != count for x in patches):
            raise ValueError(
                f"reward {rewards.name_of(adversary)!r}: logits of {count} pictures have the shapes {shapes}; they "
                f"must be [{count}], or a tuple of [{count}] and [{count}, patches]"
            )
    (real_whole, *real_patches), (fake_whole, *fake_patches) = sides
    if adversary.loss == "preference":
        right = (real_whole > fake_whole).double().mean()
        return DiscriminatorOutput(preference_loss(real_whole, fake_whole).mean(), float(right))
    if real_patches:
        return patch_discriminator_loss(
            real_whole,
            fake_whole,
            real_patches[0],
            fake_patches[0],
            patch_weight=adversary.patch_weight,
            kind=adversary.loss,
        )
    loss = discriminator_loss(real_whole, fake_whole, kind=adversary.loss)
    return DiscriminatorOutput(loss, accuracy(real_whole, fake_whole))


def paired(run: DiffusionRun, references: References, rollouts: Rollouts) -> list[Pairs]:
    """This process's samples and a reference for each, in the samples' size; a function of seed, iteration and slot.

    The samples of a group get the references of its prompt in turn, in an order drawn anew.
    """
    config, found = run.config, []
    for micro_batch in rollouts.mine.values():
        real = []
        if micro_batch.images.ndim != 4:
            raise ValueError(f"trainer.algorithm: adv_grpo is for pictures; {config.model.path} makes videos")
        for slot in micro_batch.slots:
            prompt, place = rollouts.prompts[slot], slot % config.sampling.group_size
            source = generator(config.seed, run.iteration, "references", int(rollouts.group[slot]))
            order = torch.randperm(references.count(prompt), generator=source)
            picture = references.picture(prompt, int(order[place % len(order)]))
            real.append(to_bytes(as_tensor(picture, *micro_batch.images.shape[-2:])))
        prompts = [rollouts.prompts[slot] for slot in micro_batch.slots]
        found.append(Pairs(micro_batch.slots, prompts, torch.stack(real), micro_batch.images))
    return found


def scored_references(run: DiffusionRun, label: str, pairs: list[Pairs], rollouts: Rollouts) -> Tensor:
    """The reward's scores of the references, in the way in which it scores samples: float64 [N]. A collective."""
    rows = [row for row in run.iteration_prompts for _ in range(run.config.sampling.group_size)]
    pieces = [(one.slots, one.real.float() / 255) for one in pairs]
    scorers = plain({label: run.scorers.rewards[label]})
    return score(scorers, pieces, rows, rollouts.group.tolist(), run.loop.alive).values[label]


def check(config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
    """Raise ValueError where no reward is trainable, or a prompt has no reference."""
    trainable_of(scorers)
    references_of(cast(AdvGRPO, config.trainer), prompts, config.prompts.train).check(row.text for row in prompts)


def trainable_of(scorers: Scorers) -> tuple[str, Trainable]:
    """Label and object of the one trainable reward. ValueError for none, several, an incomplete or an offloaded one."""
    plain_rewards = {label: inner(reward) for label, reward in scorers.rewards.items()}
    found = [label for label, reward in plain_rewards.items() if rewards.is_trainable(reward)]
    if len(found) != 1:
        which = f"found {', '.join(found)}; keep one" if found else "found none; add {name: dino_adversary, ...}"
        raise ValueError(f"rewards: adv_grpo trains one reward (docs/adv_grpo.md), {which}")
    if found[0] in scorers.offloaded:
        raise ValueError(f"rewards: {found[0]} is trained, so it stays on the device; remove its offload")
    return found[0], check_trainable(plain_rewards[found[0]], found[0])


def load_trained(scorers: Scorers, run: Path) -> None:
    """Put the trainable reward into the state of the run's newest checkpoint. Raises ValueError where there is none."""
    found = checkpoint.latest(Run(run).checkpoints)
    if found is None:
        raise ValueError(f"{run} has no checkpoint, so its trainable reward is not known; name others by --reward")
    loaded = checkpoint.load(found)
    trained = state.unpack(loaded.tensors[f"kept-{ADVERSARY}"], loaded.state["kept"][ADVERSARY])
    trainable_of(scorers)[1].load_state_dict(trained)


def references_of(settings: AdvGRPO, prompts: list[Prompt], source: str) -> References:
    """The reference pictures. Raises PromptError where a prompt of `source` has none."""
    found = read_references(settings.adversary.references)
    problem = found.missing(prompts, source)
    if problem is not None:
        raise PromptError(f"trainer.adversary.references: {problem}")
    return found
