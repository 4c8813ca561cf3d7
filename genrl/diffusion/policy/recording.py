"""What a policy does at the steps of a pipeline: samples from their transitions or evaluates recorded ones."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from genrl.diffusion.policy.calls import Leave
from genrl.diffusion.policy.scheduler import PolicyHead, Step
from genrl.diffusion.policy.trajectory import ODE, Batch, Children, Kernel, Replayed, Trajectory, of_rows, step_noise
from genrl.mdp.kernels import Reduction, Transition, log_prob, sample


def predicted_clean(head: PolicyHead, step: Step) -> Tensor:
    """x_0 as this step's model output has it: the deterministic step to where there is no noise."""
    noiseless = torch.full_like(step.sigma_next, 0.0 if head.parametrisation == "flow" else 1.0)
    return ODE.transition(replace(step, sigma_next=noiseless), head).mean


@dataclass
class Actions:
    """How stochastic steps are sampled, and evaluated under the current parameters."""

    head: PolicyHead
    reduction: Reduction

    def sample(self, step: Step, transition: Transition, rows: Tensor | None, noise: Tensor) -> tuple[Tensor, Replayed]:
        """(next state, as `evaluate` gives it). rows: row of the state that each action is drawn from, where they are
        not one to one."""
        sampled = transition if rows is None else of_rows(transition, rows)
        # The action is a constant of the loss. With the mean's graph in it, x' - mean would be the noise alone, and log
        # p would have no gradient.
        next_state = sample(sampled.mean.detach(), sampled.std, noise)
        return next_state, self._replayed(step, sampled, next_state, rows)

    def evaluate(self, step: Step, kernel: Kernel, rows: Tensor | None, taken: Tensor) -> Replayed:
        """A step from which `taken` was drawn."""
        transition = kernel.transition(step, self.head)
        return self._replayed(step, transition if rows is None else of_rows(transition, rows), taken, rows)

    def _replayed(self, step: Step, transition: Transition, next_state: Tensor, rows: Tensor | None) -> Replayed:
        output = step.model_output if rows is None else step.model_output[rows.to(step.model_output.device)]
        random = bool(transition.random)
        logp = log_prob(next_state, transition.mean, transition.std, self.reduction, checked=random)
        return Replayed(logp, transition.mean, transition.std, output, step)


@dataclass
class Recording:
    """One run of some steps of the schedule, up to `stop`, told of by the pipeline step by step (`Policy.roll_out` has
    the arguments)."""

    actions: Actions
    batch: Batch
    kernel: Kernel
    stochastic: Container[int]
    stop: int | None
    children: Children | None
    predict: bool
    keep: Collection[int]
    seen: int = 0
    """Steps so far."""
    initial: Tensor | None = None
    final: Tensor | None = None
    predicted: Tensor | None = None
    states: dict[int, Tensor] = field(default_factory=dict)
    next_states: dict[int, Tensor] = field(default_factory=dict)
    log_probs: dict[int, Tensor] = field(default_factory=dict)
    graphs: dict[int, Replayed] = field(default_factory=dict)

    def on_step(self, step: Step) -> Tensor:
        """The next state. Leaves the pipeline after a step that branches: its loop would go on with as many rows as it
        began with."""
        # From here, not from `prepare_latents`: a pipeline may change its latents before the first step (masks,
        # packing).
        if self.seen == 0:
            self.initial = step.state
        self.seen += 1
        i, head = step.index, self.actions.head
        transition = (self.kernel if i in self.stochastic else ODE).transition(step, head)
        self.final = transition.mean.detach()
        if self.predict:
            self.predicted = predicted_clean(head, step)
        branching = self.children if self.stop is not None and i == self.stop - 1 else None
        # A step without noise (the last one of most kernels) has no density, and so nothing that could be trained.
        if i in self.stochastic and transition.random:
            self.final = self._record(step, transition, branching)
        elif branching is not None:
            raise ValueError(f"step {i} branches, but its transition has no variance: its children would be equal")
        if branching is not None:
            raise Leave
        if self.keep:  # of the next model call, which the pipeline makes from here
            torch.set_grad_enabled(i + 1 in self.keep)
        return self.final

    def on_end(self, state: Tensor) -> None:
        """`state` is what the pipeline goes on with after the last step, which is not the state that this led to where
        it changes states between its steps (inpainting)."""
        self.final = state

    def _record(self, step: Step, transition: Transition, branching: Children | None) -> Tensor:
        i = step.index
        rows = None if branching is None else branching.parent_row
        noise = step_noise(step.state.shape[1:], i, self.batch.keys, branching)
        next_state, recorded = self.actions.sample(step, transition, rows, noise)
        self.log_probs[i] = recorded.log_prob.detach()
        if i in self.keep:
            self.graphs[i] = recorded
        self.states[i], self.next_states[i] = step.state, next_state
        # Children are rows of the next segment, of which there are more than here.
        if branching is None:
            self.states[i + 1] = next_state
        return next_state

    def trajectory(self, sigmas: Tensor, stop: int) -> Trajectory:
        """All of it, once the steps before `stop` are done; sigmas: the full schedule."""
        assert self.initial is not None and self.final is not None
        return Trajectory(
            self.batch, self.kernel, self.states, self.next_states, self.log_probs, self.final, sigmas, stop,
            self.initial, self.children, self.predicted, self.graphs,
        )  # fmt: skip
