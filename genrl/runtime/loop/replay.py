"""`genrl replay`: the micro-batch that stopped a run, run again, to find where its numbers stop being finite.

A dump (`loop.guards`) holds what the loss was made of, the settings of the method, what came of it and, where they
are not too many, the weights. The method's own `loss` is called on it, as training did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.config import RunConfig
from genrl.config import load as load_config
from genrl.config.method import class_of, code_of
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.frame import kind_of
from genrl.runtime.loop.guards import Dump, non_finite, read_dump
from genrl.runtime.loop.recorded import Dumpable, Recorded
from genrl.runtime.weights.devices import default_device, tf32, without_cudnn_attention
from genrl.runtime.weights.weights import Weights

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reopened:
    """A run's model without its run: what `replay` and nobody else needs."""

    policy: Any
    """What the method's `loss` is called with."""
    weights: Weights
    modules: Mapping[str, nn.Module]
    """Where the first output that is not finite is looked for."""
    batch: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Dumpable | None]
    """(JSON, tensors) of a dump -> what the policy was called with."""


@dataclass(frozen=True)
class Replay:
    """What a dump holds, and what came of running it again."""

    dump: Dump
    weights: str
    """Where the weights came from, in words."""
    recorded: Tensors
    """As the run had it, the weights left out."""
    tensors: Tensors
    """As it came out now, in the order of computation."""
    module: str | None
    """First module of the model whose output was not finite, with its class."""
    gradients: list[str]
    """Parameters whose gradient is not finite, in the order of the network."""


def replay(folder: Path, run: Path | None = None) -> Replay:
    """Run a dump again under the conditions that were recorded; run: its run folder, where it was moved out of it.

    Raises ValueError where the folder holds no dump, or there is no run around it.
    """
    if not (folder / "dump.json").is_file():
        raise ValueError(
            f"{folder} is no dump: it has no dump.json. A run that was stopped by a number that is not finite has its "
            "dumps in RUN/dumps/step-..."
        )
    # Dumps lie in RUN/dumps/NAME.
    source_run = Run(run or folder.resolve().parent.parent)
    if not source_run.config.is_file():
        raise ValueError(
            f"{source_run.folder} is not a run folder: it has no config.yaml. Name the dump's run by --run"
        )
    dump, config = read_dump(folder), load_config(source_run.config)
    without_cudnn_attention()
    with tf32(config.tf32):
        return _computed(dump, config, source_run)


def _computed(dump: Dump, config: RunConfig, source_run: Run) -> Replay:
    """Loss and gradients of a dump as the run would compute them."""
    device = default_device()
    opened = kind_of(config).reopen(config, device, dump.step)
    source = _put_weights(opened.weights, dump, source_run)
    settings = class_of(dump.info["settings"]["algorithm"], config.kind).model_validate(dump.info["settings"])
    tensors = {name: tensor for name, tensor in dump.batch.items() if not name.startswith("weights/")}
    batch = opened.batch(dump.info, tensors)
    # Inputs (pictures) stay on the CPU, where processors read them.
    inputs = {name: tensor.to(device) for name, tensor in tensors.items() if not name.startswith("inputs/")}
    with first_not_finite(opened.modules) as module:
        results_now = dict(code_of(settings).loss(settings, opened.policy, Recorded(batch, inputs)))
        results_now["loss"] = results_now.pop("loss")  # to the end: it is computed from the others
        (results_now["loss"].sum() / dump.info["divisor"] * dump.info["loss_scale"]).backward()
    gradients = {name: p.grad for name, p in opened.weights.named.items() if p.grad is not None}
    results_now["gradient"] = torch.stack(torch._foreach_norm(list(gradients.values()))).sum()
    results = {name: tensor.detach() for name, tensor in results_now.items()}
    recorded = tensors | dump.results | dump.checked
    return Replay(dump, source, recorded, results, next(iter(module), None), non_finite(gradients))


def _put_weights(weights: Weights, dump: Dump, run: Run) -> str:
    dumped = {name.removeprefix("weights/"): t for name, t in dump.batch.items() if name.startswith("weights/")}
    if dumped:
        weights.restore({"weights": dumped})
        return "the dump's: those of the run at that moment"
    for path in checkpoint.steps(run.checkpoints):
        if int(path.name.removeprefix("step-")) <= dump.step and checkpoint.problem(path) is None:
            loaded = checkpoint.load(path)
            weights.restore(loaded.tensors)
            missed = dump.info["optimizer_steps"] - loaded.state["optimizer_steps"]
            return f"{path.name}'s, {missed} updates before that moment" if missed else f"{path.name}'s: as they were"
    return f"the model's before training: there is no checkpoint of step {dump.step} or before"


@contextmanager
def first_not_finite(modules: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """The list gets the first module that ends, within the block, with an output that is not finite."""
    bad: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, _: object, output: object) -> None:
            if not bad and any(not tensor.isfinite().all() for tensor in _tensors(output)):
                bad.append(f"{name} ({type(module).__name__})")

        return look

    handles = [
        module.register_forward_hook(watch(f"{component}.{name}" if name else component))
        for component, root in modules.items()
        for name, module in root.named_modules()
    ]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for value in output.values() for tensor in _tensors(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in _tensors(value))
