"""TinyFlowVLA: the embedded flow policy, half a million parameters, small enough to be fine-tuned on a laptop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from genrl.vla.policies.encoder import (
    MODES,
    Inputs,
    ObservationEncoder,
    ResidualMLP,
    check_statistics,
    sinusoidal,
    value_head,
)
from genrl.vla.policies.heads import critic_of
from genrl.vla.policies.normalise import normalise, unnormalise
from genrl.vla.policies.policy import ACTION, Batch, Statistics

NoiseHead = Literal["none", "expert", "context"]

_PREFIX, _EXPERT, _TIME = 128, 256, 64


@dataclass(frozen=True)
class TinyFlowConfig:
    """critic: values that it gives, see `Policy.value`; 0 for none. noise_head: "expert", on the expert's hidden state
    (Flow-Noise); "context", on the context and the time alone, apart from the expert (ReinFlow)."""

    inputs: Inputs
    action_dim: int
    horizon: int
    critic: int = 0
    noise_head: NoiseHead = "none"


class TinyFlowVLA(nn.Module):
    """Picture, instruction and state -> prefix [B, 128]; (chunk, sigma, prefix) -> velocity, zero before training.

    A context has "features", what the encoder saw, which the critic reads detached, and "prefix", which the expert
    reads. With a frozen encoder keep the features of a rollout and begin at `context`. stats: of `STATE`, `ACTION` and,
    where it is read, `ENVIRONMENT`. Weights are initialised from torch's global generator.
    """

    def __init__(self, config: TinyFlowConfig, stats: Statistics) -> None:
        super().__init__()
        check_statistics(config.inputs, config.action_dim, stats)
        self.config, self.stats = config, stats
        self.horizon, self.action_dim, self.critic = config.horizon, config.action_dim, config.critic
        self.inputs, self.image_size = config.inputs.keys, config.inputs.image
        numbers = config.horizon * config.action_dim
        self.encoder = ObservationEncoder(config.inputs, stats)
        self.prefix = ResidualMLP(self.encoder.size, _PREFIX, 2, nn.SiLU())
        self.expert = ResidualMLP(numbers + _TIME + _PREFIX, _EXPERT, 2, nn.SiLU())
        self.norm = nn.LayerNorm(_EXPERT)
        self.out = nn.Linear(_EXPERT, numbers)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if config.critic:
            self.value_head = value_head(self.encoder.size, _PREFIX, 2, nn.SiLU(), config.critic)
        if config.noise_head != "none":
            seen = _EXPERT if config.noise_head == "expert" else _TIME + _PREFIX
            self.noise_head = nn.Sequential(
                nn.Linear(seen, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, numbers)
            )

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return self.encoder.tokenise(instructions)

    def encode(self, observation: Batch) -> Batch:
        return self.context(self.encoder(observation))

    def context(self, features: Tensor) -> Batch:
        """The context of features [B, F] that the encoder has computed."""
        return {"features": features, "prefix": self.prefix(features)}

    def velocity(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        return self._read(self._think(context, x, sigma), x)

    def velocity_and_noise(self, context: Batch, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError where the policy was made without a noise head."""
        if self.config.noise_head == "none":
            raise ValueError("this policy has no noise head: make it with noise_head 'expert' or 'context'")
        thought = self._think(context, x, sigma)
        if self.config.noise_head == "expert":
            raw = self.noise_head(thought)
        else:
            raw = self.noise_head(torch.cat([sinusoidal(sigma, _TIME, longest=1.0), context["prefix"]], 1))
        return self._read(thought, x), raw.view(x.shape)

    def value(self, context: Batch) -> Tensor:
        """Raises ValueError where the policy was made without a critic."""
        values: Tensor = critic_of(self)(context["features"].detach())
        return values

    def normalised(self, actions: Tensor) -> Tensor:
        return normalise(actions, self.stats[ACTION], MODES["ACTION"])

    def actions(self, chunk: Tensor) -> Tensor:
        return unnormalise(chunk, self.stats[ACTION], MODES["ACTION"])

    def _think(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        told = torch.cat([x.flatten(1).float(), sinusoidal(sigma, _TIME, longest=1.0), context["prefix"]], 1)
        thought: Tensor = self.norm(self.expert(told))
        return thought

    def _read(self, thought: Tensor, x: Tensor) -> Tensor:
        velocity: Tensor = self.out(thought).view(x.shape)
        return velocity
