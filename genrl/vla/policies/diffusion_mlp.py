"""DPPO's diffusion policy: an MLP that predicts the noise in a chunk (arXiv 2409.00588, its MLP for short chunks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

_TIME, _HIDDEN, _CRITIC = 16, 512, 256


@dataclass(frozen=True)
class DiffusionMLPConfig:
    """critic: values that it gives, 0 for none. train_steps: K of the noise schedule, 20 in DPPO from states, 100 from
    pictures."""

    inputs: Inputs
    action_dim: int
    horizon: int
    critic: int = 0
    train_steps: int = 20


class DiffusionMLP(nn.Module):
    """(chunk, timestep, features) -> noise: three layers of 512 with a residual, Mish; the critic, of 256, sees only
    the observation.

    The encoder is that of `TinyFlowVLA`, where DPPO has a vision transformer. stats as there.
    """

    def __init__(self, config: DiffusionMLPConfig, stats: Statistics) -> None:
        super().__init__()
        check_statistics(config.inputs, config.action_dim, stats)
        self.config, self.stats = config, stats
        self.horizon, self.action_dim, self.critic = config.horizon, config.action_dim, config.critic
        self.inputs, self.image_size = config.inputs.keys, config.inputs.image
        numbers = config.horizon * config.action_dim
        self.encoder = ObservationEncoder(config.inputs, stats)
        self.time = nn.Sequential(nn.Linear(_TIME, 2 * _TIME), nn.Mish(), nn.Linear(2 * _TIME, _TIME))
        self.body = ResidualMLP(numbers + _TIME + self.encoder.size, _HIDDEN, 1, nn.Mish())
        self.out = nn.Linear(_HIDDEN, numbers)
        if config.critic:
            self.value_head = value_head(self.encoder.size, _CRITIC, 1, nn.Mish(), config.critic)

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return self.encoder.tokenise(instructions)

    def encode(self, observation: Batch) -> Batch:
        return self.context(self.encoder(observation))

    def context(self, features: Tensor) -> Batch:
        """The context of features [B, F] that the encoder has computed: themselves."""
        return {"features": features}

    def noise(self, context: Batch, x: Tensor, timestep: Tensor) -> Tensor:
        time = self.time(sinusoidal(timestep.to(x.device), _TIME, longest=float(self.config.train_steps)))
        predicted: Tensor = self.out(self.body(torch.cat([x.flatten(1).float(), time, context["features"]], 1)))
        return predicted.view(x.shape)

    def value(self, context: Batch) -> Tensor:
        """Raises ValueError where the policy was made without a critic."""
        values: Tensor = critic_of(self)(context["features"].detach())
        return values

    def normalised(self, actions: Tensor) -> Tensor:
        return normalise(actions, self.stats[ACTION], MODES["ACTION"])

    def actions(self, chunk: Tensor) -> Tensor:
        return unnormalise(chunk, self.stats[ACTION], MODES["ACTION"])
