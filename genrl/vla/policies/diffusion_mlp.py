"""DPPO's diffusion policy: an MLP that predicts the noise in a chunk (arXiv 2409.00588, its MLP for short chunks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from genrl.vla.policies.embedded import EmbeddedConfig, EmbeddedPolicy
from genrl.vla.policies.encoder import ResidualMLP, sinusoidal, value_head
from genrl.vla.policies.policy import Batch, Statistics

_TIME, _HIDDEN, _CRITIC = 16, 512, 256


@dataclass(frozen=True)
class DiffusionMLPConfig(EmbeddedConfig):
    """train_steps: K of the noise schedule, 20 in DPPO from states, 100 from pictures."""

    train_steps: int = 20


class DiffusionMLP(EmbeddedPolicy):
    """(chunk, timestep, features) -> noise: three layers of 512 with a residual, Mish; the critic, of 256, sees only
    the observation.

    The encoder is that of `TinyFlowVLA`, where DPPO has a vision transformer.
    """

    Config: ClassVar[type[EmbeddedConfig]] = DiffusionMLPConfig
    name = "diffusion_mlp"

    def __init__(self, config: DiffusionMLPConfig, stats: Statistics) -> None:
        super().__init__(config, stats)
        numbers = config.horizon * config.action_dim
        self.time = nn.Sequential(nn.Linear(_TIME, 2 * _TIME), nn.Mish(), nn.Linear(2 * _TIME, _TIME))
        self.body = ResidualMLP(numbers + _TIME + self.encoder.size, _HIDDEN, 1, nn.Mish())
        self.out = nn.Linear(_HIDDEN, numbers)
        if config.critic:
            self.value_head = value_head(self.encoder.size, _CRITIC, 1, nn.Mish(), config.critic)

    @property
    def train_steps(self) -> int:
        """Noise levels."""
        steps: int = self.config.train_steps
        return steps

    def noise(self, context: Batch, x: Tensor, timestep: Tensor) -> Tensor:
        time = self.time(sinusoidal(timestep.to(x.device), _TIME, longest=float(self.config.train_steps)))
        predicted: Tensor = self.out(self.body(torch.cat([x.flatten(1).float(), time, context["features"]], 1)))
        return predicted.view(x.shape)
