"""What the diffusion trainers share, as functions they call: set-up, one optimiser step, the end of an iteration.

A `Session` is one process of one run. Trainers (one file each) own the algorithm; nothing here knows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from PIL import Image
from torch import Tensor

from genrl.config import Config
from genrl.data.prompts import Prompt
from genrl.diffusion.evaluate import draw_best_and_worst, evaluate_held_out, show
from genrl.diffusion.monitor import ended_at, prepare, watch
from genrl.diffusion.policy.export import save_lora
from genrl.diffusion.policy.policy import Batch, Policy
from genrl.diffusion.policy.sharding import load_optimizer_state, local, whole, whole_optimizer_state
from genrl.diffusion.policy.weights import AVERAGE, Weights
from genrl.diffusion.rollout.forest import Draw
from genrl.diffusion.rollout.rollout import (
    Rollouts,
    batch_inputs,
    call_arguments,
    collect,
    iteration_prompts,
    score_metrics,
)
from genrl.diffusion.rollout.scoring import Scorers
from genrl.mdp.noise import derive_seed
from genrl.runtime import checkpoint, state
from genrl.runtime.guards import any_rank, any_ranks, non_finite, require_finite
from genrl.runtime.loop import Stateful, peak_memory_mb, scheduled
from genrl.runtime.metrics import MetricLogger
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run, truncate_metrics
from genrl.runtime.signals import Stop, Watchdog
from rewards.compose import Running


@dataclass(frozen=True)
class Suspect:
    """A micro-batch kept for the dump, with all that its gradient was made of but the weights."""

    batch: Batch
    checked: dict[str, Tensor]
    """Losses [B], and the norm of this process's gradient (its shard) with this micro-batch added."""
    tensors: dict[str, Tensor]
    numbers: dict[str, float]


@dataclass(frozen=True)
class Before:
    """What an iteration changes, as it was at its beginning."""

    memory: dict[str, Any]
    kept: dict[str, dict[str, Any]]
    optimizer_steps: int
    adapter: Adapter | None
    """None in full fine-tuning: a copy of all that it changes would be three models."""


@dataclass(frozen=True)
class Adapter:
    """All that is trained of a run with LoRA."""

    weights: dict[str, Tensor]
    snapshots: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]


class Abandoned(Exception):
    """The process is to end, and what is running can be left without loss: an evaluation, or an iteration that has
    changed nothing or can be taken back."""


class NoRoom(Exception):
    """Memory ran out in one of the processes: all of them left the iteration, to do it again in smaller batches."""


