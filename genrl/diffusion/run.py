"""One process of a run that trains a pipeline: its policy, prompts, rewards, samples, and evaluation.

Methods own the algorithm; nothing here knows one.
"""

from __future__ import annotations

import inspect
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from genrl.config.errors import command
from genrl.config.method import is_built_in
from genrl.data.prompts import Prompt
from genrl.diffusion.before import settle, sizes
from genrl.diffusion.config.combinations import waiting
from genrl.diffusion.config.schema import Config
from genrl.diffusion.evaluate import HeldOut, draw_best_and_worst, of_rollouts, of_training_prompts
from genrl.diffusion.files.export import accompany, export, probe_of, save_lora, write_card
from genrl.diffusion.policy.adapters import denoiser_that_loads
from genrl.diffusion.policy.compiling import compile_denoisers, start_over
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.forest import Draw
from genrl.diffusion.rollout.ray_rollouts import Ahead, RayRollouts, unpacked
from genrl.diffusion.rollout.rollout import (
    Finishing,
    Rollouts,
    Sheet,
    Worker,
    downsampled,
    draw_here,
    gathered,
    handed_on,
    iteration_rows,
    jobs_of,
)
from genrl.diffusion.rollout.scoring import Scorers, Scoring, score_metrics
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.hub import whole_folder
from genrl.runtime.folder.run import read_metrics
from genrl.runtime.loop.frame import say_result
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.running import TrainingRun
from genrl.runtime.show.pictures import before_after, save_png
from genrl.runtime.show.sheet import ContactSheet
from genrl.runtime.weights.weights import Weights
from genrl_rewards.compose import Running


