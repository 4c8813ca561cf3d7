"""The section `optimizer`, and the optimisers that it can name. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from genrl.config.errors import Finding
from genrl.config.section import Count, Fraction, NonNegative, Positive, Section, Text, Whole


class Known(NamedTuple):
    """One optimiser. source: "module:class"; state_bytes: per trained parameter; shards: whether its state is saved and
    put back where weights are sharded; betas: whether it takes them; install: its package."""

    source: str
    state_bytes: float
    shards: bool = False
    betas: bool = True
    install: str = ""


OPTIMIZERS = {
    "adamw": Known("torch.optim:AdamW", 8, shards=True),
    "adamw_8bit": Known("torchao.optim:AdamW8bit", 2 + 8 / 256, install="torchao"),
    "adafactor": Known("torch.optim:Adafactor", 0, betas=False),
    "lion": Known("lion_pytorch:Lion", 4, shards=True, install="lion-pytorch"),
    "muon": Known("genrl.runtime.weights.optimizers:Muon", 4),
    "prodigy": Known("prodigyopt:Prodigy", 16, install="prodigyopt"),
}
LEAST_PRODIGY = 0.01
LARGEST_COPY = 32_000_000
"""Most trained numbers of which a copy is kept at the beginning of every iteration, in full fine-tuning."""


class Optimizer(Section):
    """The optimiser and its schedule (docs/optimizers.md)."""

    name: Text = "adamw"
    """adamw, adamw_8bit (torchao), adafactor, lion, muon (AdamW for everything that is not a matrix), prodigy, or a
    class: package.module:Class, path/file.py:Class."""
    args: dict[str, Any] = {}
    """Further arguments of the optimiser, for example {eps: 1e-6}."""
    lr: Positive = 3e-4
    """Learning rate (Flow-GRPO and DiffusionNFT with LoRA: 3e-4; full fine-tuning: about 1e-5)."""
    betas: tuple[Fraction, Fraction] | None = None
    """Its two averaging factors; null = its own: (0.9, 0.999), lion's (0.9, 0.99)."""
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay (Flow-GRPO: 1e-4)."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm (all peers: 1)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0 at the end of the run."""
    schedule_iterations: Count | None = None
    """Iterations over which it falls, to a tenth that stays, whatever the run's number; null = those of the run."""
    warmup_steps: Whole = 0
    """Optimiser steps in which the learning rate rises from 0."""

    @property
    def lowest(self) -> float:
        """Share of lr that it does not fall below: a run that goes on after the fall is to learn something."""
        return 0.1 if self.schedule_iterations is not None else 0.0

    @property
    def state_bytes(self) -> float:
        """What it keeps per trained parameter; one of another package is taken to keep AdamW's two moments."""
        return OPTIMIZERS.get(self.name, OPTIMIZERS["adamw"]).state_bytes

    def problems(self, sharded_by: str | None) -> Iterator[Finding]:
        """What can be told without importing the optimiser, which `check_optimizer` does. sharded_by: the key that
        shards what is trained, if any."""
        name, entry = self.name, OPTIMIZERS.get(self.name)
        if entry is None and ":" not in name:
            near = get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            text = f"unknown optimiser {name!r}; {hint}they are: {', '.join(OPTIMIZERS)}; or name a class"
            yield ("optimizer.name",), f"{text}: package.module:Class"
        if sharded_by is not None and (entry is None or not entry.shards):
            can = " or ".join(other for other, row in OPTIMIZERS.items() if row.shards)
            yield ("optimizer.name", sharded_by), f"the state of {name} cannot be sharded; write {can}"
        if self.betas is not None and entry is not None and not entry.betas:
            yield ("optimizer.betas", "optimizer.name"), f"{name} has no betas; leave them out"
        if self.schedule == "constant" and self.schedule_iterations is not None:
            text = "a constant rate does not fall; write schedule: linear or cosine, or leave it out"
            yield ("optimizer.schedule_iterations", "optimizer.schedule"), text
        # Prodigy finds its own step size: at a usual rate it would run, and learn nothing, without a word.
        if name == "prodigy" and self.lr < LEAST_PRODIGY:
            text = f"prodigy finds its own step size, and lr is a factor on it: write 1, not {self.lr:g}"
            yield ("optimizer.lr", "optimizer.name"), text

    def missing_package(self) -> str | None:
        """Why it cannot be imported here, and what to install; None where its package is there."""
        entry = OPTIMIZERS.get(self.name)
        source = entry.source if entry is not None else self.name
        package = source.partition(":")[0].partition(".")[0]
        if source.rpartition(":")[0].endswith(".py"):
            file = Path(source.rpartition(":")[0])
            return None if file.is_file() else f"the file {file} does not exist (looked from {Path.cwd()})"
        if find_spec(package) is not None:
            return None
        if entry is None:
            return f"the package {package} is not installed: install it, or write one of {', '.join(OPTIMIZERS)}"
        return f"{self.name} needs the package {entry.install}: pip install {entry.install}, or write adamw"
