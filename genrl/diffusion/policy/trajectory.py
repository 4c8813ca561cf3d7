"""What a policy draws and records: a micro-batch, the transition of a stochastic step, and the steps taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from genrl.diffusion.config.kernels import find_kernel
from genrl.diffusion.policy.scheduler import PolicyHead, Step
from genrl.mdp import kernels
from genrl.mdp.kernels import Transition
from genrl.mdp.noise import derive_seed, keyed_noise
from genrl.mdp.tree import edge_noise

NoiseKey = tuple[int | str, ...]


@dataclass(frozen=True)
class Batch:
    """A micro-batch of samples to draw: with the weights, all that a sample depends on."""

    prompts: list[str]
    keys: list[NoiseKey]
    """One per sample, e.g. (run seed, iteration, slot): every random number of the sample derives from its key."""
    sampling: Mapping[str, Any]
    """Arguments of the pipeline call: num_inference_steps, guidance_scale, height, width, ..."""
    initial_keys: list[NoiseKey] | None = None
    """Keys of the initial noise where they differ from `keys` (a group that shares its starting point)."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Further call arguments that hold one entry per sample, such as `image` of an editing pipeline."""

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def initial_seeds(self) -> list[int]:
        """Seeds of the initial noise, one per sample. Every call of the pipeline asks for them."""
        return [derive_seed(*key, "initial") for key in self.initial_keys or self.keys]

    def take(self, rows: Sequence[int]) -> Batch:
        """The samples of these rows."""
        return replace(
            self,
            prompts=[self.prompts[r] for r in rows],
            keys=[self.keys[r] for r in rows],
            initial_keys=[self.initial_keys[r] for r in rows] if self.initial_keys else None,
            inputs={name: [values[r] for r in rows] for name, values in self.inputs.items()},
        )

    def dumped(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON, its pictures as uint8 [H, W, 3]): what `from_dump` makes it from."""
        info = {
            "prompts": self.prompts,
            "keys": self.keys,
            "initial_keys": self.initial_keys,
            "sampling": dict(self.sampling),
            "inputs": list(self.inputs),
        }
        pictures = {
            # A copy: arrays of PIL pictures cannot be written to, of which torch warns.
            f"inputs/{name}/{k}": torch.from_numpy(np.array(picture))
            for name, row in self.inputs.items()
            for k, picture in enumerate(row)
        }
        return info, pictures

    @classmethod
    def from_dump(cls, info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The reverse of `dumped`."""
        initial = info["initial_keys"]
        return cls(
            prompts=info["prompts"],
            keys=[tuple(key) for key in info["keys"]],
            sampling=info["sampling"],
            initial_keys=None if initial is None else [tuple(key) for key in initial],
            inputs={
                name: [Image.fromarray(tensors[f"inputs/{name}/{k}"].numpy()) for k in range(len(info["prompts"]))]
                for name in info["inputs"]
            },
        )


@dataclass(frozen=True)
class Kernel:
    """Which Gaussian transition a stochastic step is, by name (`genrl.diffusion.config.kernels`), and its noise level
    (a or eta).

    Raises ValueError for a name that is none, and for what a kernel from outside returns if it is no transition.
    """

    name: str
    noise_level: float
    levels: Mapping[int, float] = field(default_factory=dict)
    """Noise level of single steps, where it is another one."""

    def at(self, index: int) -> Kernel:
        """The kernel of one step, with its own level."""
        return Kernel(self.name, self.levels.get(index, self.noise_level))

    def transition(self, step: Step, head: PolicyHead) -> Transition:
        """Transition of this step of a pipeline whose scheduler is `head`."""
        x, out = step.state, step.model_output
        a = self.levels.get(step.index, self.noise_level)
        if head.parametrisation == "diffusion":
            return kernels.ddim(
                x,
                out,
                step.sigma,
                step.sigma_next,
                eta=a,
                prediction_type=head.prediction_type,
                clip_range=head.clip_range,
                threshold=head.threshold,
            )
        sigma, sigma_next = step.sigma, step.sigma_next
        if self.name == "wan_sde":  # its noise follows the schedule: it has no level, so none of 0 either
            return kernels.wan_sde(x, out, sigma, sigma_next, sigma_max=step.sigma_max)
        # Without noise each kernel is the Euler step; of one formula for all, deterministic steps agree to the bit.
        if self.name == "ode" or a == 0.0:
            return kernels.ode(x, out, sigma, sigma_next)
        if self.name == "flow_sde":
            return kernels.flow_sde(x, out, sigma, sigma_next, noise_level=a, sigma_max=step.sigma_max)
        if self.name == "dance_sde":
            return kernels.dance_sde(x, out, sigma, sigma_next, noise_level=a)
        if self.name == "flow_cps":
            return kernels.flow_cps(x, out, sigma, sigma_next, noise_level=a)
        if self.name == "flow_ddim":
            return kernels.flow_ddim(x, out, sigma, sigma_next, noise_level=a)
        mean, std = find_kernel(self.name)(x, out, sigma, sigma_next, noise_level=a)
        return kernels.transition_of(x, mean, std)


ODE = Kernel("ode", 0.0)