@dataclass
class Session:
    """One process of one training run."""

    config: Config
    accelerator: Accelerator
    policy: Policy
    weights: Weights
    optimizer: torch.optim.Optimizer
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    scorers: Scorers
    run: Run
    log: MetricLogger
    progress: Progress
    watchdog: Watchdog
    stop: Stop
    iteration: int = 0
    """Finished iterations."""
    optimizer_steps: int = 0
    """Optimiser steps so far, skipped ones included: the position in the learning-rate schedule."""
    updates: int = 0
    """Optimiser steps of the running iteration that changed the weights."""
    other_updates: int = 0
    """Those of other optimisers, which may have changed snapshots (an assistant network)."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per phase of the running iteration."""
    unfinished_row: dict[str, float] | None = None
    """Metrics of the last iteration where its evaluation was left; kept in the checkpoint."""
    suspect: Suspect | None = None
    """First micro-batch of this process whose loss or gradient was not finite."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a trainer keeps from one iteration to the next, as JSON; in the checkpoint."""
    rollouts: Rollouts | None = None
    """Samples of the running iteration."""
    kept: dict[str, Stateful] = field(default_factory=dict)
    """Beside the model (`keep`), by name."""
    replays: bool = False
    """Whether it was seen in this process that training replays what sampling did."""
    rewrite: Callable[[Sequence[Prompt]], list[str]] | None = None
    """Where prompts are rewritten: their new texts. Evaluation draws both."""
    _restored: dict[str, dict[str, Any]] = field(default_factory=dict)
    _before: Before | None = None
    _evaluated: bool = False
    _started: float = 0.0
    _train_started: float = 0.0
    _calls: int = 0
    _sample_calls: int = 0
    _passes: int = 1

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def is_complete(self) -> bool:
        """Whether no iteration is left to do, or the monitor has ended the run."""
        return self.iteration >= self.config.iterations or ended_at(self) is not None

    @property
    def iteration_prompts(self) -> list[Prompt]:
        """The prompts of the running iteration, one for each group of samples, in slot order."""
        return iteration_prompts(self.config, self.prompts, self.iteration)

    @property
    def loss_scale(self) -> float:
        """Power of two by which losses are multiplied before their backward pass where activations are float16, and
        gradients divided after it. A loss is a mean over samples and steps, and over the elements of a sample where
        log-probabilities are: undone, the gradient of an activation is of order 1 instead of below float16's least.
        """
        config = self.config
        if self.rollouts is None or "float16" not in (config.model.dtype, config.model.autocast):
            return 1.0
        terms = self.rollouts.num_samples / config.trainer.updates * config.sampling.num_inference_steps
        if getattr(config.trainer, "log_prob_reduction", "mean") == "mean":
            terms *= self.rollouts.sample_elements
        return 2.0 ** round(math.log2(terms))

    def iterations(self) -> Iterator[int]:
        """The iterations still to do, 0-based; fewer where the process is asked to end, or the monitor ends the run."""
        prepare(self)
        if self.iteration == 0 and not self._evaluated:
            self._evaluate()
            self._evaluated = True
        if self.unfinished_row is not None:
            row = self.unfinished_row | self._evaluate(log=False)
            if self.is_main:  # a run that was stopped again since has written this row before
                truncate_metrics(self.run.metrics, self.iteration - 1)
            self.log.log(self.iteration, row)
            self.unfinished_row = None
        while not self.is_complete and not any_rank(self.stop.requested, self.accelerator):
            self.timings.clear()
            self._started, self._calls, self.updates = time.perf_counter(), self.policy.model_calls, 0
            self.other_updates = 0
            self._seed_globals("iteration")
            self._before = self._remember()
            yield self.iteration

    def _seed_globals(self, phase: str) -> None:
        """Nothing here draws from the global generators, but a user's reward or a pipeline may: they start from the
        same numbers whether the run was stopped before or not."""
        set_seed(derive_seed(self.config.seed, phase, self.iteration, self.accelerator.process_index) % 2**32)

    def collect(self, draw: Draw, *, leaves: int = 1, roots_together: int | None = None) -> Rollouts:
        """Samples of this iteration, drawn by micro-batches with `draw`, and their scores (`rollout.collect`)."""
        self.phase("sampling", self.config.sampling.images_per_iteration)
        rollouts = collect(
            self.config,
            self.policy,
            self.prompts,
            self.scorers,
            draw,
            iteration=self.iteration,
            running={label: Running(**found) for label, found in self.memory.get("scores", {}).items()},
            process=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
            timed=self.timed,
            advance=self.advance,
            beat=self.beat,
            fitting=self.fitting,
            leaves=leaves,
            roots_together=roots_together,
        )
        return self.take(rollouts)

    def take(self, rollouts: Rollouts) -> Rollouts:
        """These are the samples of this iteration; training begins."""
        self._sample_calls = self.policy.model_calls - self._calls
        self.leave_if_asked()
        self._train_started = time.perf_counter()
        self.rollouts = rollouts
        return rollouts

    def gather(self, mine: Sequence[tuple[int, list[int], Tensor]], table: Tensor) -> Tensor:
        """`table` [T, N] filled in with (step, slots, values [B]) of all processes; the same in all of them."""
        for i, slots, values in gather_object([(i, slots, values.detach().cpu()) for i, slots, values in mine]):
            table[i, slots] = values.to(table.dtype)
        return table

    def start_training(self, passes: int) -> None:
        """The learning half of the iteration begins; this process will call `backward` so many times."""
        self._passes = passes
        self.phase("training", self.config.sampling.images_per_iteration)

    def phase(self, name: str, images: int) -> None:
        self.progress.phase(name, images)
        self.watchdog.beat(name, self.iteration)

    def advance(self, images: int) -> None:
        """Images done in the running phase; in sampling and evaluating also where an asked-for end is agreed."""
        self.progress.advance(images)
        self.watchdog.beat(self.progress.name, self.iteration)
        if self.progress.name in ("sampling", "evaluating"):
            self.leave_if_asked()

    def beat(self) -> None:
        """Tell the watchdog that something was done."""
        self.watchdog.beat(self.progress.name, self.iteration)

    def pulse(self) -> None:
        """Between two model calls of one micro-batch: something was done; and a lone process may leave here."""
        self.beat()
        if self.accelerator.num_processes == 1:
            self.leave_if_asked()

    def leave_if_asked(self, *, no_room: bool = False) -> None:
        """Where the iteration can be left: raise NoRoom in all processes where one has `no_room`, Abandoned where one
        was asked to end."""
        if (self.updates or self.other_updates) and (self._before is None or self._before.adapter is None):
            return
        short, asked = any_ranks([no_room, self.stop.requested], self.accelerator)
        if short:
            raise NoRoom
        if asked:
            raise Abandoned

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Where memory runs out within the block, the iteration is left for smaller micro-batches, with
        `sampling.fit_batch` and if it can be left. The other processes hear of it where they next ask
        (`leave_if_asked`), which must be the next thing they ask each other."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.config.sampling.fit_batch:
                self.leave_if_asked(no_room=True)
            raise

    def backward(self, loss: Tensor, batch: Batch, tensors: Mapping[str, Tensor], *, divisor: float) -> None:
        """Add the gradient of `loss.sum() / divisor`, one micro-batch's share of the update.

        loss: [B]. divisor: the weights of all losses of the update, over all processes. `tensors` are what the loss is
        made from (`replay.py` makes it again): they go into the dump, should it or its gradient not be finite; that
        all processes stop is agreed in `step`.
        """
        if self.accelerator.num_processes == 1:
            self.leave_if_asked()
        scale = self.loss_scale
        (loss.sum() / divisor * scale).backward()
        if self.config.kernels.compile == "cuda_graphs":  # the next call may write over this one's memory
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        if self.suspect is None:
            gradients = [local(p.grad) for p in self.weights.parameters if p.grad is not None]
            checked = {"loss": loss.detach(), "gradient": torch.stack(torch._foreach_norm(gradients)).sum()}
            if non_finite(checked):
                numbers = {"divisor": divisor, "loss_scale": scale}
                self.suspect = Suspect(batch, checked, {name: t.detach() for name, t in tensors.items()}, numbers)
        self.progress.advance(self.config.sampling.images_per_iteration / self._passes)
        self.watchdog.beat("training", self.iteration)

    def step(self) -> float:
        """Average the gradients over the processes and take one optimiser step; returns the gradient's norm.

        One collective for the gradient, one to agree. Raises NonFiniteError in all processes together where a loss or
        the gradient is not finite; the weights are then untouched.
        """
        self.leave_if_asked()
        parameters = self.weights.parameters
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        torch._foreach_div_(gradients, self.loss_scale)
        if self.weights.is_sharded:  # FSDP has averaged them; losses are divided by the samples of all processes
            gradients = [g * self.accelerator.num_processes for g in gradients]
        else:
            gradients = self._summed(gradients)
        norm = torch.linalg.vector_norm(torch.stack([whole(torch.linalg.vector_norm(g)) for g in gradients]))
        self._require_finite(norm)
        norm = float(norm)
        if norm > 0.0:  # else no sample counted, and momentum or weight decay alone must not move the weights
            config = self.config.optimizer
            scale = min(1.0, config.max_grad_norm / (norm + 1e-6))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.mul_(scale)
            for group in self.optimizer.param_groups:
                group["lr"] = scheduled(config.lr, config, self.optimizer_steps, self.config.optimizer_steps)
            self.optimizer.step()
            self.updates += 1
            if self.config.ema is not None:
                self.weights.blend(AVERAGE, self.config.ema.decay)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return norm

    def step_other(self, optimizer: torch.optim.Optimizer) -> float:
        """As `step` for parameters beside the model, with an optimiser of their own; returns the gradient's norm.

        The gradients of all processes are summed. Raises NonFiniteError in all processes together.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = self._summed([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        self._require_finite(norm)
        norm = float(norm)
        if norm > 0.0:
            scale = min(1.0, self.config.optimizer.max_grad_norm / (norm + 1e-6))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.mul_(scale)
            optimizer.step()
            self.other_updates += 1
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _summed(self, gradients: list[Tensor]) -> list[Tensor]:
        """Over the processes; one collective."""
        if self.accelerator.num_processes == 1:
            return gradients
        flat = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
        pieces = flat.split([g.numel() for g in gradients])
        return [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)]

    def keep(self, name: str, thing: Stateful) -> None:
        """Save it with every checkpoint from here on; in a resumed run it gets back the state that was saved.

        Its state must be the same in all processes.
        """
        self.kept[name] = thing
        if name in self._restored:
            thing.load_state_dict(self._restored.pop(name))

    def _remember(self) -> Before:
        adapter = None
        if self.weights.is_lora:
            snapshots = self.weights.snapshots
            adapter = Adapter(
                {key: p.detach().clone() for key, p in self.weights.named.items()},
                {name: {k: t.clone() for k, t in tensors.items()} for name, tensors in snapshots.items()},
                deepcopy(self.optimizer.state_dict()),
            )
        # Trainers replace what stands under a key of a dictionary in memory, they never change it: histories of
        # thousands of prompts need not be copied.
        memory = {
            key: dict(value) if isinstance(value, dict) else deepcopy(value) for key, value in self.memory.items()
        }
        kept = {name: deepcopy(thing.state_dict()) for name, thing in self.kept.items()}
        return Before(memory, kept, self.optimizer_steps, adapter)

    def take_back(self) -> None:
        """Undo what the running iteration, which was left, has changed."""
        before = self._before
        if before is None:
            return
        self.memory, self.optimizer_steps = before.memory, before.optimizer_steps
        for name, kept in before.kept.items():
            self.kept[name].load_state_dict(kept)
        if before.adapter is not None:
            for key, parameter in self.weights.named.items():
                parameter.data.copy_(before.adapter.weights[key])
            self.weights.snapshots = before.adapter.snapshots
            self.optimizer.load_state_dict(before.adapter.optimizer)
        self.updates, self.other_updates, self._before = 0, 0, None
        self.rollouts = self.suspect = None

    def _require_finite(self, norm: Tensor) -> None:
        kept, info, weights, pictures = self.suspect, {}, {}, {}
        if kept is not None:
            info = {
                "optimizer_steps": self.optimizer_steps,
                "trainer": self.config.trainer.model_dump(mode="json"),
                **kept.numbers,
                "prompts": kept.batch.prompts,
                "keys": kept.batch.keys,
                "initial_keys": kept.batch.initial_keys,
                "sampling": dict(kept.batch.sampling),
                "inputs": list(kept.batch.inputs),
            }
            pictures = {
                f"inputs/{name}/{k}": pil_to_tensor(picture)
                for name, row in kept.batch.inputs.items()
                for k, picture in enumerate(row)
            }
            if self.weights.is_lora:  # those of a full fine-tuning are too large; a checkpoint has them nearly
                weights = {f"weights/{key}": whole(p.detach()) for key, p in self.weights.named.items()}
        require_finite(
            {"gradient": norm} if kept is None else kept.checked,
            where="gradient" if kept is None or "loss" not in non_finite(kept.checked) else "loss",
            step=self.iteration,
            dumps=self.run.dumps,
            batch={} if kept is None else kept.tensors | weights | pictures,
            info=info,
            accelerator=self.accelerator,
        )

    def finish(self, metrics: Mapping[str, float]) -> None:
        """End of an iteration: log, and, where due, evaluate, draw pictures and save."""
        assert self.rollouts is not None
        self.timings["train"] = time.perf_counter() - self._train_started
        self.iteration += 1
        if self.rollouts.running:
            self.memory["scores"] = {label: asdict(found) for label, found in self.rollouts.running.items()}
        self._before = None
        config, last = self.config, self.iteration == self.config.iterations
        elapsed = time.perf_counter() - self._started
        train_calls = self.policy.model_calls - self._calls - self._sample_calls
        row = dict(metrics) | self.rollouts.used
        if self.rollouts.scored.values:  # given samples have none
            row |= score_metrics(self.rollouts.scored, self.rollouts.total)
        row |= {
            "lr": self.optimizer.param_groups[0]["lr"],
            "updates": float(self.updates),
            "images_per_s": config.sampling.images_per_iteration / elapsed,
            "memory/peak_mb": max(gather_object([peak_memory_mb(self.policy.device)])),
            "model_calls/sample": float(sum(gather_object([self._sample_calls]))),
            "model_calls/train": float(sum(gather_object([train_calls]))),
        }
        self.updates = self.other_updates = 0
        every = config.evaluation.every
        due = every > 0 and (self.iteration % every == 0 or last)
        if due and self.is_main:
            draw_best_and_worst(self.rollouts, self.run, self.log, self.iteration)
        self.rollouts = None  # states and pictures: not beside those of the next iteration
        if due:
            self.unfinished_row = row | self._timing_row(elapsed)
            try:
                row |= self._evaluate(log=False)
            except Abandoned:  # asked to end: saving comes first, the row is written with its evaluation on resume
                return self.save()
            self.unfinished_row = None
        self.log.log(self.iteration, row | self._timing_row(elapsed))
        self.progress.finish_iteration(self.iteration, row)
        if self.iteration % config.checkpoint.every == 0 or last:
            self.save()

    def _timing_row(self, elapsed: float) -> dict[str, float]:
        return {f"timing/{phase}_s": s for phase, s in self.timings.items()} | {"timing/iteration_s": elapsed}

    def save(self) -> None:
        """Write a checkpoint of this moment: between two iterations, all that decides the rest of the run."""
        self.beat()
        optimizer_tensors, optimizer_state = state.pack(whole_optimizer_state(self.optimizer))
        weights = self.weights.state()
        kept = {name: state.pack(thing.state_dict()) for name, thing in self.kept.items()}
        if self.is_main:
            checkpoint.save(
                self.run.checkpoints,
                self.iteration,
                tensors=weights
                | {"optimizer": optimizer_tensors}
                | {f"kept-{name}": tensors for name, (tensors, _) in kept.items()},
                state={
                    "optimizer_steps": self.optimizer_steps,
                    "optimizer": optimizer_state,
                    "unfinished_row": self.unfinished_row,
                    "memory": self.memory,
                    "kept": {name: packed for name, (_, packed) in kept.items()},
                },
                keep=self.config.checkpoint.keep,
                extra=self.export_lora,
            )
        self.accelerator.wait_for_everyone()
        self.beat()

    def restore(self, path: Path) -> None:
        """Go back to the moment of a checkpoint."""
        loaded = checkpoint.load(path)
        self.weights.restore(loaded.tensors)
        load_optimizer_state(self.optimizer, state.unpack(loaded.tensors["optimizer"], loaded.state["optimizer"]))
        self.optimizer_steps, self.iteration = loaded.state["optimizer_steps"], loaded.step
        self.unfinished_row, self.memory = loaded.state["unfinished_row"], loaded.state["memory"]
        self._restored = {
            name: state.unpack(loaded.tensors[f"kept-{name}"], packed) for name, packed in loaded.state["kept"].items()
        }

    def export_lora(self, folder: Path) -> None:
        """The adapter (its average, where there is one) as `folder/lora`, in the format diffusers loads."""
        if self.weights.is_lora:
            with self.averaged():
                save_lora(self.policy, folder / "lora", self.probe)

    @property
    def probe(self) -> Batch:
        """One sample, to compare models by."""
        sampling, first = self.config.sampling, self.prompts[0]
        return Batch(
            [first.text],
            [("probe", self.config.seed)],
            call_arguments(sampling),
            inputs=batch_inputs(sampling.inputs, [first]),
        )

    def averaged(self) -> Any:
        """Context in which the models hold the averaged weights, where the run keeps an average."""
        return self.weights.use(AVERAGE) if self.config.ema is not None else nullcontext()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - started

    def _evaluate(self, *, log: bool = True) -> dict[str, float]:
        config = self.config.evaluation
        if not config.every or not self.eval_prompts:
            return {}
        self.phase("evaluating", len(self.eval_prompts) * (1 if self.rewrite is None else 2))
        self._seed_globals("evaluation")
        attention = self.policy.switches.attending(self.config.kernels.evaluation_attention)
        with self.timed("eval"), self.averaged(), self.policy.uncounted(), attention:
            held_out = partial(
                evaluate_held_out,
                self.config,
                self.policy,
                self.eval_prompts,
                self.scorers,
                process=self.accelerator.process_index,
                num_processes=self.accelerator.num_processes,
                advance=self.advance,
                beat=self.beat,
            )
            found = held_out()
            again = None if self.rewrite is None else held_out(texts=self.rewrite(self.eval_prompts))
        metrics = found.metrics | watch(self, found.metrics)
        if again is not None:
            metrics |= {f"eval_rewritten/{key.removeprefix('eval/')}": value for key, value in again.metrics.items()}
        if self.is_main:
            show(found, self.run.samples, self.log, self.iteration)
            if again is not None:
                show(again, self.run.samples / "rewritten", self.log, self.iteration, name="samples/rewritten")
            if log:
                self.log.log(self.iteration, metrics)
        return metrics


def pil_to_tensor(picture: Image.Image) -> Tensor:
    """uint8 [H, W, 3]."""
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
