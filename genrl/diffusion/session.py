"""What the diffusion trainers share, as functions they call: set-up, one optimiser step, the end of an iteration.

A `Session` is one process of one run. Trainers (one file each) own the algorithm; nothing here knows it.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object
from torch import Tensor

import rewards
from genrl.config import Config, Optimizer
from genrl.diffusion.evaluate import evaluate
from genrl.diffusion.export import save_lora
from genrl.diffusion.policy import Batch, Policy, Trajectory
from genrl.diffusion.rollout import Rollouts, call_arguments, collect, score_metrics
from genrl.diffusion.sharding import load_optimizer_state, local, whole, whole_optimizer_state
from genrl.diffusion.weights import Weights
from genrl.prompts import Prompt
from genrl.runtime import checkpoint, pictures, state
from genrl.runtime.guards import any_rank, non_finite, require_finite
from genrl.runtime.metrics import MetricLogger
from genrl.runtime.progress import Progress
from genrl.runtime.run import Run, truncate_metrics
from genrl.runtime.signals import Stop, Watchdog

AVERAGE = "average"


@dataclass(frozen=True)
class Suspect:
    """A micro-batch kept for the dump, with all that its gradient was made of but the weights."""

    batch: Batch
    checked: dict[str, Tensor]
    """Losses [B], and the norm of this process's gradient (its shard) with this micro-batch added."""
    tensors: dict[str, Tensor]
    numbers: dict[str, float]


