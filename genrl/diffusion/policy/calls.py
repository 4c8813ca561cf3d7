"""Calls of a pipeline that begin at a given state and may be left within a step, and what a policy does at the steps of
such a call: it samples from their transitions, or evaluates recorded ones."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from genrl.diffusion.policy.interfaces import Decoder, Pipeline
from genrl.diffusion.policy.scheduler import PolicyHead, Request, Step, leading, leads
from genrl.diffusion.policy.trajectory import ODE, Batch, Children, Kernel, Replayed, Trajectory, of_rows, step_noise
from genrl.mdp.kernels import Reduction, Transition, log_prob, sample


class Leave(Exception):
    """Leaves the pipeline from within `scheduler.step`; the rest of the call is not needed."""


class PipelineCalls:
    """How a pipeline, whose scheduler is `head`, is called for a `Batch`."""

    _made: Tensor
    """Latents that the last call made."""
    samples: int
    """Of the last call."""
    blends: bool
    """Whether the pipeline puts the picture into the states between its steps, where a mask says (inpainting)."""

    def __init__(self, pipe: Pipeline, head: PolicyHead, denoiser: nn.Module, autocast: torch.dtype | None) -> None:
        self.pipe, self.head, self.denoiser, self.autocast = pipe, head, denoiser, autocast
        self._injected: Tensor | None = None
        takes = inspect.signature(type(pipe).__call__).parameters
        self._tells_ends = "callback_on_step_end" in takes
        self.blends = "mask_image" in takes
        self._only_encode = False
        self._wrap_prepare_latents()
        if callable(getattr(pipe, "get_timesteps", None)):
            self._wrap_get_timesteps()
        if autocast is not None:
            _decode_in_own_precision(pipe)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.pipe._execution_device
        return device

    def __call__(
        self,
        batch: Batch,
        request: Request,
        *,
        state: Tensor | None = None,
        output_type: str = "latent",
        grad: bool = False,
    ) -> Any:
        """One pipeline call. Returns its pictures, or None where the call was left from within a step."""
        call: Callable[..., Any] = type(self.pipe).__call__
        # Pipelines are called under `no_grad` by a decorator; below it is the same call, with gradients.
        if grad:
            call = call.__wrapped__  # type: ignore[attr-defined]
        # On the CPU: a seed is the same noise on every device.
        generators = [torch.Generator().manual_seed(seed) for seed in batch.initial_seeds]
        # `expose` adds a step for a call that is left at its end; a loop without that callback would run it.
        if not self._tells_ends:
            request.on_end = None
        ends = {} if request.on_end is None else {"callback_on_step_end": self._tell_end}
        self.head.request, self._injected, self.samples = request, state, len(batch)
        try:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                output = call(
                    self.pipe,
                    prompt=list(batch.prompts),  # some pipelines overwrite the list
                    generator=generators,
                    output_type=output_type,
                    return_dict=False,
                    **ends,
                    **_per_prompt(batch.sampling, len(batch)),
                    **{name: _unwrapped(values) for name, values in batch.inputs.items()},
                )
            return output[0]
        except Leave:
            return None
        # A RuntimeError too, but not to be explained: it is answered by smaller micro-batches.
        except torch.OutOfMemoryError:
            raise
        # What diffusers and torch raise for arguments that do not fit each other, mostly without a word on which.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            explanation = self._explained(error)
            if explanation is None:
                raise
            raise ValueError(explanation) from error
        finally:
            # Nothing of this call may reach the next one, which may be a plain one.
            self.head.request, self._injected = Request(), None

    def _explained(self, error: Exception) -> str | None:
        """What an error that was raised within diffusers says of the pipeline."""
        frames = traceback.extract_tb(error.__traceback__)
        packages = [_package(frame.filename) for frame in frames]
        if "diffusers" not in packages or "genrl" in packages[packages.index("diffusers") :]:
            return None  # what a step or a head of ours raised is addressed already
        if any("/torch/distributed/" in frame.filename for frame in frames):
            return None  # of another process
        # The innermost frame of diffusers, not of torch below it: it shows the line of the pipeline's loop.
        frame = next(
            frame_summary
            for frame_summary, package in zip(frames[::-1], packages[::-1], strict=True)
            if package == "diffusers"
        )
        where = f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
        message = f"{type(error).__name__}: {error}".rstrip(": ")
        return f"{type(self.pipe).__name__} cannot be called so; diffusers ends in {message} ({where})"

    def state_shape(self, batch: Batch) -> torch.Size:
        """[B, ...]: that of the latents, or of what the pipeline gives back of them where conditions stand behind."""
        latents: Tensor = self(batch, Request(empty=True))
        return latents.shape if leads(latents.shape, self._made.shape) else self._made.shape

    def encode(self, batch: Batch) -> None:
        """The beginning of a call, in which prompts are encoded; it is left where latents are made."""
        self._only_encode = True
        try:
            self(batch, Request())
        finally:
            self._only_encode = False

    def leave_at(self, batch: Batch, request: Request, state: Tensor) -> Step:
        """The first step of a call that is left there, before anything is done with its model output."""
        steps: list[Step] = []

        def on_step(step: Step) -> Tensor:
            steps.append(step)
            raise Leave

        request.on_step = on_step
        self(batch, request, state=state, grad=torch.is_grad_enabled())
        return steps[0]

    def _tell_end(self, pipe: Any, i: int, t: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """A pipeline's callback at the end of a step. Leaves the pipeline after the last one of a segment, unless it is
        the last of all."""
        request, done = self.head.request, self.head.next_index
        length = len(self.head.full_timesteps)
        stop = length if request.stop is None else request.stop
        if request.on_end is not None and done == stop:
            if "latents" in tensors:
                request.on_end(self.head.denoised(tensors["latents"]))
            if stop < length:
                raise Leave
        return {}

    def check_shape(self, step: Step) -> None:
        """Raise ValueError where the pipeline could not be resumed from the state of this step."""
        state, latents = step.state, self._made
        if state.shape == latents.shape:
            return
        # In some (Kandinsky 5) states come first, conditions behind them, and each step is written into the whole.
        if not leads(state.shape, latents.shape) or not torch.equal(
            leading(latents, state.shape), state.to(latents.dtype)
        ):
            raise ValueError(
                f"{type(self.pipe).__name__} hands states of shape {tuple(state.shape)} to its scheduler and "
                f"latents of shape {tuple(latents.shape)} to its loop: not all of them are denoised, or "
                "they are packed in between; no state can be resumed"
            )

    def _wrap_prepare_latents(self) -> None:
        original = self.pipe.prepare_latents

        @functools.wraps(original)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            # Prompts are encoded by now, and nothing else of the call is wanted.
            if self._only_encode:
                raise Leave
            result = original(*args, **kwargs)
            latents = result[0] if isinstance(result, tuple) else result
            self._made, self.head.latents_dtype = latents, latents.dtype
            if self._injected is None:
                return result
            if not leads(self._injected.shape, latents.shape):
                raise ValueError(
                    f"{type(self.pipe).__name__}.prepare_latents makes latents of shape {tuple(latents.shape)}, its "
                    f"loop runs on states of shape {tuple(self._injected.shape)}: no state can be resumed"
                )
            state = self.head.hold(self._injected.to(latents.device))
            if state.shape != latents.shape:
                leading(latents, state.shape).copy_(state)
                state = latents
            return (state, *result[1:]) if isinstance(result, tuple) else state

        self.pipe.prepare_latents = prepare_latents

    def _wrap_get_timesteps(self) -> None:
        """Pipelines that start from a picture cut their schedule by its `strength`: they are given the whole of it, and
        go on with the segment of what they left."""
        pipe: Any = self.pipe
        original, takes = pipe.get_timesteps, inspect.signature(pipe.get_timesteps)
        if "sigmas" in takes.parameters:  # cut before the scheduler is asked (LTX conditions)
            return

        @functools.wraps(original)
        def get_timesteps(*args: Any, **kwargs: Any) -> Any:
            arguments = takes.bind(*args, **kwargs).arguments
            further: list[Any] = []

            def cut(steps: int, timesteps: Tensor) -> Tensor:
                uncut = {"num_inference_steps": steps, "timesteps": timesteps}
                timesteps_left: Tensor
                timesteps_left, *further[:] = original(
                    **arguments | {name: uncut[name] for name in uncut.keys() & arguments.keys()}
                )
                return timesteps_left

            return self.head.recut(cut), *further

        pipe.get_timesteps = get_timesteps


def _package(file: str) -> str:
    """Name of the package, diffusers or this one, to which a file belongs."""
    homes = {"diffusers": Path(diffusers.__file__).parent, "genrl": Path(__file__).parents[2]}
    return next((name for name, home in homes.items() if home in Path(file).parents), "")


def _unwrapped(values: Sequence[Any]) -> Any:
    """The picture of one sample itself: some pipelines take no list, and all that take one take a picture, too."""
    return values[0] if len(values) == 1 else values


def _per_prompt(arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
    """One negative prompt for all: some pipelines refuse a string beside a list of prompts."""
    return {
        name: [value] * length if name.startswith("negative_prompt") and isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _decode_in_own_precision(pipe: Pipeline) -> None:
    """Take the decoder out of autocast, which is meant for the denoiser: in bfloat16 pictures lose shades."""
    decoder = pipe.components.get("vae")
    if not isinstance(decoder, nn.Module) or not isinstance(decoder, Decoder):
        return
    original = decoder.decode

    @functools.wraps(original)
    def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(latents.device.type, enabled=False):
            return original(latents.to(decoder.dtype), *args, **kwargs)

    decoder.decode = decode


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
