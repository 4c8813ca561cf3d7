"""What every training loop does beside its algorithm: iterations, signals, optimiser steps, evaluations, checkpoints.

A `Loop` is one process of one run. It knows a module, whose parameters that need gradients are trained and saved, and
no algorithm.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn

from genrl.config import AnyConfig, dump
from genrl.config.method import Method, metrics_of
from genrl.config.sections import Checkpoint, Optimizer
from genrl.mdp.noise import derive_seed
from genrl.runtime import checkpoint, state
from genrl.runtime import run as run_folder
from genrl.runtime.guards import any_rank, non_finite, require_finite
from genrl.runtime.metrics import MetricLogger
from genrl.runtime.progress import Progress
from genrl.runtime.report import write_report
from genrl.runtime.run import Run, truncate_metrics
from genrl.runtime.signals import Stop, Watchdog, catch_stop


class Settings(Protocol):
    """What a configuration has of it."""

    @property
    def iterations(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def checkpoint(self) -> Checkpoint: ...


class Stateful(Protocol):
    """What a trainer keeps beside the model: a critic of its own, an optimiser, a data set."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


class Abandoned(Exception):
    """The process is to end, and the running iteration, which has changed nothing, is done again on resume."""


@dataclass
class Loop:
    """One process of one training run.

    rates: learning rate of each of the optimiser's parameter groups before its schedule, by the group's name; the
    schedule follows the iterations, its warm-up the optimiser steps of the group. every: iterations between
    evaluations, 0 = never.
    """

    settings: Settings
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rates: Mapping[str, float]
    run: Run
    log: MetricLogger
    progress: Progress
    watchdog: Watchdog
    stop: Stop
    every: int
    evaluate: Callable[[int], dict[str, float]]
    """Metrics of the model after so many iterations, the same in all processes; writes its pictures."""
    iteration: int = 0
    """Finished iterations."""
    optimizer_steps: int = 0
    updates: int = 0
    """Optimiser steps of the running iteration."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per phase of the running iteration."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a trainer keeps from one iteration to the next, as JSON; in the checkpoint."""
    kept: dict[str, Stateful] = field(default_factory=dict)
    """Beside the model (`keep`), by name."""
    unfinished_row: dict[str, float] | None = None
    """Metrics of the last iteration where its evaluation was left; kept in the checkpoint."""
    _restored: dict[str, dict[str, Any]] = field(default_factory=dict)
    _suspect: tuple[Mapping[str, Tensor], Mapping[str, object]] = field(default_factory=lambda: ({}, {}))
    """Evidence and info of the last backward pass, for a gradient that is not finite where its loss was."""
    _started: float = 0.0

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def is_complete(self) -> bool:
        return self.iteration >= self.settings.iterations

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def iterations(self) -> Iterator[int]:
        """The iterations still to do, 0-based; fewer where the process is asked to end."""
        if self.iteration == 0:
            self._evaluate(log=True)
        if self.unfinished_row is not None:
            row = self.unfinished_row | self._evaluate(log=False)
            if self.is_main:  # a run that was stopped again since has written this row before
                truncate_metrics(self.run.metrics, self.iteration - 1)
            self.log.log(self.iteration, row)
            self.unfinished_row = None
        while not self.is_complete and not any_rank(self.stop.requested, self.accelerator):
            self.timings.clear()
            self._started, self.updates = time.perf_counter(), 0
            # Nothing here draws from the global generators, but a user's simulator may.
            set_seed(derive_seed(self.settings.seed, "iteration", self.iteration, self._rank) % 2**32)
            yield self.iteration

    @property
    def _rank(self) -> int:
        return int(self.accelerator.process_index)

    def phase(self, name: str, total: int = 0) -> None:
        self.progress.phase(name, total)
        self.watchdog.beat(name, self.iteration)

    def advance(self, count: float) -> None:
        """So much of the running phase is done."""
        self.progress.advance(count)
        self.watchdog.beat(self.progress.name, self.iteration)

    def leave_if_asked(self) -> None:
        """Raise Abandoned in all processes where one was asked to end, and nothing was changed in this iteration."""
        if not self.updates and any_rank(self.stop.requested, self.accelerator):
            raise Abandoned

    def advance_or_leave(self, count: float) -> None:
        """`advance`; a process that is alone then leaves if it is asked to. Several must leave together, which costs a
        word to each other: they do so at the end of the phase."""
        self.advance(count)
        if self.accelerator.num_processes == 1:
            self.leave_if_asked()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - started

    def keep(self, name: str, thing: Stateful) -> None:
        """Save it with every checkpoint from here on; in a resumed run it gets back the state that was saved.

        Its state must be the same in all processes.
        """
        self.kept[name] = thing
        if name in self._restored:
            thing.load_state_dict(self._restored.pop(name))

    def backward(self, loss: Tensor, *, evidence: Mapping[str, Tensor], info: Mapping[str, object]) -> None:
        """Add the gradient of `loss` [], this process's share of the update's loss.

        Raises NonFiniteError in all processes where it is not finite in one; `evidence` and `info` are then dumped.
        """
        require_finite(
            {"loss": loss.detach()},
            where="loss",
            step=self.iteration,
            dumps=self.run.dumps,
            batch=evidence,
            info=info,
            accelerator=self.accelerator,
            replays=False,
        )
        self._suspect = ({name: value.detach() for name, value in evidence.items()}, info)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def step(self, groups: Sequence[str]) -> dict[str, float]:
        """Sum the gradients over the processes and step these parameter groups, the norm of each clipped by itself.

        Returns the norms before clipping. Raises NonFiniteError in all processes together; the weights are then
        untouched.
        """
        chosen = [group for group in self.optimizer.param_groups if group["name"] in groups]
        parameters = [p for group in chosen for p in group["params"]]
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradients = self._summed(mine)
        norms, first = {}, 0
        for group in chosen:
            own = gradients[first : first + len(group["params"])]
            first += len(group["params"])
            norms[group["name"]] = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
        guilty = bool(non_finite(norms)) and not all(bool(gradient.isfinite().all()) for gradient in mine)
        evidence, info = self._suspect if guilty else ({}, {})
        require_finite(
            norms,
            where="gradient",
            step=self.iteration,
            dumps=self.run.dumps,
            batch=evidence,
            info={**info, "optimizer_steps": self.optimizer_steps},
            accelerator=self.accelerator,
            replays=False,
        )
        self.optimizer.zero_grad(set_to_none=True)  # groups that are not stepped keep no gradient either
        settings, first = self.settings.optimizer, 0
        for group in chosen:
            norm = norms[group["name"]]
            group["steps"] = group.get("steps", 0) + 1  # its own: others may be trained alone before; in the checkpoint
            warm = min(group["steps"] - 1, settings.warmup_steps)  # a step of the warm-up, then an iteration
            step = warm if warm < settings.warmup_steps else warm + self.iteration
            total = settings.warmup_steps + self.settings.iterations
            group["lr"] = scheduled(self.rates[group["name"]], settings, step, total)
            for parameter in group["params"]:
                if norm > 0:  # else no decision counted, and momentum or decay alone must not move the weights
                    parameter.grad = gradients[first].mul_(min(1.0, settings.max_grad_norm / (float(norm) + 1e-6)))
                first += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        self.updates += 1
        return {name: float(norm) for name, norm in norms.items()}

    def _summed(self, gradients: list[Tensor]) -> list[Tensor]:
        """Over the processes; one collective."""
        if self.accelerator.num_processes == 1:
            return gradients
        flat = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
        pieces = flat.split([g.numel() for g in gradients])
        return [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)]

    def finish(self, metrics: Mapping[str, float]) -> None:
        """End of an iteration: log, and, where due, evaluate and save."""
        self.iteration += 1
        elapsed, last = time.perf_counter() - self._started, self.is_complete
        row = dict(metrics) | {
            "updates": float(self.updates),
            "memory/peak_mb": max(gather_object([peak_memory_mb(self.accelerator.device)])),
        }
        self.updates = 0
        if self.every and (self.iteration % self.every == 0 or last):
            self.unfinished_row = row | self._timing_row(elapsed)
            try:
                row |= self._evaluate(log=False)
            except Abandoned:  # asked to end: saving comes first, the row is written with its evaluation on resume
                return self.save()
            self.unfinished_row = None
        self.log.log(self.iteration, row | self._timing_row(elapsed))
        self.progress.finish_iteration(self.iteration, row)
        if self.iteration % self.settings.checkpoint.every == 0 or last:
            self.save()

    def _timing_row(self, elapsed: float) -> dict[str, float]:
        return {f"timing/{phase}_s": s for phase, s in self.timings.items()} | {"timing/iteration_s": elapsed}

    def _evaluate(self, *, log: bool) -> dict[str, float]:
        if not self.every:
            return {}
        set_seed(derive_seed(self.settings.seed, "evaluation", self.iteration, self._rank) % 2**32)
        with self.timed("eval"):
            found = self.evaluate(self.iteration)
        if log:
            self.log.log(self.iteration, found)
        return found

    def save(self) -> None:
        """Write a checkpoint of this moment: between two iterations, all that decides the rest of the run."""
        self.watchdog.beat("saving", self.iteration)
        if self.is_main:
            optimizer, packed = state.pack(self.optimizer.state_dict())
            kept = {name: state.pack(thing.state_dict()) for name, thing in self.kept.items()}
            checkpoint.save(
                self.run.checkpoints,
                self.iteration,
                tensors={"weights": dict(self.trained), "optimizer": optimizer}
                | {f"kept-{name}": tensors for name, (tensors, _) in kept.items()},
                state={
                    "optimizer_steps": self.optimizer_steps,
                    "optimizer": packed,
                    "unfinished_row": self.unfinished_row,
                    "memory": self.memory,
                    "kept": {name: tree for name, (_, tree) in kept.items()},
                },
                keep=self.settings.checkpoint.keep,
            )
        self.accelerator.wait_for_everyone()
        self.watchdog.beat("saving", self.iteration)

    def restore(self, path: Path) -> None:
        """Go back to the moment of a checkpoint."""
        loaded = checkpoint.load(path)
        put_back(self.trained, loaded.tensors["weights"], path)
        self.optimizer.load_state_dict(state.unpack(loaded.tensors["optimizer"], loaded.state["optimizer"]))
        self.optimizer_steps, self.iteration = loaded.state["optimizer_steps"], loaded.step
        self.unfinished_row, self.memory = loaded.state["unfinished_row"], loaded.state["memory"]
        self._restored = {
            name: state.unpack(loaded.tensors.get(f"kept-{name}", {}), tree)
            for name, tree in loaded.state["kept"].items()
        }


