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

from pathlib import Path
from typing import NamedTuple, cast

import torch
from accelerate.utils import broadcast
from torch import Tensor

import genrl_rewards
from genrl.data.preferences import References, as_tensor, read_references
from genrl.data.prompts import Prompt, PromptError
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.adv_grpo.settings import AdvGRPO
from genrl.diffusion.rollout.rollout import Rollouts, to_bytes
from genrl.diffusion.rollout.scoring import Scorers, plain, score
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import clipped_loss as loss
from genrl.diffusion.steps.transitions import collect, update
from genrl.mdp.noise import generator
from genrl.objectives.groups import group_advantages
from genrl.objectives.preferences import adversary_loss, reward_model_lags
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.updating import Meter
from genrl.runtime.weights import state
from genrl_rewards.calls import inner
from genrl_rewards.scorers.preference.adversary import Trainable, check_trainable, checked_logits

__all__ = ["loss", "train"]


def train(run: DiffusionRun, settings: AdvGRPO) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    label, adversary = trainable_of(run.scorers)
    pictures = read_references(settings.adversary.references)
    for parameter in adversary.parameters():  # one reward in all processes, whatever a user's drew its weights from
        parameter.data.copy_(broadcast(parameter.data.clone()))
    optimizer = torch.optim.Adam(adversary.parameters(), lr=settings.adversary.lr, betas=(0.5, 0.999))
    run.loop.keep(ADVERSARY, adversary)
    run.loop.keep("adversary_optimizer", optimizer)
    for iteration in run.iterations():
        # 1, 2. Collect and score.
        keeps = settings.keep_graph and settings.trains_model(iteration)  # else no update would go back through them
        sampling = settings.model_copy(update={"keep_graph": keeps})
        steps = Steps.of(run.config, sampling, iteration)
        rollouts = collect(run, sampling, steps)
        with run.scorers.placed():
            pairs = paired(run, pictures, rollouts)
            real, fake = scored_references(run, label, pairs, rollouts), rollouts.scored.values[label]
            trains_model, trains_adversary = turns(settings, iteration, real, fake)
            # 3. Train the reward.
            meter, turns_taken = Meter(), settings.adversary.steps if trains_adversary else 0
            # Once in any case, for the log, which is of the reward as it judged: before its own steps.
            for step in range(max(1, turns_taken)):
                with torch.set_grad_enabled(trains_adversary):
                    judge(run, adversary, pairs, rollouts.num_samples, meter if step == 0 else Meter())
                if trains_adversary:
                    meter.add("adversary/grad_norm", torch.tensor([run.loop.optimization.step_other(optimizer)]))
        metrics = meter.result() | {
            "adversary/reference_mean": float(real.nanmean()),
            "adversary/margin": float(real.nanmean() - fake.nanmean()),
            "adversary/updates": float(turns_taken),
        }
        del pairs
        # 4. Train the model.
        if trains_model:
            advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
            learnt = Meter()
            edges = estimate(run, settings, rollouts, steps, advantages, learnt)
            update(run, settings, rollouts, edges, loss, learnt)
            metrics |= learnt.result() | steps.metrics
        del rollouts
        run.finish(metrics)


def turns(settings: AdvGRPO, iteration: int, real: Tensor, fake: Tensor) -> tuple[bool, bool]:
    """Whether this iteration trains the model, and whether it trains the reward. real, fake: scores, the same in all
    processes."""
    model, schedule = settings.trains_model(iteration), settings.adversary.schedule
    if schedule == "lag" and model:
        model = not reward_model_lags(real, fake)
    return model, schedule == "together" or not model


def judge(run: DiffusionRun, adversary: Trainable, pairs: list[Pairs], num_samples: int, meter: Meter) -> None:
    """The loss of the reward on all pairs of this process; outside `no_grad` its gradient is added to the parameters'.

    A loss is a mean over its micro-batch: weighted by samples / all samples of all processes they make the whole mean.
    Raises ValueError for logits without a graph to train by.
    """
    for pair in pairs:
        real, fake = (checked_logits(adversary, x.float() / 255, pair.prompts) for x in (pair.real, pair.fake))
        output = adversary_loss(real, fake, kind=adversary.loss, patch_weight=adversary.patch_weight)
        if torch.is_grad_enabled():
            if not output.loss.requires_grad:
                raise ValueError(
                    f"reward {genrl_rewards.name_of(adversary)!r}: its logits have no graph to its parameters()"
                )
            (output.loss * len(pair.slots) / num_samples).backward()
        weight = torch.tensor([float(len(pair.slots))])
        meter.add("adversary/loss", output.loss[None], weight)
        meter.add("adversary/accuracy", torch.tensor([output.accuracy]), weight)
        run.loop.alive()


