"""Supervised training on demonstrations: flow matching (arXiv 2210.02747), or noise prediction (2006.11239)."""

from __future__ import annotations

import torch
from accelerate.utils import gather_object

from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.vla.methods.imitation import imitation_loss
from genrl.vla.methods.sft.settings import SFT
from genrl.vla.policies.policy import ACTION, PredictsNoise
from genrl.vla.session import Session


def train(session: Session, settings: SFT) -> None:
    """Optimiser steps on minibatches of frames, each a function of (seed, step) and shared out to the processes."""
    loop, policy, frames = session.loop, session.policy, session.frames
    process, processes = loop.accelerator.process_index, loop.accelerator.num_processes
    alpha_bars = ddpm.cosine_alpha_bars(policy.train_steps if isinstance(policy, PredictsNoise) else 1)
    for _ in loop.iterations():
        loop.phase("training", settings.steps_per_iteration * settings.batch_size)
        losses, norms = [], []
        with loop.timed("train"):
            for _ in range(settings.steps_per_iteration):
                rng = generator(session.config.seed, "imitation", loop.optimizer_steps)
                index = torch.randint(len(frames[ACTION]), (settings.batch_size,), generator=rng)
                mine = slice(process, None, processes)
                loss = imitation_loss(policy, frames, index, rng, alpha_bars, mine)
                loop.backward(loss, evidence={"index": index}, info={"step": loop.optimizer_steps})
                losses.append(float(loss.detach()))
                norms.append(loop.step(["policy"])["policy"])
                loop.advance(settings.batch_size)
        total = sum(sum(own) for own in gather_object([losses]))
        found = {"loss": total / len(losses), "grad_norm/policy": sum(norms) / len(norms)}
        loop.finish(found | {"lr": loop.optimizer.param_groups[0]["lr"]})