@dataclass(frozen=True)
class Claim:
    """The folder of a run that this process has begun or goes on with: from its checkpoint `found`, if it has one."""

    run: Run
    found: Path | None
    resumes: bool

    @property
    def start(self) -> int:
        """Iterations that are finished."""
        return int(self.found.name.removeprefix("step-")) if self.found else 0


def claim(stack: ExitStack, output: str, resume: Path | None, accelerator: Accelerator) -> Claim:
    """Lock the folder `resume`, or else that of a new run, until the stack ends. Writes nothing that stays."""
    run = Run(resume or Path(output))
    if accelerator.is_main_process:
        stack.enter_context(run_folder.lock(run.folder))
    return Claim(run, checkpoint.latest(run.checkpoints) if resume else None, resume is not None)


def begin(
    stack: ExitStack, claimed: Claim, config: AnyConfig, accelerator: Accelerator, *, unit: str = "images"
) -> tuple[Stop, Watchdog, Progress]:
    """Write what a run begins with; from here on signals are caught and progress is shown. The watchdog is not entered
    yet: loading has no progress to tell it."""
    if accelerator.is_main_process:
        run_folder.prepare(
            claimed.run.folder,
            dump(config),
            seed=config.seed,
            processes=accelerator.num_processes,
            resumed_from=claimed.start if claimed.resumes else None,
        )
    accelerator.wait_for_everyone()
    stop = stack.enter_context(catch_stop())
    watchdog = Watchdog(claimed.run, config.distributed.timeout_s, rank=accelerator.process_index)
    shown = Progress(config.iterations, start=claimed.start, enabled=accelerator.is_main_process, unit=unit)
    return stop, watchdog, stack.enter_context(shown)