class Abandoned(Exception):
    """The process is to end, and what is running can be left without loss: an evaluation, or an iteration that has
    changed nothing yet."""


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
    scorers: dict[str, rewards.Reward]
    reward_weights: dict[str, float]
    run: Run
    log: MetricLogger
    progress: Progress
    watchdog: Watchdog
    stop: Stop
    iteration: int = 0
    """Finished iterations."""
    optimizer_steps: int = 0
    """Finished optimiser steps."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per phase of the running iteration."""
    unfinished_row: dict[str, float] | None = None
    """Metrics of the last iteration where its evaluation was left; kept in the checkpoint."""
    suspect: Suspect | None = None
    """First micro-batch of this process whose loss or gradient was not finite."""

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def loss_scale(self) -> float:
        """Power of two that keeps gradients of float16 activations from underflow: a log-probability that is a mean
        over 10^4 to 10^6 numbers has gradients below float16's smallest. Gradients are divided by it again."""
        model = self.config.model
        return 2.0**14 if "float16" in (model.dtype, model.autocast) else 1.0

    def iterations(self) -> Iterator[int]:
        """The iterations still to do, 0-based; fewer where the process is asked to end."""
        if self.iteration == 0:
            self._evaluate()
        if self.unfinished_row is not None:
            row = self.unfinished_row | self._evaluate(log=False)
            if self.is_main:  # a run that was stopped again since has written this row before
                truncate_metrics(self.run.metrics, self.iteration - 1)
            self.log.log(self.iteration, row)
            self.unfinished_row = None
        while self.iteration < self.config.iterations and not any_rank(self.stop.requested, self.accelerator):
            self.timings.clear()
            self._started, self._calls, self._updated = time.perf_counter(), self.policy.model_calls, False
            yield self.iteration

    def collect(self, draw: Callable[[Batch], Trajectory]) -> Rollouts:
        """This iteration's samples, drawn micro-batch by micro-batch with `draw`, and their scores."""
        self.phase("sampling", self.config.sampling.images_per_iteration)
        rollouts = collect(
            self.config,
            self.policy,
            self.prompts,
            self.scorers,
            self.reward_weights,
            draw,
            iteration=self.iteration,
            process=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
            timed=self.timed,
            advance=self.advance,
        )
        self._sample_calls = self.policy.model_calls - self._calls
        self.leave_if_asked()
        self.phase("training", self.config.sampling.images_per_iteration)
        self._train_started = time.perf_counter()
        self._rollouts = rollouts
        return rollouts

    def phase(self, name: str, images: int) -> None:
        self.progress.phase(name, images)
        self.watchdog.beat(name, self.iteration)

    def advance(self, images: int) -> None:
        """Images done in the running phase; in sampling and evaluating also where an asked-for end is agreed."""
        self.progress.advance(images)
        self.watchdog.beat(self.progress.name, self.iteration)
        if self.progress.name in ("sampling", "evaluating"):
            self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Raise Abandoned in all processes where one was asked to end."""
        if any_rank(self.stop.requested, self.accelerator):
            raise Abandoned

    def backward(
        self, loss: Tensor, batch: Batch, tensors: Mapping[str, Tensor], *, num_samples: int, passes: int
    ) -> None:
        """Add the gradient of `loss.sum() / (num_samples * passes)`, one micro-batch's share of the update.

        loss: [B]. num_samples: of the update, over all processes; passes: losses per sample in an epoch. `tensors` are
        what the loss is made from (`replay.py` makes it again): they go into the dump, should it or its gradient not
        be finite; that all processes stop is agreed in `step`.
        """
        if not self._updated and self.accelerator.num_processes == 1:
            self.leave_if_asked()
        scale = self.loss_scale
        (loss.sum() / (num_samples * passes) * scale).backward()
        if self.suspect is None:
            gradients = [local(p.grad) for p in self.weights.parameters if p.grad is not None]
            checked = {"loss": loss.detach(), "gradient": torch.stack(torch._foreach_norm(gradients)).sum()}
            if non_finite(checked):
                numbers = {"num_samples": num_samples, "passes": passes, "loss_scale": scale}
                self.suspect = Suspect(batch, checked, {name: t.detach() for name, t in tensors.items()}, numbers)
        mine = sum(len(m.slots) for m in self._rollouts.mine.values())  # the whole bar stands for them
        done = len(batch) / (passes * self.config.trainer.inner_epochs)
        self.progress.advance(done * self.config.sampling.images_per_iteration / mine)
        self.watchdog.beat("training", self.iteration)

    def step(self) -> float:
        """Average the gradients over the processes and take one optimiser step; returns the gradient's norm.

        One collective for the gradient, one to agree. Raises NonFiniteError in all processes together where a loss or
        the gradient is not finite; the weights are then untouched.
        """
        if not self._updated:
            self.leave_if_asked()
        parameters = self.weights.parameters
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        torch._foreach_div_(gradients, self.loss_scale)
        if self.weights.is_sharded:  # FSDP has averaged them; losses are divided by the samples of all processes
            gradients = [g * self.accelerator.num_processes for g in gradients]
        elif self.accelerator.num_processes > 1:
            flat = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
            pieces = flat.split([p.numel() for p in parameters])
            gradients = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack([whole(torch.linalg.vector_norm(g)) for g in gradients]))
        self._require_finite(norm)
        norm = float(norm)
        scale = min(1.0, self.config.optimizer.max_grad_norm / (norm + 1e-6))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, self.optimizer_steps, self.config.optimizer_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        self._updated = True
        if self.config.ema is not None:
            self.weights.blend(AVERAGE, self.config.ema.decay)
        return norm

    def _require_finite(self, norm: Tensor) -> None:
        kept, info, weights = self.suspect, {}, {}
        if kept is not None:
            info = {
                "optimizer_steps": self.optimizer_steps,
                "trainer": self.config.trainer.model_dump(mode="json"),
                **kept.numbers,
                "prompts": kept.batch.prompts,
                "keys": kept.batch.keys,
                "initial_keys": kept.batch.initial_keys,
                "sampling": dict(kept.batch.sampling),
            }
            if self.weights.is_lora:  # those of a full fine-tuning are too large; a checkpoint has them nearly
                weights = {f"weights/{key}": whole(p.detach()) for key, p in self.weights.named.items()}
        require_finite(
            {"gradient": norm} if kept is None else kept.checked,
            where="gradient" if kept is None or "loss" not in non_finite(kept.checked) else "loss",
            step=self.iteration,
            dumps=self.run.dumps,
            batch={} if kept is None else kept.tensors | weights,
            info=info,
            accelerator=self.accelerator,
        )

    def finish(self, metrics: Mapping[str, float]) -> None:
        """End of an iteration: log, and, where due, evaluate, draw pictures and save."""
        self.timings["train"] = time.perf_counter() - self._train_started
        self.iteration += 1
        config, last = self.config, self.iteration == self.config.iterations
        elapsed = time.perf_counter() - self._started
        train_calls = self.policy.model_calls - self._calls - self._sample_calls
        row = dict(metrics) | score_metrics(self._rollouts.scored, self._rollouts.total)
        row |= {
            "lr": self.optimizer.param_groups[0]["lr"],
            "updates": float(self.config.trainer.updates_per_iteration * self.config.trainer.inner_epochs),
            "images_per_s": config.sampling.images_per_iteration / elapsed,
            "memory/peak_mb": max(gather_object([_peak_memory_mb(self.policy.device)])),
            "model_calls/sample": float(sum(gather_object([self._sample_calls]))),
            "model_calls/train": float(sum(gather_object([train_calls]))),
        }
        every = config.evaluation.every
        if every and (self.iteration % every == 0 or last):
            self._draw_best_and_worst()
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
        path = self.run.checkpoints
        optimizer_tensors, optimizer_state = state.pack(whole_optimizer_state(self.optimizer))
        weights = self.weights.state()
        rng = state.rng_state()
        if not self.is_main:
            checkpoint.save_rank(path, self.iteration, self.accelerator.process_index, rng)
        self.accelerator.wait_for_everyone()
        if self.is_main:
            checkpoint.save(
                path,
                self.iteration,
                tensors=weights | {"optimizer": optimizer_tensors, "rng": rng},
                state={
                    "optimizer_steps": self.optimizer_steps,
                    "optimizer": optimizer_state,
                    "unfinished_row": self.unfinished_row,
                },
                keep=self.config.checkpoint.keep,
                extra=self.export_lora,
                ranks=self.accelerator.num_processes,
            )
        self.accelerator.wait_for_everyone()

    def restore(self, path: Path) -> None:
        """Go back to the moment of a checkpoint."""
        loaded = checkpoint.load(path)
        self.weights.restore(loaded.tensors)
        load_optimizer_state(self.optimizer, state.unpack(loaded.tensors["optimizer"], loaded.state["optimizer"]))
        self.optimizer_steps, self.iteration = loaded.state["optimizer_steps"], loaded.step
        self.unfinished_row = loaded.state["unfinished_row"]
        rank = self.accelerator.process_index
        rng = loaded.tensors.get("rng" if rank == 0 else f"rank-{rank}")
        if rng is not None:  # absent where the run goes on with more processes than it had
            state.set_rng_state(rng)

    def export_lora(self, folder: Path) -> None:
        """The adapter (its average, where there is one) as `folder/lora`, in the format diffusers loads."""
        if self.weights.is_lora:
            with self.averaged():
                save_lora(self.policy, folder / "lora", self.probe)

    @property
    def probe(self) -> Batch:
        """One sample, to compare models by."""
        return Batch([self.prompts[0].text], [("probe", self.config.seed)], call_arguments(self.config.sampling))

    def check_ratio(self, deviation: float, clip: float) -> None:
        """The gate before the first update: `deviation` is this process's largest |ratio - 1|, `clip` the clip range.

        Raises RuntimeError in all processes where one is above a tenth of the clip range.
        """
        worst = float(torch.tensor(gather_object([deviation])).max())  # NaN where one is, unlike Python's max
        if worst == 0.0:
            return
        found = f"before the first update the ratio of the replayed to the recorded policy is off 1 by {worst:.3g}"
        if worst > clip / 10 or math.isnan(worst):
            raise RuntimeError(
                f"{found}, more than a tenth of trainer.clip_range ({clip:g}): training does not replay what sampling "
                "did. Usual causes: a pipeline option that depends on the position in the loop (skip-layer guidance, "
                "guidance intervals: take it out of sampling.pipeline_args), low precision (model.dtype float32 or "
                "float16 instead of bfloat16), kernels that are not deterministic. Or widen trainer.clip_range."
            )
        self.progress.say(f"{found}; below a tenth of the clip range ({clip:g}): rounding of the kernels in use")

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
        self.phase("evaluating", len(self.eval_prompts))
        calls = self.policy.model_calls
        with self.timed("eval"), self.averaged():
            found = evaluate(
                self.policy,
                self.eval_prompts,
                self.scorers,
                self.reward_weights,
                evaluation_arguments(self.config),
                batch_size=config.batch_size or self.config.sampling.batch_size,
                seed=config.seed,
                num_pictures=config.grid_prompts,
                process=self.accelerator.process_index,
                num_processes=self.accelerator.num_processes,
                advance=self.advance,
            )
        self.policy.model_calls = calls  # the counter is of training
        if self.is_main:
            if found.images:
                shown = len(found.images)
                scores = {label: values[:shown].tolist() for label, values in found.scored.values.items()}
                grid = pictures.save_samples(
                    self.run.samples, self.iteration, found.images, found.prompts[:shown], scores
                )
                self.log.log_picture(self.iteration, "samples/grid", grid)
            if log:
                self.log.log(self.iteration, found.metrics)
        return found.metrics

    def _draw_best_and_worst(self) -> None:
        """Best and worst sample of the groups that the main process drew (its own pictures only)."""
        if not self.is_main:
            return
        rollouts = self._rollouts
        slots = [s for m in rollouts.mine.values() for s in m.slots]
        images = [image for m in rollouts.mine.values() for image in m.images]
        picture = pictures.best_and_worst(
            images,
            [float(rollouts.total[s]) for s in slots],
            [int(rollouts.group[s]) for s in slots],
            [rollouts.prompts[s] for s in slots],
        )
        if picture is not None:
            pictures.save_png(picture, self.run.samples / f"step-{self.iteration:06d}-best-worst.png")
            self.log.log_picture(self.iteration, "samples/best_worst", picture)


def evaluation_arguments(config: Config) -> dict[str, Any]:
    """Arguments of the pipeline call in evaluation: those of the rollouts, where `evaluation` names no other."""
    named = {
        "num_inference_steps": config.evaluation.num_inference_steps,
        "guidance_scale": config.evaluation.guidance_scale,
    }
    return call_arguments(config.sampling) | {name: value for name, value in named.items() if value is not None}


def learning_rate(config: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of the (0-based) optimiser step: linear warm-up, then constant, linear or cosine to 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return config.lr * factor[config.schedule]


def make_accelerator(config: Config) -> Accelerator:
    """accelerate's process group and device; nothing is wrapped by it, so the pipeline keeps its own modules."""
    return Accelerator(
        cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.distributed.timeout_s))],
    )


def reward_labels(config: Config) -> list[str]:
    """A short, unique name for each reward, in the order of the configuration: `shapes`, `Brightness`, `ocr-2`."""
    labels: list[str] = []
    for reward in config.rewards:
        base = reward.name.rsplit(":", 1)[-1]
        same = sum(label == base or label.startswith(f"{base}-") for label in labels)
        labels.append(f"{base}-{same + 1}" if same else base)
    return labels


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
