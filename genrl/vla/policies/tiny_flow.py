"""TinyFlowVLA: the embedded flow policy, half a million parameters, small enough to be fine-tuned on a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from genrl.vla.policies.embedded import EmbeddedConfig, EmbeddedPolicy
from genrl.vla.policies.encoder import ResidualMLP, sinusoidal, value_head
from genrl.vla.policies.policy import Batch, NoiseHead, Statistics

_PREFIX, _EXPERT, _TIME = 128, 256, 64


@dataclass(frozen=True)
class TinyFlowConfig(EmbeddedConfig):
    """noise_head: "expert", on the expert's hidden state (Flow-Noise); "context", on the context and the time alone,
    apart from the expert (ReinFlow)."""

    noise_head: NoiseHead = "none"


class TinyFlowVLA(EmbeddedPolicy):
    """Picture, instruction and state -> prefix [B, 128]; (chunk, sigma, prefix) -> velocity, zero before training.

    A context has "features", what the encoder saw, which the critic reads detached, and "prefix", which the expert
    reads.
    """

    Config: ClassVar[type[EmbeddedConfig]] = TinyFlowConfig
    name = "tiny_flow_vla"

    def __init__(self, config: TinyFlowConfig, stats: Statistics) -> None:
        super().__init__(config, stats)
        numbers = config.horizon * config.action_dim
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

    def _think(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        told = torch.cat([x.flatten(1).float(), sinusoidal(sigma, _TIME, longest=1.0), context["prefix"]], 1)
        thought: Tensor = self.norm(self.expert(told))
        return thought

    def _read(self, thought: Tensor, x: Tensor) -> Tensor:
        velocity: Tensor = self.out(thought).view(x.shape)
        return velocity