def adamw(parameters: Any, settings: Optimizer) -> torch.optim.AdamW:
    """The optimiser of a configuration, for parameters or groups of them."""
    return torch.optim.AdamW(
        parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def logger_of(run: Run, config: AnyConfig, accelerator: Accelerator, start: int) -> MetricLogger:
    """Where the metrics of a run go, from the iteration `start` on."""
    return MetricLogger(
        run,
        config.trackers,
        config=config.model_dump(mode="json"),
        resumed_from=start,
        enabled=accelerator.is_main_process,
        own=metrics_of(type(config.trainer)) if isinstance(config.trainer, Method) else None,
    )


def open_loop(
    config: AnyConfig,
    accelerator: Accelerator,
    model: nn.Module,
    groups: Sequence[dict[str, Any]],
    rates: Mapping[str, float],
    run: Run,
    progress: Progress,
    watchdog: Watchdog,
    stop: Stop,
    stack: ExitStack,
) -> Loop:
    """The loop of one process, with its optimiser and its log, which `stack` closes. It evaluates nothing yet: what
    judges a model needs the loop.

    groups: of the optimiser, each with its `name`, whose rate is in `rates`.
    """
    loop = Loop(
        settings=config,
        accelerator=accelerator,
        model=model,
        optimizer=adamw(groups, config.optimizer),
        rates=rates,
        run=run,
        log=logger_of(run, config, accelerator, progress.start),
        progress=progress,
        watchdog=watchdog,
        stop=stop,
        every=config.evaluation.every,
        evaluate=lambda iteration: {},
    )
    stack.callback(loop.log.finish)
    return loop


def say_end(loop: Loop, metric: str, *, pictures: str, result: str) -> None:
    """What the evaluations of `eval/<metric>_mean` came to, where the report is, and the result, or how to go on."""
    run, say = loop.run, loop.progress.say
    rows = [row for row in run_folder.read_metrics(run.metrics) if row.get(f"eval/{metric}_mean") is not None]
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        interval = f"{last[f'eval/{metric}_low']:.3f} to {last[f'eval/{metric}_high']:.3f}"
        before, after = first[f"eval/{metric}_mean"], last[f"eval/{metric}_mean"]
        say(f"{metric}: {before:.3f} before, {after:.3f} ({interval}) after {last['step']} iterations")
    say(f"{pictures}: {write_report(run.folder)}")
    if loop.is_complete:
        say(result)
    else:
        planned = loop.settings.iterations
        say(f"stopped after {loop.iteration} of {planned} iterations; go on: genrl resume {run.folder}")


def put_back(parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor], path: Path) -> None:
    """Copy saved weights into a model. Raises ValueError where they are not the model's."""
    if saved.keys() != parameters.keys():
        odd = sorted(saved.keys() ^ parameters.keys())
        raise ValueError(f"{path} holds the weights of another model: {', '.join(odd[:4])} are in one of them only")
    for name, parameter in parameters.items():
        parameter.data.copy_(saved[name])


def scheduled(rate: float, config: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of the (0-based) optimiser step: linear warm-up, then constant, linear or cosine to 0."""
    if step < config.warmup_steps:
        return rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return rate * max(0.0, factor[config.schedule])


def make_accelerator(timeout_s: float) -> Accelerator:
    """accelerate's process group and device; nothing is wrapped by it, so models keep their own modules."""
    return Accelerator(
        cpu=not torch.cuda.is_available(),  # MPS has no float64 and was never tried
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))],
    )


def peak_memory_mb(device: torch.device) -> float:
    """Of this process since its start, in MiB: on the device, or resident where that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
