"""Policies on disk, in LeRobot's layout: its published ones, and others in the same files. An OpenVLA has its own
(`openvla_folder`).

config.json                      "type", by which the policy's class is found; its features and settings
model.safetensors                the weights
policy_preprocessor.json         the normaliser's step, with the name of its statistics
policy_preprocessor_step_0_normalizer_processor.safetensors      "<feature>.<statistic>", e.g. "action.min"
policy_postprocessor.json, policy_postprocessor_step_0_unnormalizer_processor.safetensors      the same, back
first_steps/                     of DPPO: the policy that does the first denoising steps, a folder like this one, with
first_steps/sampler.json         "steps" and "ft_denoising_steps", of which the outer policy does the last

What the policies of published folders share: units of the robot, how they are loaded and saved, and their new heads,
the critic and the noise head of pi_RL (arXiv 2510.25889).
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from genrl.config.plugins import find
from genrl.mdp.noise import seeded
from genrl.vla.config.names import POLICIES
from genrl.vla.policies import lerobot
from genrl.vla.policies.layers import merged_state
from genrl.vla.policies.lerobot import HEADS, Adapt, Folder, Layout, existing, write
from genrl.vla.policies.policy import TOKENS, Batch, NoiseHead, Policy, Statistics, missing
from genrl.vla.policies.robot import Prompts, Robot

FIRST_STEPS = "first_steps"


def policy_class(name: str) -> Any:
    """The class of a policy by name. Raises ValueError for an unknown one, and one that lacks what policies need."""
    kind = find(name, POLICIES)
    if not isinstance(kind, type) or (lacks := missing(kind)):
        what = f"has no {', '.join(lacks)}" if isinstance(kind, type) else "is no class"
        raise ValueError(f"{name} {what}: genrl.vla.policies.policy says what a policy defines")
    return kind


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the files into a folder, which is made; each appears under its name when it is complete."""
    policy.save(folder)


def load_policy(folder: Path, *, device: torch.device | str = "cpu", adapt: Adapt | None = None) -> Any:
    """The policy in a folder, in evaluation mode. adapt: for LeRobot's.

    Raises FileNotFoundError for a file that is missing, and ValueError for another type of policy, another
    normalisation, or weights of other names or shapes.
    """
    config = json.loads(existing(folder, "config.json").read_text())
    name = config.get("type", config.get("model_type"))
    try:
        kind = policy_class(str(name))
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: type: {error}") from None
    return kind.load(folder, device, adapt)


def save_first_steps(policy: Policy, folder: Path, steps: int, first: int) -> None:
    """Save, beside the policy of a folder, that which does the `first` of its denoising steps (DPPO)."""
    save_policy(policy, folder / FIRST_STEPS)
    write(folder / FIRST_STEPS / "sampler.json", {"steps": steps, "ft_denoising_steps": steps - first})


def load_first_steps(folder: Path, steps: int, first: int, *, device: torch.device | str = "cpu") -> Any:
    """What `save_first_steps` wrote; None where a folder has none.

    Raises ValueError where the policy of the folder was trained to do another part of the chain.
    """
    place = folder / FIRST_STEPS
    if not place.is_dir():
        return None
    settings = json.loads(existing(place, "sampler.json").read_text())
    if (settings["steps"], settings["ft_denoising_steps"]) != (steps, steps - first):
        raise ValueError(
            f"{folder} does the last {settings['ft_denoising_steps']} of {settings['steps']} denoising steps, and "
            f"{place} the first ones; write sampler.steps: {settings['steps']} and sampler.ft_denoising_steps: "
            f"{settings['ft_denoising_steps']}, found {steps} and {steps - first}"
        )
    return load_policy(place, device=device)


class HeadSizes(NamedTuple):
    """Numbers that a critic reads, its hidden layers, and the width of the action expert (0: no noise head)."""

    reads: int
    hidden: tuple[int, ...]
    expert: int = 0


