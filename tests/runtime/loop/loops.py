"""A loop over two parameters, in groups of their own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.config.method import Method
from genrl.config.sections import EMA, Checkpoint, Monitor, Optimizer
from genrl.runtime.folder.metrics import MetricLogger
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import updating
from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.process import Process, make_accelerator
from genrl.runtime.loop.progress import Progress
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.signals import Stop, Watchdog
from genrl.runtime.weights.optimization import Schedule
from genrl.runtime.weights.weights import Weights

RATES = {"policy": 0.1, "critic": 0.5}
METHOD = Method(algorithm="test")
RECORDED = Recorded(None, {"advantage": torch.ones(2)})


@dataclass
class Evaluation:
    every: int = 0
    monitor: Monitor | None = None
    on_collapse: str = "warn"


@dataclass
class Settings:
    iterations: int = 4
    idle_iterations: int | None = 5
    seed: int = 0
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=0.1, weight_decay=0.0, max_grad_norm=1e9))
    ema: EMA | None = None
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(every=100, keep=2))
    evaluation: Evaluation = field(default_factory=Evaluation)


class Two(nn.Module):
    """What is trained: two parameters."""

    def __init__(self, judge: Callable[[int], dict[str, float]]) -> None:
        super().__init__()
        self.policy = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.critic = nn.Parameter(torch.tensor([[4.0, 5.0]]))
        self.evaluate, self.size, self.forgotten = judge, 8, 0

    def export(self, folder: Path) -> None:
        (folder / "exported").write_text(str(self.policy.tolist()))

    def micro_batch_sizes(self) -> list[int]:
        return [self.size, self.size // 2] if self.size > 1 else [self.size]

    def resize(self, size: int) -> None:
        self.size = size

    def forget(self) -> None:
        self.forgotten += 1


class Quiet(Watchdog):
    """One that bites nobody."""

    def beat(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step


def loop(
    folder: Path,
    settings: Settings | None = None,
    *,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    evaluate: Callable[[int], dict[str, float]] = lambda iteration: {},
    retries: bool = False,
    **options: Any,
) -> Loop:
    """options: of the optimiser."""
    settings = settings or Settings()
    run, two = Run(folder / "run"), Two(evaluate)
    groups = [{"name": "policy", "params": [two.policy]}, {"name": "critic", "params": [two.critic]}]
    progress = Progress(settings.iterations, enabled=False)
    process = Process(make_accelerator(60), run, MetricLogger(run), progress, Quiet(run, 600), Stop())
    schedule = Schedule(settings.optimizer, RATES, settings.iterations)
    weights = Weights(dict(two.named_parameters()))
    return Loop(settings, process, weights, kind(groups, lr=1.0, **options), schedule, two, retries=retries)


def model(one: Loop) -> Two:
    assert isinstance(one.trained, Two)
    return one.trained


def backward(one: Loop, *, policy: float = 0.0, critic: float = 0.0) -> None:
    """A loss with these gradients, the same for every number of a group."""
    two = model(one)
    loss = policy * two.policy.sum() + critic * two.critic.sum()
    updating._backward(one, METHOD, {"loss": loss}, RECORDED, 1.0)


def values(one: Loop) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in one.weights.named.items()}


def moved(one: Loop, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in values(one).items() if not torch.equal(value, before[name])}
