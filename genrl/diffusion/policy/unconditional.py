"""Guidance without a gradient through its unconditional prediction (`guidance_in_training: detached`):

    v = v_u + s (v_c - v_u)    with    dv = s dv_c    instead of    dv = s dv_c + (1 - s) dv_u

Values stay the same. Pipelines make the two predictions as halves of one call or in two calls, in either order. Which
is which is found by their factors, of which that of v_c is larger: |s| > |1 - s|.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.scheduler import Request
from genrl.diffusion.policy.trajectory import Batch


class Unconditional:
    """Takes the gradient from the unconditional predictions of a policy from now on. Finding them costs two model calls
    with `probe`, which are not counted. Raises ValueError where a step of it has no such prediction, or several."""

    def __init__(self, policy: Policy, probe: Batch) -> None:
        self._policy = policy
        self._seen: list[Tensor] | None = []
        """Predictions of the step in which they are found, in order; then None."""
        self._halves = False
        self._step: tuple[weakref.ref[Request], int] | None = None
        self._calls = 0
        """Of this step so far."""
        for denoiser in policy.denoisers.values():
            policy.hooks.append(denoiser.register_forward_pre_hook(self._before))
            policy.hooks.append(denoiser.register_forward_hook(self._after, always_call=True))
        self._first = self._find(probe)

    def _find(self, probe: Batch) -> bool:
        """Whether the unconditional prediction comes first of the two."""
        policy = self._policy
        with policy.uncounted():
            # Only the initial noise is of interest, at which one call is made again with a graph.
            state = policy.roll_out(probe, stop=1).initial
            assert state is not None
            with torch.enable_grad():
                output = policy.calls.leave_at(probe, Request(0, 1), state).model_output
        predictions, self._seen = self._seen or [], None
        name, key = type(policy.pipe).__name__, "trainer.guidance_in_training"
        if len(predictions) != 2:
            count = "one prediction" if len(predictions) == 1 else f"{len(predictions)} predictions"
            raise ValueError(f"{key}: {name} makes {count} per step here, not a conditional and an unconditional one")
        # Gradients along one direction, the same in every process, tell the two factors.
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        first_norm, other = (factor.norm() for factor in torch.autograd.grad(output, predictions, weight))
        if first_norm < other and not self._halves:  # the only call of a step without guidance would be taken for it
            raise ValueError(f"{key}: {name} makes the unconditional prediction in a call before the conditional one")
        return bool(first_norm < other)

    def _before(self, module: Any, args: Any) -> None:
        """A call of its own gets no graph, which saves its memory too."""
        if self._seen is not None or self._halves or not torch.is_grad_enabled():
            return
        request, index = self._policy.head.request, self._policy.head.next_index
        if self._step is None or self._step[0]() is not request or self._step[1] != index:
            self._step, self._calls = (weakref.ref(request), index), 0  # a request may hold on to a graph
        self._calls += 1
        if self._calls == 2:
            torch.set_grad_enabled(False)

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        if self._seen is None and not self._halves:
            if self._calls == 2 and not torch.is_grad_enabled():
                torch.set_grad_enabled(True)
                self._calls = 3
            return None
        if not torch.is_grad_enabled() or output is None:  # None: the call failed
            return None
        predicted, samples = output[0], self._policy.calls.samples
        rows = predicted if isinstance(predicted, Tensor) else torch.stack(predicted)  # Z-Image gives a list
        parts = list(rows.split(samples))
        if self._seen is not None:
            self._halves = len(parts) > 1
            # As leaves, so that `_find` can ask for the gradient to each; the network's own graph is not needed.
            parts = [part.detach().requires_grad_() for part in parts]
            self._seen += parts
        elif len(parts) == 2:  # one without guidance
            position = 0 if self._first else 1
            parts[position] = parts[position].detach()
        rows = torch.cat(parts)
        made = rows if isinstance(predicted, Tensor) else list(rows)
        return (made, *output[1:]) if isinstance(output, tuple) else replace(output, sample=made)
