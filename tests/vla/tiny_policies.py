"""Embedded policies with random weights, for MiniTable, and its demonstrations."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import nn

from genrl.playground.minitable import INSTRUCTIONS, PUT, demonstrate, task
from genrl.playground.minitable.demonstrations import minitable_frames
from genrl.vla.data.frames import frame_statistics
from genrl.vla.policies.diffusion_mlp import DiffusionMLP, DiffusionMLPConfig
from genrl.vla.policies.encoder import Inputs
from genrl.vla.policies.policy import Batch, NoiseHead, vocabulary
from genrl.vla.policies.tiny_flow import TinyFlowConfig, TinyFlowVLA

WORDS = vocabulary(INSTRUCTIONS)
SEES = Inputs(state=3, vocabulary=WORDS, image=32)
TOLD = Inputs(state=3, vocabulary=WORDS, environment=6)
FEELS = Inputs(state=3, vocabulary=WORDS, points=14)


@lru_cache(maxsize=4)
def frames(count: int = 8, image: int = 32, horizon: int = 4, points: int = 0) -> Batch:
    keys = task.episode_keys(0, np.arange(count), np.zeros(count))
    return minitable_frames(demonstrate(keys, PUT), WORDS, horizon=horizon, image_size=image, points=points)


def flow(
    inputs: Inputs = TOLD, *, critic: int = 0, noise_head: NoiseHead = "none", seed: int = 0, stir: bool = True
) -> TinyFlowVLA:
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


def diffusion(inputs: Inputs = TOLD, *, critic: int = 0, train_steps: int = 20, seed: int = 0) -> DiffusionMLP:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = DiffusionMLPConfig(inputs, 3, 4, critic=critic, train_steps=train_steps)
        return DiffusionMLP(config, frame_statistics(frames(points=inputs.points)))
