"""On-policy distillation: the model draws, frozen teachers say where each step should have gone (arXiv 2605.15055).

One iteration, with mu the mean of a step from a visited state, mu_T the teacher's from the same state, s the std:

1. collect   samples x_0 by the model's own sampler, its states kept
2. route     each row to its teacher, who replays the visited states under its own guidance and prompt
3. update    L = <(mu - mu_T)^2> / (2 s^2), the exact KL of the step to the teacher's (`weight` has others); where
             reward_coef is above 0, beside Flow-GRPO's loss on the rewards

Every row has signal, so none is left out for want of spread or of a score. docs/opd.md has the equations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from genrl.diffusion.files.lora_files import locate
from genrl.diffusion.methods.opd.settings import OPD, ROUTE, Teacher
from genrl.diffusion.policy.adapters import activate, load_lora
from genrl.diffusion.policy.policy import Policy, guided
from genrl.diffusion.policy.trajectory import Batch, Replayed
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.plans import Steps, estimate
from genrl.diffusion.steps.transitions import Action, Tensors, collect, penalised, replayed, update
from genrl.objectives.groups import group_advantages
from genrl.objectives.policy_losses import clipped_surrogate, kl_gaussian, kl_gaussian_dt, kl_mean_square
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter, Results
from genrl.runtime.weights.low_rank import in_input_precision


def train(run: DiffusionRun, settings: OPD) -> None:
    """Train until the configured number of iterations is done, or the process is asked to end."""
    teachers = Teachers(run, settings)
    try:
        for iteration in run.iterations():
            meter, steps = Meter(), Steps.of(run.config, settings, iteration)
            # 1. Collect, and score: without a coefficient, only to be watched.
            rollouts = collect(run, settings, steps)
            advantages = group_advantages(rollouts.total, rollouts.group, scale=settings.advantage_scale)
            by_reward = settings.reward_coef * advantages
            edges = estimate(run, settings, rollouts, steps, by_reward, meter, grouped=settings.compares is not None)
            edges = edges._replace(moves=edges.weight > 0)

            def note(action: Action, results: Results, meter: Meter = meter) -> None:
                for name in {teachers.of(slot) for slot in action.slots}:
                    of_it = [teachers.of(slot) == name for slot in action.slots]
                    distance = results["distill"].detach()
                    meter.add(f"distill/{name}", distance, distance.new_tensor(of_it))

            # 2, 3. Route and update.
            update(run, settings, rollouts, edges, loss, meter, further=teachers.means, seen=note)
            del rollouts
            run.finish(meter.result() | steps.metrics)
    finally:
        teachers.close()


def loss(settings: OPD, policy: Policy, given: Recorded) -> Tensors:
    """The distance of one transition to its teacher's, beside the clipped surrogate of the rewards, [B]."""
    new = replayed(settings, policy, given)
    low, high = settings.clip_bounds
    surrogate = clipped_surrogate(new.log_prob, given["old_log_prob"], given["advantage"], low, high)
    far = distance(settings, new, given["teacher_mean"])
    return penalised(settings, surrogate, new, given, {"distill": (1.0, far)})


def distance(settings: OPD, new: Replayed, teacher_mean: Tensor) -> Tensor:
    """Of a step from the teacher's, [B]."""
    if settings.weight == "exact":
        return kl_gaussian(new.mean, teacher_mean, new.std)
    if settings.weight == "no_dt":
        return kl_gaussian_dt(new.mean, teacher_mean, new.std, new.step.sigma - new.step.sigma_next)
    return 0.5 * kl_mean_square(new.mean, teacher_mean)


HASHES = "teachers"
"""Where a checkpoint says who taught."""


