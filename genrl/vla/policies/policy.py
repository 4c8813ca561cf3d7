"""What a vision-language-action policy is: an observation encoded once, then a chunk of actions denoised under it.

An observation is a batch of tensors by LeRobot's names (below), a context whatever a policy makes of it: tensors
[B, ...] by names of its own, so that rows can be chosen without knowing them. `encode` is called once per observation,
in sampling and in replay; `velocity` (or `noise`) once per denoising step.

Chunks inside a policy are normalised, [B, H, A]; only `actions` leaves those units. Time is the project's: sigma = 1 is
noise, 0 the action, velocity = noise - action. A model that runs the other way is turned round in its own `velocity`,
once (`genrl.mdp.chains.noise_at_zero`). Diffusion policies are told an integer training timestep, 0 the cleanest.

**A policy of your own** is a class in a file, named `path/file.py:Name` in `policy.new.type` and, once it is saved, as
the `type` of its folder's config.json; or one that a package installs under a name in the entry point group
`genrl.policies`. It is the shortest as a subclass of `embedded.EmbeddedPolicy`, which has everything but the network:

    class Linear(EmbeddedPolicy):
        def __init__(self, config, stats):          # config: `EmbeddedConfig`, or a subclass named by `Config`
            super().__init__(config, stats)         # makes self.encoder
            numbers = config.horizon * config.action_dim
            self.body = nn.Linear(self.encoder.size + numbers + 1, numbers)
            if config.critic:
                self.value_head = nn.Linear(self.encoder.size, config.critic)

        def velocity(self, context, x, sigma):      # or `noise`, and the property `train_steps`
            told = torch.cat([context["features"], x.flatten(1), sigma[:, None]], 1)
            return self.body(told).view(x.shape)

Any other module does that is a `Policy`, predicts velocity, noise, tokens or actions (`Predicts...` below), and has the
class methods of `PolicyClass`. One that predicts tokens or actions says itself by which loss it imitates (`Imitates`);
one that predicts actions has no likelihood.
`with_heads` is asked for a critic by PPO, and for a noise head by the samplers flow_noise and reinflow.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from genrl.vla.config.sections import NewPolicy
    from genrl.vla.policies.lerobot import Adapt

NoiseHead = Literal["none", "expert", "context"]
"""Where a head is that sets the noise of a flow policy: on the action expert (Flow-Noise), beside it (ReinFlow)."""
Batch = dict[str, Tensor]
Statistics = dict[str, dict[str, Tensor]]
"""Vectors by feature and by name of a statistic: `robot.statistics` of every feature."""

IMAGE = "observation.image"
"""uint8 [B, S, S, 3], as rollouts store it."""
IMAGES = "observation.images."
"""Before the name of a camera, where a policy has several: the same."""
STATE = "observation.state"
"""Proprioception, float32 [B, P], as the robot has it (not normalised)."""
ENVIRONMENT = "observation.environment_state"
"""What a policy that does not look is told, float32 [B, E]."""
POINTS = "observation.environment_points"
"""Points of the scene's surfaces, float32 [B, N, 3] in the world's frame, in no order (LeRobot has no name for it)."""
SEEN = "observation.seen"
"""What a frozen encoder has seen in pictures and points, float32 [B, F], kept in their place."""
TOKENS = "observation.language.tokens"
"""The instruction, int64 [B, L], 0 where there is no word."""
ACTION = "action"


@dataclass(frozen=True)
class Inputs:
    """What a policy reads: numbers in `STATE`, the words it knows, and, 0 for none, numbers in `ENVIRONMENT`, side of
    `IMAGE` in pixels, points in `POINTS`, and numbers in `SEEN`, of critics beside a policy that looks."""

    state: int
    vocabulary: tuple[str, ...]
    environment: int = 0
    image: int = 0
    points: int = 0
    seen: int = 0

    @property
    def looks(self) -> bool:
        """Whether there is anything to look at."""
        return self.image > 0 or self.points > 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the entries of an observation."""
        used_by_name = {
            STATE: True,
            ENVIRONMENT: self.environment,
            IMAGE: self.image,
            POINTS: self.points,
            SEEN: self.seen,
        }
        return (*(name for name, used in used_by_name.items() if used), TOKENS)