def check(config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
    """Raise ValueError where no reward is trainable, or a prompt has no reference or one that cannot be read."""
    label, _ = trainable_of(scorers)
    reward = dict(zip(config.reward_labels, config.rewards, strict=True))[label]
    if reward.cache or reward.weight == 0:
        key, why = ("cache", "its scores change") if reward.cache else ("weight", "the samples are not rewarded by it")
        raise ValueError(f"rewards: {label} is trained beside the model, and {key} is {getattr(reward, key):g}: {why}")
    pictures = read_references(cast(AdvGRPO, config.trainer).adversary.references)
    try:
        pictures.require(prompts, config.prompts.train)
        pictures.check(row.text for row in prompts)
    except PromptError as error:
        raise PromptError(f"trainer.adversary.references: {error}") from error


ADVERSARY = "adversary"
"""Its name among what a run keeps."""


class Pairs(NamedTuple):
    """Samples of one micro-batch (`fake`), each with a reference of its prompt (`real`), both uint8 [B, 3, H, W]."""

    slots: list[int]
    prompts: list[str]
    real: Tensor
    fake: Tensor


def trainable_of(scorers: Scorers) -> tuple[str, Trainable]:
    """Label and object of the one trainable reward. ValueError for none, several, an incomplete or an offloaded one."""
    plain_rewards = {label: inner(reward) for label, reward in scorers.rewards.items()}
    labels = [label for label, reward in plain_rewards.items() if genrl_rewards.is_trainable(reward)]
    if len(labels) != 1:
        which = f"found {', '.join(labels)}; keep one" if labels else "found none; add {name: dino_adversary, ...}"
        raise ValueError(f"rewards: one reward is trained beside the model (docs/adv_grpo.md), {which}")
    if labels[0] in scorers.offloaded:
        raise ValueError(f"rewards: {labels[0]} is trained, so it stays on the device; remove its offload")
    return labels[0], check_trainable(plain_rewards[labels[0]], labels[0])


def load_trained(scorers: Scorers, run: Path) -> None:
    """Put the trainable reward into the state of the run's newest checkpoint. Raises ValueError where there is none."""
    saved = checkpoint.latest(Run(run).checkpoints)
    if saved is None:
        raise ValueError(f"{run} has no checkpoint, so its trainable reward is not known; name others by --reward")
    loaded = checkpoint.load(saved)
    trained = state.unpack(loaded.tensors[f"kept-{ADVERSARY}"], loaded.state["kept"][ADVERSARY])
    trainable_of(scorers)[1].load_state_dict(trained)


def paired(run: DiffusionRun, references: References, rollouts: Rollouts) -> list[Pairs]:
    """This process's samples and a reference for each, in the samples' size; a function of seed, iteration and slot.

    The samples of a group get the references of its prompt in turn, in an order drawn anew.
    """
    config, pairs = run.config, []
    for micro_batch in rollouts.mine.values():
        real, prompts = [], [rollouts.prompts[slot] for slot in micro_batch.slots]
        if micro_batch.images.ndim != 4:
            raise ValueError(
                f"trainer.algorithm: {config.trainer.algorithm} is for pictures; {config.model.path} makes videos"
            )
        for slot, prompt in zip(micro_batch.slots, prompts, strict=True):
            source = generator(config.seed, run.iteration, "references", int(rollouts.group[slot]))
            order = torch.randperm(references.count(prompt), generator=source)
            picture = references.picture(prompt, int(order[slot % config.sampling.group_size % len(order)]))
            real.append(to_bytes(as_tensor(picture, *micro_batch.images.shape[-2:])))
        pairs.append(Pairs(micro_batch.slots, prompts, torch.stack(real), micro_batch.images))
    return pairs


def scored_references(run: DiffusionRun, label: str, pairs: list[Pairs], rollouts: Rollouts) -> Tensor:
    """The reward's scores of the references, in the way in which it scores samples: float64 [N]. A collective."""
    rows = [row for row in run.iteration_prompts for _ in range(run.config.sampling.group_size)]
    pieces = [(pair.slots, pair.real.float() / 255) for pair in pairs]
    scorers = plain({label: run.scorers.rewards[label]})
    return score(scorers, pieces, rows, rollouts.group.tolist(), run.loop.alive).values[label]