class DiffusionRun(TrainingRun[Config]):
    """One process of one training run.

    far: where samples are drawn, if not in this process. ahead: the iterations that are drawn while another is trained.
    """

    policy: Policy

    def __init__(
        self,
        config: Config,
        process: Process,
        policy: Policy,
        weights: Weights,
        prompts: list[Prompt],
        eval_prompts: list[Prompt],
        scorers: Scorers,
        far: RayRollouts | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        groups = {"policy": (weights.parameters, config.optimizer.lr)}
        sampling, steps = config.sampling, config.optimizer_steps
        super().__init__(
            config, process, policy, weights, groups,
            staleness=sampling.staleness, retries=sampling.fit_batch, steps=steps,
        )  # fmt: skip
        self.prompts, self.eval_prompts, self.scorers = prompts, eval_prompts, scorers
        self.far, self.ahead = far, ahead
        self.held_out = HeldOut(self, eval_prompts, scorers)
        self.rollouts: Rollouts | None = None
        """Samples of the running iteration."""
        self.replays = False
        """Whether it was seen in this process that training replays what sampling did."""
        self._train_started, self._calls, self._sample_calls = 0.0, 0, 0

    @property
    def iteration_prompts(self) -> list[Prompt]:
        """The prompts of the running iteration, one for each group of samples, in slot order."""
        return [self.prompts[row] for row in iteration_rows(self.config, self.prompts, self.iteration)]

    def begin(self, last_checkpoint: Path | None) -> None:
        """Before the first iteration of this process: find the size of micro-batches, and compile, where asked."""
        super().begin(last_checkpoint)
        if self.eval_prompts and self.config.evaluation.every:
            self.loop.keep("before", self.held_out.before, changes=False)
        settle(self, self.prompts)
        if slower := waiting(self.config, self.process.replicas):
            self.process.progress.say(slower)
        if self.config.kernels.compile:
            graphs = self.config.kernels.compile == "cuda_graphs"
            self.policy.singly, self.weights.by_copy = True, graphs
            if graphs:  # the next call may write over this one's memory
                self.loop.after_backward = torch.compiler.cudagraph_mark_step_begin
            compile_denoisers(self.policy.denoisers.values(), cuda_graphs=graphs, say=self.process.progress.say)

    def iterations(self) -> Iterator[int]:
        """The iterations still to do (`Loop.iterations`)."""
        for iteration in self.loop.iterations():
            self._calls = self.policy.model_calls
            yield iteration

    def collect(
        self,
        draw: Draw,
        *,
        draws: Callable[[int], Draw] | None = None,
        under: str | None = None,
        leaves: int = 1,
    ) -> Rollouts:
        """Samples of this iteration, made by micro-batches with `draw`, and their scores. draws: how another iteration
        is drawn, None = as this one. under: the snapshot of the weights that draws, None = the present ones. leaves: of
        a root (`Sheet`). Raises ValueError for a `draw` that cannot be called so."""
        try:
            inspect.signature(draw).bind(self.policy, "batch", "slots", beat=self.loop.alive)
        except TypeError as error:
            text = f"{draw} is called with (policy, batch, slots, *, beat): {error} (docs/extending.md)"
            raise ValueError(text) from error
        self.loop.phase("sampling", self.config.sampling.images_per_iteration)
        config, worker = self.config, self.worker

        def sheet_of(iteration: int) -> Sheet:
            return Sheet.of(config, self.prompts, iteration, leaves=leaves, num_processes=worker.num_processes)

        running = {label: Running(**statistics) for label, statistics in self.loop.memory.get("scores", {}).items()}
        drawing: Callable[[], AbstractContextManager[None]] = nullcontext
        if under is not None:
            drawing = partial(self.weights.use, under)
        if self.versions is not None:
            # What draws is noted, which is not what is trained where a method samples by a snapshot (DiffusionNFT's old
            # policy).
            with drawing():
                self.note_weights()
            drawing = self.drawing if self.age else drawing
        if self.ahead is not None:
            self._begin(draws or (lambda _: draw), sheet_of)
            rollouts, calls = self.ahead.take(self.iteration, worker, running=running)
            self._count(calls)
            return self.take(rollouts)
        sheet = sheet_of(self.iteration)
        jobs = jobs_of(config, sheet, worker)
        if self.far is not None:
            with drawing():
                order = self.far.order(draw, self.weights.named, worker)
            packed = self.far.draw(order, jobs, worker, self._count)
            finishing: Finishing = ((position, unpacked(finished, self.policy.device)) for position, finished in packed)
        else:
            beat, size = partial(self.loop.advance_or_leave, 0), config.sampling.batch_size
            finishing = draw_here(jobs, self.policy, draw, worker, size, under=drawing, beat=beat)
        rows, background = sheet.rows, config.sampling.score_in_background
        with Scoring(self.scorers, rows, sheet.group.tolist(), background=background, beat=worker.beat) as scoring:
            rollouts = gathered(sheet, handed_on(finishing, scoring, worker), scoring, worker, running=running)
        return self.take(rollouts)

    def _begin(self, draws: Callable[[int], Draw], sheet_of: Callable[[int], Sheet]) -> None:
        """Let all iterations be drawn whose weights are there, from the running one on."""
        assert self.ahead is not None and self.far is not None and self.versions is not None
        for iteration in self.coming():
            if iteration not in self.ahead.underway:
                order = self.far.order(draws(iteration), self.versions.of(iteration), self.worker)
                self.ahead.begin(self.config, sheet_of(iteration), order, self.worker)

    def _count(self, calls: int) -> None:
        """Model calls that were made elsewhere."""
        self.policy.model_calls += calls

    @property
    def worker(self) -> Worker:
        """This process, as sampling and evaluating know it."""
        return Worker.of(self.process, self.loop, self.advance_together)

    def advance_together(self, images: int) -> None:
        """Images done in sampling or evaluating; all processes call it alike, and agree here on an asked-for end."""
        self.loop.advance(images)
        self.loop.check_stop()

    def take(self, rollouts: Rollouts) -> Rollouts:
        """Take over the samples of this iteration; training begins, with those that are returned."""
        self._sample_calls = self.policy.model_calls - self._calls
        self.loop.check_stop()
        self._train_started = time.perf_counter()
        self.rollouts = rollouts  # all of them, for metrics
        self.note_sheet(lambda: of_rollouts(self.scorers, rollouts, self.iteration_prompts))
        if (keep := self.config.economy.keep) is not None:
            rollouts = downsampled(rollouts, keep)
        trainer = self.config.trainer
        if trainer.trains_on == "steps" and not is_built_in(type(trainer)):  # ours ask by their own clip range
            from genrl.diffusion.steps.transitions import check_on_policy

            check_on_policy(self, rollouts, clip=getattr(trainer, "clip_range", 1.0))
        self.loop.optimization.loss_scale = loss_scale(self.config, rollouts)
        return rollouts

    def start_training(self, passes: int) -> None:
        """The learning half of the iteration begins; this process will go backward so many times."""
        self.loop.phase("training", self.config.sampling.images_per_iteration, passes)

    def finish(self, metrics: Mapping[str, float]) -> None:
        """End of an iteration: what was sampled and how long it took, and the loop's own end."""
        assert self.rollouts is not None
        loop, config = self.loop, self.config
        loop.timings["train"] = time.perf_counter() - self._train_started
        if self.rollouts.running:
            # In memory, which checkpoints keep and an undone iteration takes back.
            loop.memory["scores"] = {label: asdict(statistics) for label, statistics in self.rollouts.running.items()}
        elapsed = time.perf_counter() - loop.started
        train_calls = self.policy.model_calls - self._calls - self._sample_calls
        # Processes that compute one sample together have each counted it: a call of theirs is one.
        calls = gather_object([(self._sample_calls, train_calls)])
        row = dict(metrics) | self.aged | self.rollouts.used | (self.far.metrics() if self.far is not None else {})
        if self.scorers.pool is not None:
            row["workers/lost"] += float(self.scorers.pool.lost)
        if self.rollouts.scored.values:  # given samples have none
            row |= score_metrics(self.rollouts.scored, self.rollouts.total)
        row |= {
            "lr": loop.lr,
            "images_per_s": config.sampling.images_per_iteration / elapsed,
            "model_calls/sample": sum(sample for sample, _ in calls) / self.process.context,
            "model_calls/train": sum(train for _, train in calls) / self.process.context,
        }
        if loop.evaluates_at(self.iteration + 1) and self.is_main:
            draw_best_and_worst(self.rollouts, self.process.run, self.process.log, self.iteration + 1)
        self.rollouts = None  # states and pictures: not beside those of the next iteration
        loop.finish(row)

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Held-out prompts from fixed noise, as `Trained` asks."""
        return self.held_out.evaluated(iteration, self.worker)

    def look(self) -> ContactSheet:
        """Training prompts, drawn and scored."""
        return of_training_prompts(self.config, self.policy, self.prompts, self.scorers)

    def export(self, folder: Path | None) -> None:
        """The adapter (its average, where there is one) as `folder/lora`, in the format diffusers loads."""
        # Full weights are in the checkpoint already; only adapters have a format of their own that users load.
        if not self.weights.is_lora:
            return
        with self.loop.averaged():
            if folder is not None:
                save_lora(self.policy, folder / "lora", self.probe)
            elif self.weights.in_step or self.process.context > 1:
                accompany(self.policy, self.probe)

    @property
    def probe(self) -> Batch:
        """One sample, to compare models by."""
        return probe_of(self.config, self.prompts[0])

    def micro_batch_sizes(self) -> list[int]:
        """The present size of micro-batches and the smaller ones that can be taken."""
        return sizes(self.config)

    def resize(self, size: int) -> None:
        """Give micro-batches this size from here on."""
        sampling = self.config.sampling.model_copy(update={"batch_size": size})
        self.loop.config = self.config.model_copy(update={"sampling": sampling})
        self.replays = False  # other shapes may run other kernels
        if self.config.kernels.compile and self.loop.started:
            start_over(self.policy.denoisers.values())

    def forget(self) -> None:
        """Let go of the samples of the running iteration."""
        self.rollouts = None

    def hand_over(self) -> Any:
        """The pipeline as trained, as it was loaded."""
        super().hand_over()
        return self.policy.release()

    def conclude(self) -> None:
        """The end of a run, complete or not: LoRA, before/after picture, report, and where they are."""
        run, config, loop = self.process.run, self.config, self.loop
        # Read back from the file: a resumed process has not seen the evaluations before it.
        rows = [row for row in read_metrics(run.metrics) if row.get("eval/total_mean") is not None]
        saved = checkpoint.latest(run.checkpoints)
        if self.weights.is_lora and loop.is_complete and saved is not None:
            with whole_folder(run.lora) as place:
                shutil.copytree(saved / "lora", place, dirs_exist_ok=True)
            write_card(run.lora, config, rows, list(dict.fromkeys(prompt.text for prompt in self.eval_prompts))[:5])
        picture = before_after(run.samples)
        if picture is not None:
            self.process.progress.say(f"before and after: {save_png(picture, run.samples / 'before_after.png')}")
        result = f"to write the pipeline: {command('export', run.folder)} --out FOLDER"
        if self.weights.is_lora:
            denoiser = denoiser_that_loads(run.lora)
            loader = "pipe.load_lora_weights" if denoiser is None else f"pipe.{denoiser}.load_lora_adapter"
            result = f"LoRA, for {loader}: {run.lora}"
        say_result(
            loop, rows, "total", label="held-out reward", pictures="curves and pictures", result=result,
            best=run.folder / "lora-best" if self.weights.is_lora else None,
            write=partial(export, run.folder),
        )  # fmt: skip


def loss_scale(config: Config, rollouts: Rollouts) -> float:
    """Power of two by which losses are multiplied before their backward pass where activations are float16, and
    gradients divided after it. A loss is a mean over samples and steps, and over the elements of a sample where
    log-probabilities are: undone, the gradient of an activation is of order 1 instead of below float16's least.
    """
    if "float16" not in (config.model.dtype, config.model.autocast):
        return 1.0
    terms = rollouts.num_samples / config.trainer.updates * config.sampling.num_inference_steps
    if config.trainer.reduction == "mean":
        terms *= rollouts.sample_elements
    # A power of two changes the exponent alone: scaling and its undoing round nothing.
    return 2.0 ** round(math.log2(terms))
