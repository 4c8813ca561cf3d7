"""Flow-GRPO with a reward that is trained beside the model (arXiv 2511.20256)."""

from __future__ import annotations

from typing import Literal

from genrl.config.section import Count, Fraction, Positive, Section, Text, Ways, Whole
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO


class Adversary(Section):
    """How the trainable reward of an Adv-GRPO run is trained."""

    references: Text
    """Pictures that samples are to be like, for every prompt: a folder (each picture beside a .txt with its prompt), a
    .jsonl file or a data set id:split with the columns prompt and image."""
    schedule: Literal["alternate", "lag", "together"] = "alternate"
    """Which iterations train it, and which the model: in turns (see every); it, while it scores samples above
    references, else the model (the paper's for PickScore); or both on the same samples."""
    every: Ways = 10
    """Of alternate: each so many-th iteration trains the model, all others the reward (Adv-GRPO: 10)."""
    warmup: Whole = 0
    """First iterations that train the reward alone; with together at least 1."""
    steps: Count = 1
    """Optimiser steps of the reward in an iteration that trains it, each on all its samples (Adv-GRPO: 1)."""
    lr: Positive = 1e-4
    """Learning rate of its Adam, constant (Adv-GRPO: 1e-4 for DINO heads, 5e-6 for PickScore's last layer)."""
    betas: tuple[Fraction, Fraction] = (0.5, 0.999)
    """Its Adam's averaging factors (Adv-GRPO: 0.5, 0.999)."""


class AdvGRPO(FlowGRPO):
    """Flow-GRPO with a reward that is trained beside the model (arXiv 2511.20256)."""

    algorithm: Literal["adv_grpo"] = "adv_grpo"  # type: ignore[assignment]
    """Which trainer."""
    adversary: Adversary
    """How the one trainable reward among `rewards` is trained."""

    def trains_model(self, iteration: int) -> bool:
        """Whether this iteration (0-based) trains the model; with the schedule lag, whether it may."""
        adversary = self.adversary
        if iteration < adversary.warmup:
            return False
        return adversary.schedule != "alternate" or (iteration + 1) % adversary.every == 0

    def model_iterations(self, iterations: int) -> int:
        """How many of so many iterations train the model."""
        return sum(map(self.trains_model, range(iterations)))
