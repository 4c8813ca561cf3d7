"""Calls of a pipeline that begin at a given state and may be left within a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion.policy.interfaces import Decoder, Pipeline
from genrl.diffusion.policy.scheduler import PolicyHead, Request, Step
from genrl.diffusion.policy.trajectory import Batch
from genrl.mdp.noise import derive_seed


class Leave(Exception):
    """Leaves the pipeline from within `scheduler.step`; the rest of the call is not needed."""


class PipelineCalls:
    """How a pipeline, whose scheduler is `head`, is called for a `Batch`."""

    latents_shape: torch.Size
    """Of the latents that the last call made."""

    def __init__(self, pipe: Pipeline, head: PolicyHead, denoiser: nn.Module, autocast: torch.dtype | None) -> None:
        self.pipe, self.head, self.denoiser, self.autocast = pipe, head, denoiser, autocast
        self._injected: Tensor | None = None
        self._wrap_prepare_latents()
        if autocast is not None:
            _decode_in_own_precision(pipe)

    @property
    def device(self) -> torch.device:
        return next(self.denoiser.parameters()).device

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
        if grad:
            call = call.__wrapped__  # type: ignore[attr-defined]
        generators = [
            torch.Generator().manual_seed(derive_seed(*key, "initial")) for key in batch.initial_keys or batch.keys
        ]
        self.head.request, self._injected = request, state
        try:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                output = call(
                    self.pipe,
                    prompt=list(batch.prompts),  # some pipelines overwrite the list
                    generator=generators,
                    output_type=output_type,
                    return_dict=False,
                    **_per_prompt(batch.sampling, len(batch)),
                    **batch.inputs,
                )
            return output[0]
        except Leave:
            return None
        finally:
            self.head.request, self._injected = Request(), None

    def leave_at(self, batch: Batch, request: Request, state: Tensor) -> Step:
        """The first step of a call that is left there, before anything is done with its model output."""
        seen: list[Step] = []

        def on_step(step: Step) -> Tensor:
            seen.append(step)
            raise Leave

        request.on_step = on_step
        self(batch, request, state=state, grad=torch.is_grad_enabled())
        return seen[0]

    def check_shape(self, step: Step) -> None:
        """Raise ValueError where the pipeline could not be resumed from the state of this step."""
        if step.state.shape != self.latents_shape:
            raise ValueError(
                f"{type(self.pipe).__name__} hands states of shape {tuple(step.state.shape)} to its scheduler and "
                f"latents of shape {tuple(self.latents_shape)} to its loop: not all of them are denoised, or "
                "they are packed in between; no state can be resumed"
            )

    def _wrap_prepare_latents(self) -> None:
        original = self.pipe.prepare_latents

        @functools.wraps(original)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            latents = made[0] if isinstance(made, tuple) else made
            self.latents_shape, self.head.latents_dtype = latents.shape, latents.dtype
            if self._injected is None:
                return made
            if latents.shape != self._injected.shape:
                raise ValueError(
                    f"{type(self.pipe).__name__}.prepare_latents makes latents of shape {tuple(latents.shape)}, its "
                    f"loop runs on states of shape {tuple(self._injected.shape)}: no state can be resumed"
                )
            given = self.head.hold(self._injected.to(latents.device))
            return (given, *made[1:]) if isinstance(made, tuple) else given

        self.pipe.prepare_latents = prepare_latents


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
