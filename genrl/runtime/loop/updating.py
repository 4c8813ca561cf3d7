"""The one inner loop of all kinds of runs, and what every method shares around it: dealing, measuring, checking.

A method makes what its loss reads (`prepare`) and computes that loss; `descend` does what all have in common: the
passes of one optimiser step, those of processes that have nothing of a part, memory that runs out, the step itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from genrl.mdp.noise import generator
from genrl.objectives.groups import GroupStatistics
from genrl.objectives.policy_losses import SurrogateOutput
from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.recorded import Recorded

Part = TypeVar("Part")
Results = Mapping[str, Tensor]
Loss = Callable[[Any, Any, Recorded], Results]
"""(settings, what is trained, what was recorded) -> "loss" [B] or [], and what else is to be measured or dumped."""
CAUSES = "Look for dropout, statistics that change, or another device or precision."
"""Why a policy may not be what it was when it acted."""
EVIDENCE = ("model_output", "log_prob", "mean", "std")
"""What losses return for dumps and no metric."""


def descend(
    loop: Loop,
    settings: Any,
    called: Any,
    parts: Iterable[Part],
    prepare: Callable[[Part], Recorded | None],
    loss: Loss,
    *,
    divisor: float = 1.0,
    groups: Sequence[str] | None = None,
    done: Callable[[Part], float] | None = None,
    measure: Callable[[Part, Results, Recorded], None] = lambda part, results, recorded: None,
    idle: Callable[[], Tensor] | None = None,
    before_step: Callable[[], bool | None] = lambda: None,
) -> dict[str, float]:
    """One optimiser step by the gradient of the sum of the losses of `parts` over `divisor`; the norms of the gradients
    of the stepped groups of parameters by name (None = all groups). All processes call it alike.

    called: what the loss is called with. prepare(part): all that the loss reads; None = this process has nothing of it.
    idle(): the loss, 0, of a pass without samples, where every process must make as many passes as the others because
    they hold the weights in shards. done(part): how much of the running phase it is; None = as `Loop.phase` was told.
    measure(part, results, recorded): is told what came of each. before_step(): is called by all processes once the
    gradients are there; where it returns False, they are dropped, no step is made, and there are no norms.
    """
    for part in parts:
        # Memory may run out in any of these: the iteration is then done again in smaller micro-batches.
        with loop.fitting():
            recorded = prepare(part)
            if recorded is not None:
                results = loss(settings, called, recorded)
                _backward(loop, settings, results, recorded, divisor)
            elif idle is not None and loop.weights.in_step:
                _backward(loop, settings, {"loss": idle()}, Recorded(None, {}), divisor)
        # Also for a part of which this process has nothing: watchdog and progress go by it.
        loop.advance(loop.process.progress.each if done is None else done(part))
        if recorded is not None:
            measure(part, results, recorded)
    loop.check_stop()  # before anything else is said between processes: memory may have run out in one of them
    if before_step() is False:
        loop.optimizer.zero_grad(set_to_none=True)
        return {}
    # Processes without a part step too: gradients are summed over all of them.
    return loop.optimization.step(groups)


def _backward(loop: Loop, settings: Any, results: Results, recorded: Recorded, divisor: float) -> None:
    if loop.process.accelerator.num_processes == 1:  # several leave together, which they agree on after the last part
        loop.check_stop()
    loop.optimization.backward(settings, results, recorded, divisor=divisor)
    if loop.after_backward is not None:
        loop.after_backward()


class Dealt(NamedTuple):
    """A part of what all processes have. mine int64 [n]: which of this process's; every int64 [N]: which of all
    processes', one process's after the other's; most: the n of the process that has most."""

    mine: Tensor
    every: Tensor
    most: int


def deal(counts: Sequence[int], process: int, parts: int, *keys: int | str) -> Iterator[Dealt]:
    """All of what the processes have (counts: each of them), in `parts` parts, in an order that the keys decide: one of
    all processes' things, so it does not depend on how many processes there are. The parts differ by one at most, so
    that none is a small remainder; a process may have nothing of a part. Where there is nothing, there is no part."""
    if not sum(counts):
        return
    # Things are numbered over all processes, one after the other; `ends` says whose a number is.
    ends = torch.tensor(counts).cumsum(0)
    order = torch.randperm(sum(counts), generator=generator(*keys))
    for some in order.tensor_split(parts):
        owner = torch.bucketize(some, ends, right=True)
        yield Dealt(some[owner == process] - sum(counts[:process]), some, int(owner.bincount().max()))