@dataclass(frozen=True)
class Children:
    """What the last step of a segment draws where its samples branch: C children of R rows, from one model call."""

    parent_row: Tensor
    """Row that each child comes from, int64 [C]."""
    keys: list[NoiseKey]
    """One per child."""
    base_keys: list[NoiseKey] | None = None
    """Key of each child's parent where the noises of siblings are correlated, else None."""
    spread: float | None = None
    """Then their correlation is 1 / (1 + spread^2)."""


@dataclass(frozen=True)
class StepRecord:
    """One recorded step of a micro-batch: all that is needed to run it again under other weights.

    For example `policy.replay(trajectory.step(2))`; a dump holds its batch and `tensors`, from which `of` makes it.
    """

    batch: Batch
    """The conditions it is run under."""
    kernel: Kernel
    """The transition of this very step."""
    index: int
    state: Tensor
    """x_i, float32 [B, ...]."""
    next_state: Tensor
    """x_{i+1} as it was drawn, [B, ...], or [C, ...] where the step branches."""
    rows: Tensor | None = None
    """Row of the state that each action was drawn from, int64 [C], where they are not one to one."""

    def tensors(self) -> dict[str, Tensor]:
        """All of it but the batch and the kernel's name."""
        tensors = {
            "step": torch.tensor(self.index),
            "noise_level": torch.tensor(self.kernel.noise_level, dtype=torch.float64),
            "state": self.state,
            "next_state": self.next_state,
        }
        return tensors if self.rows is None else tensors | {"rows": self.rows}

    @classmethod
    def of(cls, batch: Batch, kernel: str, tensors: Mapping[str, Tensor]) -> Self:
        """The reverse of `tensors`."""
        return cls(
            batch,
            Kernel(kernel, float(tensors["noise_level"])),
            int(tensors["step"]),
            tensors["state"],
            tensors["next_state"],
            tensors.get("rows"),
        )


@dataclass(frozen=True)
class Trajectory:
    """A recorded segment of denoising chains of one micro-batch."""

    batch: Batch
    kernel: Kernel
    states: dict[int, Tensor]
    """Step index i -> x_i, float32 [B, ...]: both ends of every stochastic step."""
    next_states: dict[int, Tensor]
    """Step index i -> x_{i+1} as it was drawn, the action of step i: `states[i + 1]`, unless the pipeline changes
    states between its steps (inpainting masks). Of the step that branches [C, ...], one per child."""
    log_probs: dict[int, Tensor]
    """Step index i -> log p(x_{i+1} | x_i), float32 [B] ([C] of the step that branches). Deterministic steps are not
    actions and have none."""
    final: Tensor
    """The state after the last step run, float32 [B, ...] ([C, ...] where it branches)."""
    sigmas: Tensor
    """The full schedule, float32 [T + 1] (diffusion: timesteps [T])."""
    stop: int
    """The step after the last one run."""
    initial: Tensor
    """The state before the first step run, float32 [B, ...]."""
    children: Children | None = None
    predicted: Tensor | None = None
    """The clean sample predicted at the last step run, where asked for: float32 [B, ...]."""
    graphs: dict[int, Replayed] = field(default_factory=dict)
    """Step index i -> what `replay` would give before the first update, where its graph was kept."""

    def take(self, rows: list[int]) -> Trajectory:
        """The samples of these rows, of a segment in which nothing branches."""

        def some(values: dict[int, Tensor]) -> dict[int, Tensor]:
            return {step: value[rows] for step, value in values.items()}

        return replace(
            self,
            batch=self.batch.take(rows),
            states=some(self.states),
            next_states=some(self.next_states),
            log_probs=some(self.log_probs),
            final=self.final[rows],
            initial=self.initial[rows],
            predicted=None if self.predicted is None else self.predicted[rows],
        )

    def step(self, index: int, batch: Batch | None = None) -> StepRecord:
        """A recorded step, under other conditions than it was sampled under where a `batch` is given. KeyError for a
        step that was not recorded."""
        branches = self.children is not None and index == self.stop - 1
        return StepRecord(
            batch or self.batch,
            self.kernel.at(index),
            index,
            self.states[index],
            self.next_states[index],
            self.children.parent_row if self.children is not None and branches else None,
        )


@dataclass(frozen=True)
class Replayed:
    """One recorded step under the current parameters. Gradients flow through all of it."""

    log_prob: Tensor
    """float32 [B]"""
    mean: Tensor
    """float32 [B, ...]"""
    std: Tensor
    """Transition standard deviation, float32 [B, 1, ...]."""
    model_output: Tensor
    """Velocity (or network prediction), float32 [B, ...]. B counts actions: siblings share theirs."""
    step: Step


def of_rows(transition: Transition, rows: Tensor) -> Transition:
    """The transition of each of these rows."""
    where = rows.to(transition.mean.device)
    std = transition.std.expand(len(transition.mean), *transition.std.shape[1:])
    return Transition.known(transition.mean[where], std[where], transition.random)


def step_noise(shape: torch.Size, step: int, keys: Sequence[NoiseKey], children: Children | None) -> Tensor:
    """Noise of the actions of a step, [B, ...] or [C, ...], on the CPU."""
    if children is None:
        return torch.stack([keyed_noise(shape, *key, "step", step) for key in keys])
    bases: Sequence[NoiseKey | None] = children.base_keys or [None] * len(children.keys)
    pairs = zip(children.keys, bases, strict=True)
    return torch.stack([edge_noise(shape, key, step, parent_key=base, spread=children.spread) for key, base in pairs])
