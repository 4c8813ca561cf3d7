"""What the trainers that differentiate a reward share: which rewards can be, and the gradient at finished samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import genrl_rewards
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from genrl.diffusion.rollout.scoring import Scorers
from genrl.diffusion.run import DiffusionRun
from genrl.runtime.loop.recorded import Recorded
from genrl_rewards.calls import inner


class RewardGradient(NamedTuple):
    """Of the rewards, at B finished samples."""

    total: Tensor
    """The weighted sum of the rewards that are trained on, float32 [B]."""
    gradient: Tensor
    """d loss / d final state, float32 [B, ...]."""
    loss: Tensor
    """float32 [B]."""


def check(config: Config, scorers: Scorers) -> None:
    """Raise ValueError, naming the key, where a reward that is trained on has no gradients.

    Of what is loaded; what the source of a reward declares is checked with the files (`genrl.diffusion.config.files`).
    """
    fit = [label for label, reward in scorers.rewards.items() if _fits(reward)]
    for index, label in enumerate(config.reward_labels):
        if config.rewards[index].weight == 0 or label in fit:
            continue
        instead = f"train on {fit[0]} alone" if fit else "train on clipscore, pickscore or aesthetic"
        raise ValueError(
            f"rewards.{index}.name: {config.trainer.algorithm} differentiates the reward, and {label} has no gradients "
            "(a reward that has takes `images`, is pointwise and says `differentiable = True`); "
            f"{instead} and give {label} weight 0, or use flow_grpo or diffusion_nft, which need none"
        )


def reward_gradient(
    run: DiffusionRun, rollouts: Rollouts, micro_batch: MicroBatch, loss_of: Callable[[Tensor], Tensor]
) -> RewardGradient:
    """Through decoder and rewards, one picture at a time: the graph of the decoder is what takes memory.

    loss_of: total [1] -> loss [1]. The denoiser takes no part: d loss / d final is handed to it by the chain rule.
    Zeros where all weights of this iteration are 0.
    """
    final = micro_batch.final
    weights = {label: weight for label, weight in rollouts.weights.items() if weight != 0}
    columns = _columns(run, micro_batch.slots)
    result = RewardGradient(torch.zeros(len(final)), torch.zeros_like(final), torch.zeros(len(final)))
    if not weights:
        return result
    # Rewards may wait on the CPU between their turns (`placed`); trainers sample and score under `no_grad`.
    with run.scorers.placed(), torch.enable_grad():
        for row in range(len(final)):
            # The gradient stops here: it is taken to the denoiser's weights in `chain_loss`, in a pass of its own, so
            # that decoder, reward and denoiser never have their graphs in memory together.
            leaf = final[row : row + 1].detach().clone().requires_grad_()
            total = _total(run, weights, micro_batch.batch.take([row]), leaf, columns[row])
            loss = loss_of(total)
            result.gradient[row] = torch.autograd.grad(loss.sum(), leaf)[0][0]
            result.total[row], result.loss[row] = total.detach()[0], loss.detach()[0]
            run.loop.alive()
    return result


def chain(policy: Policy, batch: Batch, state: Tensor, steps: range, *, clean: bool = False) -> Tensor:
    """The state after `steps`, or with `clean` the clean sample predicted at the last of them, with its graph."""
    for i in steps:
        last = clean and i == steps.stop - 1
        if len(steps) == 1:
            return policy.advance(batch, state, i, clean=last)
        # Each step is computed again in the backward pass: memory of one step instead of all of them.
        state = checkpoint(policy.advance, batch, state, i, clean=last, use_reentrant=False)
    return state


def recorded_chain(batch: Batch, state: Tensor, steps: range, gradient: Tensor) -> Recorded:
    """The trained steps of a chain from `state`, and the loss's gradient at their end."""
    first, last = torch.tensor(steps.start), torch.tensor(steps.stop)
    return Recorded(batch, {"state": state, "first": first, "last": last, "gradient": gradient})


def chain_loss(policy: Policy, given: Recorded, *, clean: bool = False) -> dict[str, Tensor]:
    """`g . x_0`, [B], whose gradient is that of the reward's loss by the chain rule; g: d loss / d x_0."""
    steps = range(int(given["first"]), int(given["last"]))
    final = chain(policy, given.batch, given["state"], steps, clean=clean)
    return {"final": final, "loss": (given["gradient"] * final).flatten(1).sum(dim=1)}


def _total(
    run: DiffusionRun, weights: Mapping[str, float], one: Batch, final: Tensor, columns: Mapping[str, list[Any]]
) -> Tensor:
    """The weighted sum of the rewards of one final state [1, ...], [1], with its graph."""
    images = run.policy.decode(one, final, grad=True)
    total = torch.zeros(1, device=images.device)
    for label, weight in weights.items():
        reward = inner(run.scorers.rewards[label])
        scores = genrl_rewards.score_with_gradients(
            reward, images=images, prompts=one.prompts, columns=columns, name=label
        )
        total = total + weight * scores.to(total)
    return total


def _fits(reward: genrl_rewards.Reward) -> bool:
    needed = genrl_rewards.needs(inner(reward))
    return needed.gradients and needed.images and needed.kind == "pointwise"


def _columns(run: DiffusionRun, slots: list[int]) -> list[Mapping[str, list[Any]]]:
    """The columns of each slot's prompt, as lists of one row."""
    rows, size = run.iteration_prompts, run.config.sampling.group_size
    return [{name: [value] for name, value in rows[slot // size].columns.items()} for slot in slots]


def reward_loss(rewards: Tensor, *, margin: float | None = None) -> Tensor:
    """`-r`, [B]: DRaFT (arXiv 2309.17400) and AlignProp. With a margin `max(0, margin - r)`: ReFL's map of rewards to
    losses (arXiv 2304.05977, alg. 1; margin 2), which leaves samples above it alone.

    Raises ValueError where no gradient can come of it: the reward, or the pictures it saw, are detached.
    """
    if not rewards.requires_grad:
        raise ValueError(
            "direct reward back-propagation needs the gradient of the reward with respect to the pictures, but these "
            "rewards carry none: use a differentiable reward, outside torch.no_grad()"
        )
    return -rewards if margin is None else (margin - rewards).relu()
