"""A reward that is trained beside the model: which one it is, the references of the samples, and what they score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import genrl_rewards
from genrl.data.preferences import as_tensor
from genrl.data.references import References
from genrl.diffusion.rollout.rollout import Rollouts, to_bytes
from genrl.diffusion.rollout.scoring import Scorers, plain, score
from genrl.mdp.noise import generator
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.weights import state
from genrl_rewards.calls import inner
from genrl_rewards.scorers.preference.adversary import Trainable, check_trainable

if TYPE_CHECKING:
    from genrl.diffusion.run import DiffusionRun

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
    found = [label for label, reward in plain_rewards.items() if genrl_rewards.is_trainable(reward)]
    if len(found) != 1:
        which = f"found {', '.join(found)}; keep one" if found else "found none; add {name: dino_adversary, ...}"
        raise ValueError(f"rewards: one reward is trained beside the model (docs/adv_grpo.md), {which}")
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


def paired(run: DiffusionRun, references: References, rollouts: Rollouts) -> list[Pairs]:
    """This process's samples and a reference for each, in the samples' size; a function of seed, iteration and slot.

    The samples of a group get the references of its prompt in turn, in an order drawn anew.
    """
    config, found = run.config, []
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
        found.append(Pairs(micro_batch.slots, prompts, torch.stack(real), micro_batch.images))
    return found


def scored_references(run: DiffusionRun, label: str, pairs: list[Pairs], rollouts: Rollouts) -> Tensor:
    """The reward's scores of the references, in the way in which it scores samples: float64 [N]. A collective."""
    rows = [row for row in run.iteration_prompts for _ in range(run.config.sampling.group_size)]
    pieces = [(one.slots, one.real.float() / 255) for one in pairs]
    scorers = plain({label: run.scorers.rewards[label]})
    return score(scorers, pieces, rows, rollouts.group.tolist(), run.loop.alive).values[label]