class Policy(Protocol):
    """What every policy has. `inputs`: the entries of an observation that it reads, and a rollout must store.

    `critic`: how many values `value` gives, 0 without critic. `image_size`: side of the pictures it reads, 0 for none.
    `encoder`: what sees and reads, which may be frozen. `stats`: what it normalises by. It is in evaluation mode in
    training, too; one that drops out as it imitates does so by itself, from its `loss_noise`.
    """

    @property
    def horizon(self) -> int: ...
    @property
    def action_dim(self) -> int: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def critic(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def encoder(self) -> nn.Module: ...
    @property
    def stats(self) -> Statistics: ...

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        """`TOKENS` of B instructions."""
        ...

    def encode(self, observation: Batch) -> Batch:
        """The context of B observations."""
        ...

    def value(self, context: Batch) -> Tensor:
        """Expected return from each context, float32 [B, 1]; or, [B, H], from each action of the chunk on, before the
        chunk is known. Does not move the encoder."""
        ...

    def normalised(self, actions: Tensor) -> Tensor:
        """Actions [..., A] of the robot in the policy's units."""
        ...

    def actions(self, chunk: Tensor) -> Tensor:
        """The inverse of `normalised`."""
        ...

    def with_heads(self, *, critic: int, noise_head: NoiseHead, seed: int) -> Self:
        """The policy, or another with its weights, with a critic of so many values (0: none) and a noise head where it
        is asked for; heads that it lacked are new, by the seed. Raises ValueError for those that it cannot have."""
        ...

    def save(self, folder: Path) -> None:
        """Write config.json, with `type`, `output_features` and `chunk_size`, and whatever `load` reads."""
        ...


class PolicyClass(Protocol):
    """How a policy comes to be."""

    def new(self, inputs: Inputs, action_dim: int, stats: Statistics, settings: NewPolicy) -> Policy:
        """A policy with fresh weights, by torch's global generator; only where `policy.new` may name it."""
        ...

    def load(self, folder: Path, device: torch.device | str, adapt: Adapt | None) -> Policy:
        """What `save` wrote, in evaluation mode. adapt: names and statistics for LeRobot's policies, else None."""
        ...


@runtime_checkable
class KeepsFeatures(Protocol):
    """A policy whose context is made of "features", all that its encoder computes: kept where the encoder is frozen."""

    def context(self, features: Tensor) -> Batch:
        """The context [B, ...] of features [B, ...]."""
        ...


@runtime_checkable
class PredictsVelocity(Protocol):
    """A flow policy."""

    def velocity(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        """noise - action at x [B, H, A] and sigma [B], shape of x."""
        ...


@runtime_checkable
class LearnsNoise(Protocol):
    """A flow policy that also says how far to explore: Flow-Noise, ReinFlow."""

    def velocity_and_noise(self, context: Batch, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity, and what `chains.bounded_std` makes a std of; both [B, H, A]."""
        ...


@runtime_checkable
class PredictsTokens(Protocol):
    """A policy that chooses each number of a chunk among K tokens, all at once."""

    @property
    def centres(self) -> Tensor:
        """The normalised action that each token means, float32 [K]."""
        ...

    def logits(self, context: Batch) -> Tensor:
        """Logits of the tokens, float32 [B, H, A, K]."""
        ...


@runtime_checkable
class PredictsActions(Protocol):
    """A policy whose chunk is a function of the observation: it can imitate and act, and has no likelihood."""

    def regressed(self, context: Batch) -> Tensor:
        """The chunk, normalised, float32 [B, H, A]."""
        ...


@runtime_checkable
class PredictsNoise(Protocol):
    """A diffusion policy with so many noise levels, `train_steps`."""

    @property
    def train_steps(self) -> int: ...

    def noise(self, context: Batch, x: Tensor, timestep: Tensor) -> Tensor:
        """The noise in x [B, H, A] at the training timestep int64 [B], shape of x."""
        ...


class Errors(NamedTuple):
    """What a policy does wrong in B demonstrated chunks: actions [B, H], of each action; frames [B], beside them."""

    actions: Tensor
    frames: Tensor


@runtime_checkable
class Imitates(Protocol):
    """A policy that says itself how it imitates a chunk: one without denoising."""

    def loss_noise(self, count: int, rng: torch.Generator) -> Batch:
        """All that is random in `errors` of so many frames: tensors [count, ...] by names of its own."""
        ...

    def errors(self, context: Batch, actions: Tensor, valid: Tensor, noise: Batch) -> Errors:
        """Errors at demonstrated chunks, normalised [B, H, A]; valid bool [B, H]: what of them was demonstrated.

        The loss is the mean of the actions' errors over the valid ones, and of the frames' over all.
        """
        ...


def missing(kind: type[Any]) -> list[str]:
    """What a class lacks to be a policy's."""
    needed = ["tokenise", "encode", "normalised", "actions", "with_heads", "save", "load"]
    predicts = {"velocity", "noise", "logits", "regressed"} & set(dir(kind))
    if not predicts & {"velocity", "noise"}:
        needed += ["loss_noise", "errors"] if predicts else ["velocity, noise, logits or regressed"]
        needed += ["centres"] if "logits" in predicts else []
    return [name for name in needed if name not in dir(kind)]


def rows(batch: Batch, index: Tensor) -> Batch:
    """The rows `index` (numbers or a mask) of an observation or a context."""
    return {name: value[index.to(value.device)] for name, value in batch.items()}


def joined_batches(batches: Sequence[Batch], join: Callable[[list[Tensor]], Tensor]) -> Batch:
    """One tensor per name, by `torch.stack` or `torch.cat`; `TOKENS` are padded to the longest instruction."""
    joined = {}
    for name in batches[0]:
        values = [batch[name] for batch in batches]
        if name == TOKENS:
            longest = max(value.shape[-1] for value in values)
            values = [nn.functional.pad(value, (0, longest - value.shape[-1])) for value in values]
        joined[name] = join(values)
    return joined


def vocabulary(instructions: Sequence[str]) -> tuple[str, ...]:
    """The words of some instructions, in alphabetical order: the vocabulary of a policy that is to know them."""
    return tuple(sorted({word for instruction in instructions for word in instruction.lower().split()}))


def tokenise(instructions: Sequence[str], words: Sequence[str]) -> Tensor:
    """Words as numbers, 1 + place in `words`, int64 [B, L], padded with 0 to the longest.

    Raises ValueError for an instruction that is empty, or has a word that the policy was not taught.
    """
    number = {word: 1 + place for place, word in enumerate(words)}
    lines = [instruction.lower().split() for instruction in instructions]
    for row, line in enumerate(lines):
        if not line:
            raise ValueError(f"row {row} has no instruction: the environment must give a task_description")
        unknown = [word for word in line if word not in number]
        if unknown:
            near = difflib.get_close_matches(unknown[0], words, n=1)
            hint = f"; the nearest one is {near[0]!r}" if near else ""
            raise ValueError(
                f"the policy does not know {unknown} of {instructions[row]!r}{hint} (row {row}): choose "
                f"environment.tasks whose words it was taught ({', '.join(words)}), or teach a new one by sft"
            )
    tokens = torch.zeros(len(lines), max(map(len, lines), default=0), dtype=torch.int64)
    for row, line in enumerate(lines):
        tokens[row, : len(line)] = torch.tensor([number[word] for word in line])
    return tokens