def summed(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums by name over all processes, of which some may lack a name."""
    every = gather_object([dict(sums)])
    return {
        name: sum(sums_of.get(name, 0.0) for sums_of in every)
        for name in dict.fromkeys(n for sums_of in every for n in sums_of)
    }


def require_on_policy(off: float, allowed: float, what: str, *, causes: str) -> None:
    """Raise RuntimeError where what sampling recorded and what is replayed before the first update are further apart
    than `allowed`, or by NaN: ratios would compare with another policy than the one that acted."""
    if not off <= allowed:
        raise RuntimeError(
            f"before the first update {what} is off by {off:.3g}, more than {allowed:.3g}: training does not replay "
            f"what sampling did. {causes}"
        )


class Meter:
    """Measures an iteration: values of samples, which processes have different ones of, and notes of what all know.

    The result of values is their mean, weighted where they have weights (`*/std`: standard deviation, `*/max_abs_dev`:
    maximum); that of notes the mean over the times they were made.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._weights: dict[str, list[Tensor]] = defaultdict(list)
        self._notes: dict[str, list[float]] = defaultdict(list)

    def note(self, figures: Mapping[str, float]) -> None:
        """What all processes know alike: figures of an optimiser step or of a whole iteration."""
        for name, value in figures.items():
            self._notes[name].append(value)

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Values [any] of this process, with weights of the same shape; None = 1 each, 0 = not counted."""
        # In float64: the order of the sums depends on how many processes there are.
        flat = values.detach().flatten().double().cpu()
        weight = torch.ones_like(flat) if weights is None else weights.detach().flatten().double().cpu()
        counted = weight > 0
        self._values[name].append(flat[counted])
        self._weights[name].append(weight[counted])

    def add_all(self, results: Results, weight: Tensor | None = None) -> None:
        """What a loss returned, by name, without what it keeps for dumps alone (`EVIDENCE`). weight: along the last
        dimension, or [] of all."""
        for name, values in results.items():
            if name not in EVIDENCE:
                self.add(name, values, None if weight is None else weight.expand_as(values))

    def add_spread(self, statistics: GroupStatistics) -> None:
        """How different the rewards within groups are."""
        self.note({"zero_std_ratio": statistics.zero_std_ratio, "group_std_mean": statistics.mean_std})

    def add_advantages(self, advantages: Tensor, clip: float) -> None:
        """Note advantages of all processes alike; those of 0 are not trained."""
        trained = advantages[advantages != 0]
        size = float(trained.abs().mean()) if len(trained) else 0.0
        clipped = float((trained.abs() >= clip).double().mean()) if len(trained) else 0.0
        self.note({"advantage/abs_mean": size, "advantage/clipped": clipped})

    def add_surrogate(self, surrogate: SurrogateOutput, advantage: Tensor, weight: Tensor | None = None) -> None:
        """weight: of each transition in the loss; those of 0 are not trained and not counted."""
        ratio = surrogate.ratio
        trained = None if weight is None else weight > 0
        self.add("loss/policy", surrogate.loss, weight)
        self.add("ratio/mean", ratio, trained)
        self.add("ratio/std", ratio - 1.0, trained)  # about 1, where squares would lose what distinguishes ratios
        self.add("ratio/max_abs_dev", (ratio - 1.0).abs(), trained)
        self.add("clip_frac_high", surrogate.clipped & (advantage > 0), trained)
        self.add("clip_frac_low", surrogate.clipped & (advantage < 0), trained)

    def result(self) -> dict[str, float]:
        """Name -> value over all processes; the same on each."""
        totals = {}
        for name, values in self._values.items():
            v, w = torch.cat(values), torch.cat(self._weights[name])
            if len(v):
                squares = float((w * v.square()).sum())
                totals[name] = (float((w * v).sum()), float(w.sum()), float(v.max()), squares)
        everyone: list[dict[str, tuple[float, float, float, float]]] = gather_object([totals])
        row = {name: sum(values) / len(values) for name, values in self._notes.items()}
        # In the same order in all processes, of which some may lack a name.
        for name in sorted({name for totals_of in everyone for name in totals_of}):
            pieces = [totals_of[name] for totals_of in everyone if name in totals_of]
            count = sum(p[1] for p in pieces)
            # fsum, so that the figure does not depend on the order of the processes.
            mean = math.fsum(p[0] for p in pieces) / count
            if name.endswith("/max_abs_dev"):
                row[name] = max(p[2] for p in pieces)
            elif name.endswith("/std"):
                # The difference of two sums may come out below 0 by rounding where all values are equal.
                row[name] = math.sqrt(max(0.0, math.fsum(p[3] for p in pieces) / count - mean**2))
            else:
                row[name] = mean
        return row
