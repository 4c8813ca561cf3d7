"""On-policy distillation: the model draws, and teachers say of each of its steps where they would have gone
(DiffusionOPD, arXiv 2605.15055). A teacher is a LoRA of the same model, the model before training, or it under other
guidance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.run_config import FileFinding
from genrl.config.section import NonNegative, Section, Text
from genrl.config.yaml_source import KeyPath
from genrl.diffusion.config.schema import Calls, Guided
from genrl.diffusion.steps.settings import METRICS, Windowed, mean_of

if TYPE_CHECKING:
    from genrl.data.prompts import PromptRows
    from genrl.diffusion.config.schema import Config

ROUTE = "teacher"
"""Column of the prompts that names each row's teacher, where there are several."""


class Teacher(Section):
    """One who says how a step should have gone."""

    lora: Text | None = None
    """Its LoRA, of this very model: a file, a folder, or a hub id; null = the model before training."""
    guidance: NonNegative | None = None
    """Guidance scale under which it judges; null = that of sampling."""
    prompt: Text = "{prompt}"
    """What it reads: a text with {prompt} and the row's columns in braces."""


class OPD(Windowed):
    """On-policy distillation (arXiv 2605.15055): the model draws, teachers say where each step should have gone."""

    title: ClassVar[str] = "On-policy distillation"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS | {
        "distill": MetricDoc(
            "distance to the teachers, as `trainer.weight` has it; mean over samples and trained steps",
            "Falls. Level from the start: the learning rate is too low, or the adapter too small for the teachers.",
        ),
        "distill/<name>": MetricDoc(
            "the same of the samples of one teacher", "One that stays high: its part is not learnt, or it was trained "
            "under another guidance."
        ),
    }  # fmt: skip

    algorithm: Literal["opd"] = "opd"
    """Which trainer."""
    teachers: Annotated[dict[Text, Teacher], Field(min_length=1)] = {"teacher": Teacher()}
    """Who teaches, by name, as the metrics call them. {teacher: {}} is the model before training, for example under
    `guidance: 3`, taught to do without. Of several, the column `teacher` of the prompts names that of each row."""
    weight: Literal["exact", "no_dt", "unit"] = "exact"
    """Squared distance of the means over 2 s^2 (the exact KL of a step), over 2 s^2 / dt (Flow-OPD, as Flow-GRPO's
    KL), or half of it (for steps without noise: noise_level 1e-6)."""
    reward_coef: NonNegative = 0.0
    """Factor of the advantages of the rewards, which are only watched at 0; the distance has the weight 1."""

    @property
    def compares(self) -> Literal["groups"] | None:
        return None if self.reward_coef == 0 else "groups"

    @property
    def other_guidance(self) -> tuple[float, ...]:
        return super().other_guidance + tuple(
            {teacher.guidance for teacher in self.teachers.values() if teacher.guidance is not None}
        )

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        if self.noise_level == 0:
            yield ("trainer.noise_level",), "steps without any noise are not recorded; write 1e-6, and weight: unit"
        for key, wrong, text in (
            ("model.lora", config.model.lora is None, "teachers are adapters beside the one that is trained; write {}"),
            ("distributed.fsdp", config.distributed.fsdp, "teachers' adapters are not in shards; write false"),
            ("kernels.compile", config.kernels.compile, "a compiled denoiser cannot change its adapter; write false"),
        ):
            if wrong and (key == "model.lora" or any(teacher.lora for teacher in self.teachers.values())):
                yield (key, "trainer.teachers"), text
        if config.model.offload.text_encoders == "encode_then_free" and any(
            teacher.prompt != "{prompt}" for teacher in self.teachers.values()
        ):
            text = "the prompts of teachers are not encoded ahead; write between"
            yield ("model.offload.text_encoders", "trainer.teachers"), text

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """LoRAs that are not there, and rows whose column names no teacher."""
        from genrl.diffusion.config.files import lora_problems

        named: dict[KeyPath, str] = {
            ("trainer", "teachers", name, "lora"): one.lora for name, one in self.teachers.items() if one.lora
        }
        yield from lora_problems(named, notes)
        names = list(self.teachers)
        if train is None or len(names) == 1:
            return
        for row in train.rows:
            if (named_there := row.columns.get(ROUTE)) not in names:
                problem = f"row {row.line} has {ROUTE}: {named_there!r}, which is none of the teachers"
                yield ("trainer", "teachers"), f"{problem} {', '.join(sorted(names))}"
                return

    def calls(self, config: Config, guided: Guided) -> Calls:
        """And a call of the teacher for every trained state."""
        scales = [
            config.sampling.guidance_scale if teacher.guidance is None else teacher.guidance
            for teacher in self.teachers.values()
        ]
        each = sum(guided(scale) for scale in scales) / len(scales)
        states = mean_of(config, self.rounds(config), lambda teacher: teacher.plan.training_calls(teacher.trained))
        calls = super().calls(config, guided)
        return calls._replace(train=calls.train + states * self.epochs * each)
