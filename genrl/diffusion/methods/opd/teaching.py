"""Teachers beside the model that is trained: their adapters, what they read, and where they would have gone."""

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
from genrl.diffusion.policy.policy import guided
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.steps.transitions import Action
from genrl.runtime.weights.low_rank import in_input_precision

HASHES = "teachers"
"""Where a checkpoint says who taught."""


class Teachers:
    """The teachers of a run, whose adapters lie in its denoisers, switched off.

    Raises ValueError for a LoRA that does not fit, and where a checkpoint was taught by others.
    """

    def __init__(self, run: DiffusionRun, settings: OPD) -> None:
        self.run, self.settings = run, settings
        self.known = {teacher.name: teacher for teacher in settings.teachers}
        self.denoisers: list[Any] = list(run.policy.denoisers.values())
        hashes = {}
        for teacher in settings.teachers:
            if teacher.lora is not None:
                hashes[teacher.name] = hashlib.sha256(locate(teacher.lora).read_bytes()).hexdigest()
                load_lora(run.policy.pipe, teacher.lora, _adapter(teacher))
        for name, part in run.policy.pipe.components.items():
            beside = set(getattr(part, "peft_config", {})) & {_adapter(teacher) for teacher in settings.teachers}
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
        for teacher in self.settings.teachers:
            for denoiser in self.denoisers:
                if _adapter(teacher) in denoiser.peft_config:
                    denoiser.delete_adapters(_adapter(teacher))

    def of(self, slot: int) -> Teacher:
        """Who teaches the sample in this slot."""
        if len(self.known) == 1:
            return self.settings.teachers[0]
        row = self.run.iteration_prompts[slot // self.run.config.sampling.group_size]
        return self.known[row.columns[ROUTE]]

    @torch.no_grad()
    def means(self, action: Action) -> dict[str, Tensor]:
        """Where the teachers would have gone from the states of a transition: mean [B, ...], one pass for each teacher
        on its own rows; and their numbers, int64 [B]."""
        names = [self.of(slot).name for slot in action.slots]
        numbers = torch.tensor([list(self.known).index(name) for name in names])
        means: list[Tensor] = []
        for name in dict.fromkeys(names):
            rows = [row for row, other in enumerate(names) if other == name]
            trajectory = action.piece.trajectory.take(rows)
            batch = self.asked(self.known[name], trajectory.batch, [action.slots[row] for row in rows])
            with self.acting(self.known[name]), self.run.loop.fitting():
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

    def acting(self, teacher: Teacher) -> AbstractContextManager[None]:
        """Within the block the model is this teacher."""
        return self.run.weights.reference() if teacher.lora is None else self._adapted(_adapter(teacher))

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


def _adapter(teacher: Teacher) -> str:
    return f"teacher_{teacher.name}"
