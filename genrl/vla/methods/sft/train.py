"""Supervised training on demonstrations: flow matching (arXiv 2210.02747), noise prediction (2006.11239), or the
policy's own loss."""

from __future__ import annotations

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.runtime.recorded import Recorded
from genrl.vla.methods.imitation import imitation_loss, recorded_frames
from genrl.vla.methods.sft.settings import SFT
from genrl.vla.policies.policy import ACTION, PredictsNoise
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun


def loss(settings: SFT, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """The part [] that these frames have in the mean loss of a batch."""
    return {"loss": imitation_loss(acting.policy, given)}


def train(run: VLARun, settings: SFT) -> None:
    """Optimiser steps on minibatches of frames, each a function of (seed, step) and shared out to the processes."""
    loop, policy, frames = run.loop, run.policy, run.frames
    process, processes = loop.process.accelerator.process_index, loop.process.accelerator.num_processes
    acting = Acting(policy, None)
    alpha_bars = ddpm.cosine_alpha_bars(policy.train_steps if isinstance(policy, PredictsNoise) else 1)
    for _ in loop.iterations():
        loop.phase("training", settings.steps_per_iteration * settings.batch_size)
        losses, norms = [], []
        with loop.timed("train"):
            for _ in range(settings.steps_per_iteration):
                rng = generator(run.config.seed, "imitation", loop.optimizer_steps)
                index = torch.randint(len(frames[ACTION]), (settings.batch_size,), generator=rng)
                mine = slice(process, None, processes)
                recorded = recorded_frames(policy, frames, index, rng, alpha_bars, mine)
                results = loss(settings, acting, recorded)
                loop.backward(settings, results, recorded)
                losses.append(float(results["loss"].detach()))
                norms.append(loop.step(["policy"])["policy"])
                loop.advance(settings.batch_size)
        total = sum(sum(own) for own in gather_object([losses]))
        found = {"loss": total / len(losses), "grad_norm/policy": sum(norms) / len(norms)}
        loop.finish(found | {"lr": loop.lr})
