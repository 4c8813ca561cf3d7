"""The one inner loop of policies in simulation: the micro-batches of an update, from what was recorded to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from genrl.runtime.loop.recorded import Recorded
from genrl.vla.rollout.sampling import Acting
from genrl.vla.run import VLARun

Loss = Callable[[Any, Acting, Recorded], dict[str, Tensor]]
"""(settings, policy and sampler, what was recorded) -> "loss" [], and sums of figures by name."""
Record = Callable[[], Recorded]
"""Makes what the loss of a micro-batch reads, when its turn has come."""


def gradients(
    run: VLARun,
    settings: Any,
    loss: Loss,
    acting: Acting,
    parts: Iterable[tuple[int, Record]],
    idle: Record | None = None,
) -> dict[str, Tensor]:
    """Add the gradients of an update's micro-batches; returns the sums [] of what their losses found, on the CPU.

    parts: how much of the running phase each one is, and its record. A process that has nothing of a part (0) makes a
    pass all the same where it is given `idle`: the others need its share of the weights. After this comes `loop.step`.
    """
    loop = run.loop
    sums: dict[str, Tensor] = {}
    with torch.set_grad_enabled(True):
        for count, record in parts:
            results, recorded = {"loss": torch.zeros(())}, Recorded(None, {})
            with loop.fitting():
                if count or idle is None:
                    recorded = record()
                    results = loss(settings, acting, recorded)
                    sums = {name: sums.get(name, 0.0) + value.detach().cpu() for name, value in results.items()}
                elif loop.weights.in_step:  # sharded: a forward gathers the weights of all, so all make as many
                    recorded = idle()
                    results = {"loss": 0.0 * loss(settings, acting, recorded)["loss"]}
                loop.backward(settings, results, recorded)
            loop.advance(count)
    loop.check_stop()  # who ran out of memory asks here, before anything else is said between processes
    return sums