class PublishedPolicy(nn.Module):
    """A policy whose folder, with all that it does not use, is written back as it was read.

    Chunks have `action_dim` numbers, of which the robot's are the first `robot_action_dim`.
    """

    folder: Folder
    layout: Layout
    value_head: nn.Sequential
    robot: Any
    """`robot.Robot`, or an OpenVLA's: units of its observations and actions."""

    def __init__(self, robot: Any, horizon: int, action_dim: int) -> None:
        super().__init__()
        self.robot, self.horizon, self.action_dim = robot, horizon, action_dim
        self.robot_action_dim, self.image_size = robot.action_dim, robot.image_size
        self.inputs, self.left_empty = robot.inputs, getattr(robot, "left_empty", ())

    @property
    def tokenizer(self) -> Any:
        """The tokeniser of transformers, where it reads instructions."""
        return None

    @property
    def critic(self) -> int:
        head: Any = self._modules.get("value_head")
        return 0 if head is None else int(head[-1].out_features)

    @property
    def stats(self) -> Statistics:
        stats: Statistics = self.robot.stats
        return stats

    @property
    def head_sizes(self) -> HeadSizes | None:
        """What heads it can have; None where its actions have no likelihood that they could reinforce."""
        return None

    def with_heads(self, *, critic: int, noise_head: NoiseHead, seed: int) -> Self:
        """This policy with exactly these heads; those it lacked are new, by the seed, and so is a critic of another
        number of values. Raises ValueError for one that it cannot have."""
        sizes, what = self.head_sizes, type(self).__name__
        if sizes is None:
            if critic or noise_head != "none":
                raise ValueError(f"the actions of a {what} have no likelihood, so nothing can reinforce it: use sft")
            return self
        if noise_head == "context" or (noise_head == "expert" and not sizes.expert):
            near = "use flow_noise, on it" if sizes.expert else "use a sampler that learns no noise"
            raise ValueError(
                f"sampler.kind: a {what} has no noise head{' beside its expert' * bool(sizes.expert)}: {near}"
            )
        if critic != self.critic:
            self._modules.pop("value_head", None)
        heads: dict[str, Callable[[], nn.Module] | None] = {
            "value_head": partial(new_critic, sizes.reads, sizes.hidden, critic) if critic else None,
            "noise_head": partial(new_noise_head, sizes.expert, self.action_dim) if noise_head == "expert" else None,
        }
        device = next(self.parameters()).device
        with seeded(seed, "heads"):
            for name, make in heads.items():
                if make is None:
                    self._modules.pop(name, None)
                elif name not in self._modules:
                    setattr(self, name, make().to(device))
        return self

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        """Nothing, int64 [B, 0], where a policy reads no instruction."""
        return torch.zeros(len(instructions), 0, dtype=torch.int64)

    def read_by_critic(self, context: Batch) -> Tensor:
        """What the critic reads of a context, float32 [B, R]; it is detached."""
        raise NotImplementedError

    def value(self, context: Batch) -> Tensor:
        """Raises ValueError where the policy has no critic."""
        head = critic_of(self)
        values: Tensor = head(self.read_by_critic(context).detach())
        return values

    def normalised(self, actions: Tensor) -> Tensor:
        """[..., A] -> [..., action_dim], zeros where the robot has nothing."""
        normalised: Tensor = self.robot.normalised(actions, self.action_dim)
        return normalised

    def actions(self, chunk: Tensor) -> Tensor:
        actions: Tensor = self.robot.actions(chunk)
        return actions

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
        # Any seed: the file's weights replace all that is made here.
        self.with_heads(critic=values, noise_head="expert" if "noise_head" in has else "none", seed=0)
        existing = {name for name in self.state_dict() if name.startswith(HEADS)}
        try:
            # Not strict, as the rest of the policy is in another file; heads that lack something are refused below.
            self.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            raise ValueError(f"{file} does not fit {path}/config.json: {error}") from error
        if existing != weights.keys():
            raise ValueError(f"{file} has not what a head is made of: {sorted(existing ^ weights.keys())[0]!r}")


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

    @abstractmethod
    def hidden(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        """The expert's last hidden state of the actions, float32 [B, H, W]."""

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return self.prompts(instructions)

    def velocity(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        return self._read(self.hidden(context, x, sigma))

    def velocity_and_noise(self, context: Batch, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError where the policy has no noise head."""
        if "noise_head" not in self._modules:
            raise ValueError("this policy has no noise head: see with_heads")
        hidden = self.hidden(context, x, sigma)
        return self._read(hidden), self.noise_head(hidden)

    def _read(self, hidden: Tensor) -> Tensor:
        # Float32 from here on: likelihoods of the chain are made of it.
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


def critic_of(policy: nn.Module) -> nn.Module:
    """The critic of any policy. Raises ValueError where it has none."""
    head = policy._modules.get("value_head")
    if head is None:
        raise ValueError("this policy has no critic: see with_heads")
    return head


def new_critic(width: int, hidden: Sequence[int], values: int) -> nn.Sequential:
    """[B, width] -> [B, values], ReLU. Hidden layers are Kaiming-normal (fan out), the last N(0, .02^2), biases 0."""
    layers: list[nn.Module] = []
    for before, after in zip((width, *hidden[:-1]), hidden, strict=True):
        linear = nn.Linear(before, after)
        nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    last = nn.Linear(hidden[-1], values)
    nn.init.normal_(last.weight, std=0.02)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def new_noise_head(width: int, action_dim: int) -> nn.Sequential:
    """The expert's state of an action [..., width] -> [..., action_dim], which `chains.bounded_std` makes a std of."""
    return nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, action_dim))
