"""Embedded policies with random weights, for MiniTable, and its demonstrations."""

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from genrl.playground.minitable import INSTRUCTIONS, PUT, Demonstrations, demonstrate, task
from genrl.playground.minitable.demonstrations import minitable_episodes, minitable_rest
from genrl.vla.data.frames import episode_frames, frame_statistics
from genrl.vla.policies.embedded import DiffusionMLP, DiffusionMLPConfig, TinyFlowConfig, TinyFlowVLA
from genrl.vla.policies.policy import ENVIRONMENT, IMAGE, POINTS, STATE, TOKENS, Batch, Inputs, tokenise, vocabulary

WORDS = vocabulary(INSTRUCTIONS)
SEES = Inputs(state=3, vocabulary=WORDS, image=32)
FACTS = Inputs(state=3, vocabulary=WORDS, environment=6)
FEELS = Inputs(state=3, vocabulary=WORDS, points=14)


def minitable_frames(shown: Demonstrations, *, horizon: int = 4, image_size: int, points: int = 0) -> Batch:
    """Every step of the demonstrations as an observation and the expert's chunk from there."""
    inputs = (STATE, ENVIRONMENT, TOKENS, *((IMAGE,) if image_size else ()), *((POINTS,) if points else ()))
    episodes = minitable_episodes(shown, image_size=image_size, points=points)
    tokenised = partial(tokenise, words=WORDS)
    return episode_frames(episodes, tokenised, inputs=inputs, horizon=horizon, rest=minitable_rest)


@lru_cache(maxsize=4)
def frames(count: int = 8, image: int = 32, horizon: int = 4, points: int = 0) -> Batch:
    keys = task.episode_keys(0, np.arange(count), np.zeros(count))
    return minitable_frames(demonstrate(keys, PUT), horizon=horizon, image_size=image, points=points)


def flow(inputs: Inputs = FACTS, *, critic: int = 0, noise_head: Any = "none", seed: int = 0, stir: bool = True) -> Any:
    """stir: the last layers, zero at the start, get numbers, so that everything has an effect."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = TinyFlowConfig(inputs, 3, 4, critic=critic, noise_head=noise_head)
        policy = TinyFlowVLA(config, frame_statistics(frames(points=inputs.points)))
        if stir:
            nn.init.normal_(policy.out.weight, std=0.1)
            if critic:
                nn.init.normal_(policy.value_head[-1].weight, std=0.1)
        return policy


def diffusion(inputs: Inputs = FACTS, *, critic: int = 0, train_steps: int = 20, seed: int = 0) -> DiffusionMLP:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = DiffusionMLPConfig(inputs, 3, 4, critic=critic, train_steps=train_steps)
        return DiffusionMLP(config, frame_statistics(frames(points=inputs.points)))


class Leads:
    """A policy that knows its chunk, whatever the noise: its velocity leads there in one step."""

    critic = 1

    def velocity(self, context: Batch, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return (x - context["chunk"]) / sigma[:, None, None]

    def value(self, context: Batch) -> torch.Tensor:
        return context["state"].sum(1, keepdim=True)

    def normalised(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk

    actions = normalised
