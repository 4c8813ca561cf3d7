"""Runs that are stopped by a gradient that is not finite, and what `genrl replay` makes of their dump."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.config import RunConfig
from genrl.config.method import Method
from genrl.runtime.loop import frame
from genrl.runtime.loop.guards import NonFiniteError
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.replay import Replay, replay
from genrl.runtime.weights.optimization import Optimization


class Planted(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, iteration: int) -> Iterator[list[Tensor]]:
    """The first loss of that iteration with a gradient gets one of NaN; the list gets the norm that it had."""
    norms: list[Tensor] = []
    backward = Optimization.backward

    def plant(
        self: Optimization, settings: Method, results: Mapping[str, Tensor], recorded: Recorded, *, divisor: float
    ) -> None:
        loss = results["loss"]
        if not norms and self.iteration == iteration and loss.requires_grad:
            parameters = list(self.weights.named.values())
            whole = loss.sum() / divisor * self.loss_scale
            result = torch.autograd.grad(whole, parameters, retain_graph=True, allow_unused=True)
            reached = [g for g in result if g is not None]
            norm = torch.stack(torch._foreach_norm(reached)).sum() if reached else 0  # none: a critic's step
            if norm > 0:  # a micro-batch of groups without spread teaches nothing
                norms.append(norm)
                results = {**results, "loss": Planted.apply(loss)}
        backward(self, settings, results, recorded, divisor=divisor)

    with monkeypatch.context() as patched:
        patched.setattr(Optimization, "backward", plant)
        yield norms


def replayed(config: RunConfig, monkeypatch: pytest.MonkeyPatch, resume: Path | None = None) -> Replay:
    """Train or go on, stop in the second iteration, and replay: what the loss was made of and came to is the same."""
    with planted(monkeypatch, 1) as norms, pytest.raises(NonFiniteError) as error:
        frame.train(config, resume=resume)
    assert error.value.dump is not None
    again = replay(error.value.dump)
    assert again.dump.step == 1 and again.dump.results.keys() <= again.tensors.keys()
    for name, tensor in again.dump.results.items():
        torch.testing.assert_close(again.tensors[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert torch.equal(again.tensors["gradient"], norms[0])
    return again