class Teachers:
    """The teachers of a run, whose adapters lie in its denoisers, switched off.

    Raises ValueError for a LoRA that does not fit, and where a checkpoint was taught by others.
    """

    def __init__(self, run: DiffusionRun, settings: OPD) -> None:
        self.run, self.settings = run, settings
        self.known = settings.teachers
        self.denoisers: list[Any] = list(run.policy.denoisers.values())
        hashes = {}
        for name, teacher in self.known.items():
            if teacher.lora is not None:
                hashes[name] = hashlib.sha256(locate(teacher.lora).read_bytes()).hexdigest()
                load_lora(run.policy.pipe, teacher.lora, _adapter(name))
        for name, part in run.policy.pipe.components.items():
            beside = set(getattr(part, "peft_config", {})) & set(map(_adapter, self.known))
            if beside and part not in self.denoisers:
                raise ValueError(
                    f"trainer.teachers: a LoRA adapts the {name}, too, which encodes prompts for all alike"
                )
        for denoiser in self.denoisers:
            in_input_precision(denoiser)
            activate(denoiser)
        before = run.loop.memory.setdefault(HASHES, hashes)
        if before != hashes:
            others = sorted(name for name in {**before, **hashes} if before.get(name) != hashes.get(name))
            text = "the checkpoint was taught by other files; give the same, or begin a new run"
            raise ValueError(f"trainer.teachers: {', '.join(others)}: {text}")

    def close(self) -> None:
        """Take the adapters out again, so that the pipeline that is handed over has its own alone."""
        for adapter in map(_adapter, self.known):
            for denoiser in self.denoisers:
                if adapter in denoiser.peft_config:
                    denoiser.delete_adapters(adapter)

    def of(self, slot: int) -> str:
        """Who teaches the sample in this slot."""
        if len(self.known) == 1:
            return next(iter(self.known))
        return str(self.run.iteration_prompts[slot // self.run.config.sampling.group_size].columns[ROUTE])

    @torch.no_grad()
    def means(self, action: Action) -> dict[str, Tensor]:
        """Where the teachers would have gone from the states of a transition: mean [B, ...], one pass for each teacher
        on its own rows; and their numbers, int64 [B]."""
        names = [self.of(slot) for slot in action.slots]
        numbers = torch.tensor([list(self.known).index(name) for name in names])
        means: list[Tensor] = []
        for name in dict.fromkeys(names):
            rows = [row for row, other in enumerate(names) if other == name]
            trajectory = action.piece.trajectory.take(rows)
            batch = self.asked(self.known[name], trajectory.batch, [action.slots[row] for row in rows])
            with self.acting(name), self.run.loop.fitting():
                means.append(self.run.policy.replay(trajectory.step(action.step, batch)).mean)
        places = torch.cat([(numbers == list(self.known).index(name)).nonzero()[:, 0] for name in dict.fromkeys(names)])
        return {"teacher_mean": torch.cat(means)[places.argsort()], "teacher": numbers}

    def asked(self, teacher: Teacher, batch: Batch, slots: list[int]) -> Batch:
        """The conditions under which a teacher judges."""
        if teacher.prompt != "{prompt}":
            rows = [self.run.iteration_prompts[slot // self.run.config.sampling.group_size] for slot in slots]
            texts = [teacher.prompt.format(**{**row.columns, "prompt": row.text}) for row in rows]
            batch = replace(batch, prompts=texts)
        return guided(batch, teacher.guidance)

    def acting(self, name: str) -> AbstractContextManager[None]:
        """Within the block the model is this teacher."""
        return self.run.weights.reference() if self.known[name].lora is None else self._adapted(_adapter(name))

    @contextmanager
    def _adapted(self, adapter: str) -> Iterator[None]:
        for denoiser in self.denoisers:
            if adapter in denoiser.peft_config:  # of two denoisers, it may be of one
                activate(denoiser, adapter)
            else:
                denoiser.disable_adapters()
        try:
            yield
        finally:
            for denoiser in self.denoisers:
                denoiser.enable_adapters()
                activate(denoiser)


def _adapter(name: str) -> str:
    return f"teacher_{name}"
