"""What the policies of LeRobot's folders share: units of the robot, new heads, how they are loaded and saved."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from genrl.vla.policies import heads, lerobot
from genrl.vla.policies.adapters import merged_state
from genrl.vla.policies.lerobot import HEADS, Folder, Layout
from genrl.vla.policies.policy import TOKENS, Batch, NoiseHead, Statistics
from genrl.vla.policies.robot import Prompts, Robot, Units


class PublishedPolicy(nn.Module):
    """A policy whose folder, with all that it does not use, is written back as it was read.

    Chunks have `action_dim` numbers, of which the robot's are the first `robot_action_dim`.
    """

    folder: Folder
    layout: Layout
    value_head: nn.Sequential
    robot: Units

    def __init__(self, robot: Units, horizon: int, action_dim: int) -> None:
        super().__init__()
        self.robot, self.horizon, self.action_dim = robot, horizon, action_dim
        self.robot_action_dim, self.image_size = robot.action_dim, robot.image_size
        self.inputs = robot.inputs

    @property
    def tokenizer(self) -> Any:
        """The tokeniser of transformers, where it reads instructions."""
        return None

    @property
    def critic(self) -> int:
        return heads.values_of(self)

    @property
    def stats(self) -> Statistics:
        return self.robot.stats

    @abstractmethod
    def with_heads(self, *, critic: int, noise_head: NoiseHead, seed: int) -> Self:
        """This policy with exactly these heads; those it lacked are new. Raises ValueError for one that it cannot
        have."""

    def normalised(self, actions: Tensor) -> Tensor:
        """[..., A] -> [..., action_dim], zeros where the robot has nothing."""
        return self.robot.normalised(actions, self.action_dim)

    def actions(self, chunk: Tensor) -> Tensor:
        return self.robot.actions(chunk)

    def save(self, folder: Path) -> None:
        """Write LeRobot's files, adapters merged into the weights, and the heads beside them."""
        lerobot.save_folder(folder, self.folder, self.layout, merged_state(self), self.tokenizer)

    def fill(
        self,
        folder: Folder,
        weights: dict[str, Tensor],
        metadata: dict[str, str],
        names: Callable[[str], str] = str,
        unused: Sequence[str] = (),
    ) -> None:
        """Take over the weights and the heads of a folder; `lerobot.place` says what the arguments are."""
        self.folder = folder
        self.layout = lerobot.place(self, weights, metadata, names, unused, folder.path)
        self._add_heads(folder.path)

    def ready(self, device: torch.device | str) -> Self:
        """On the device, in evaluation mode; what is trained is float32, since bfloat16 loses steps of 4e-3."""
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return self.to(device).eval()

    def _add_heads(self, path: Path) -> None:
        """The critic and the noise head that a folder has in genrl_heads.safetensors."""
        file = path / "genrl_heads.safetensors"
        if not file.is_file():
            return
        weights = load_file(file)
        has = {name.split(".")[0] for name in weights}
        last = max((name for name in weights if re.fullmatch(r"value_head\.\d\.bias", name)), default=None)
        values = 0 if last is None else len(weights[last])
        self.with_heads(critic=values, noise_head="expert" if "noise_head" in has else "none", seed=0)
        own = {name for name in self.state_dict() if name.startswith(HEADS)}
        try:
            self.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            raise ValueError(f"{file} does not fit {path}/config.json: {error}") from error
        if own != weights.keys():
            raise ValueError(f"{file} has not what a head is made of: {sorted(own ^ weights.keys())[0]!r}")


class HeadSizes(NamedTuple):
    """Numbers that a critic reads, its hidden layers, and the width of the action expert."""

    reads: int
    hidden: tuple[int, ...]
    expert: int


class PublishedFlow(PublishedPolicy):
    """A flow policy with a language model and an action expert, whose last hidden state becomes the velocity."""

    noise_head: nn.Sequential
    action_out_proj: nn.Linear
    robot: Robot

    def __init__(self, robot: Robot, prompts: Prompts, horizon: int, action_dim: int) -> None:
        super().__init__(robot, horizon, action_dim)
        robot.require_sight_and_state()
        self.prompts = prompts
        self.inputs = (*robot.inputs, TOKENS)

    @property
    def tokenizer(self) -> Any:
        return self.prompts.tokenizer

    @property
    @abstractmethod
    def head_sizes(self) -> HeadSizes: ...

    @abstractmethod
    def hidden(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        """The expert's last hidden state of the actions, float32 [B, H, W]."""

    def with_heads(self, *, critic: int, noise_head: NoiseHead, seed: int) -> Self:
        """See `PublishedPolicy`. Raises ValueError for ReinFlow's noise head."""
        reads, layers, width = self.head_sizes
        heads.on_expert(self, reads, layers, width, values=critic, noise_head=noise_head, seed=seed)
        return self

    def velocity(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        return self._read(self.hidden(context, x, sigma))

    def velocity_and_noise(self, context: Batch, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError where the policy has no noise head."""
        if "noise_head" not in self._modules:
            raise ValueError("this policy has no noise head: see with_heads")
        hidden = self.hidden(context, x, sigma)
        return self._read(hidden), self.noise_head(hidden)

    def _read(self, hidden: Tensor) -> Tensor:
        velocity: Tensor = self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype)).float()
        return velocity


def vocabulary_size(
    weights: Mapping[str, Tensor], names: Callable[[str], str], wanted: Sequence[str], path: Path
) -> int:
    """Rows of the embedding, whose own name is wanted[0]. Raises ValueError where none of the wanted is there."""
    embedding = next((value for key, value in weights.items() if names(key) == wanted[0]), None)
    if embedding is None:
        raise ValueError(f"{path}/model.safetensors has neither {' nor '.join(map(repr, wanted))}")
    return len(embedding)
