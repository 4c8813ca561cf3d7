"""Diff-Instruct*: a one-step generator from a multi-step teacher, by scores and rewards (arXiv 2410.20898)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive
from genrl.diffusion.config.schema import Calls, Guided, Refusable
from genrl.diffusion.forward.settings import Differentiating

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

METRICS = {
    "diff_instruct/divergence": MetricDoc(
        "mean over samples of sigma^2 (sqrt(|s_assistant - s_teacher|^2 + c^2) - c) at the sampled noise levels",
        "How far the generator's pictures are from the teacher's, as the assistant sees it: about 0 at the start, when "
        "the assistant is the teacher; it rises as the assistant learns, then falls as the generator does.",
    ),
    "diff_instruct/pull": MetricDoc(
        "mean over samples of the norm of the divergence's gradient at x_0", "To be compared with `reward_pull`."
    ),
    "diff_instruct/reward_pull": MetricDoc(
        "mean over samples of the norm of the weighted rewards' gradient at x_0",
        "Far above `pull`: the reward leads alone, and will be hacked; far below: it does nothing. Its weight decides.",
    ),
    "diff_instruct/spread": MetricDoc(
        "standard deviation of a number of x_0 over the samples of one prompt, mean over numbers and prompts; with "
        "`sampling.group_size` of 2 or more",
        "Variety, to be read beside the reward. Falling while the reward rises: the generator stops using its noise; "
        "lower the reward's weight.",
    ),
    "assistant/error": MetricDoc(
        "mean over samples and their numbers of (noise - the assistant's prediction of it)^2",
        "Falls from the teacher's error on the generator's pictures. Rising: the generator runs away; lower its "
        "learning rate, or take more assistant_steps.",
    ),
    "assistant/grad_norm": MetricDoc("norm of the assistant's gradient before clipping", "As `grad_norm`."),
}


class DiffInstruct(Differentiating):
    """Diff-Instruct*: a one-step generator from a multi-step teacher, by scores and rewards (arXiv 2410.20898)."""

    title: ClassVar[str] = "Diff-Instruct"
    takes = frozenset({"no_reward"})
    refuses: ClassVar[Mapping[Refusable, str]] = {
        "distributed.context": "trains another model beside this one, which each process computes whole",
        "float16": "the loss is a sum over the numbers of a sample, by gradients of scores",
    }
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    algorithm: Literal["diff_instruct"] = "diff_instruct"
    """Which trainer."""
    guidance_scale: NonNegative = 4.5
    """Guidance g of the teacher, in its score: s_0 + g (s_c - s_0) (paper: 4.5 to 7.5); 1 = none."""
    assistant_steps: Count = 1
    """Optimiser steps of the assistant network per step of the generator."""
    assistant_lr: Positive | None = None
    """Learning rate of the assistant network; null = optimizer.lr."""

    @property
    def reference(self) -> Literal["base"]:
        """The teacher."""
        return "base"

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        sampling, evaluation = config.sampling, config.evaluation
        if sampling.num_inference_steps != 1:
            text = f"the generator draws in one step, found {sampling.num_inference_steps}; write 1"
            yield ("sampling.num_inference_steps", "trainer.algorithm"), text
        if evaluation.num_inference_steps not in (None, 1):
            text = "the one-step generator is evaluated, not its teacher; write null"
            yield ("evaluation.num_inference_steps", "trainer.algorithm"), text
        scales = {
            "sampling.guidance_scale": 2.0 if sampling.guidance_scale is None else sampling.guidance_scale,
            "evaluation.guidance_scale": evaluation.guidance_scale or 1.0,
            "sampling.pipeline_args.true_cfg_scale": sampling.pipeline_args.get("true_cfg_scale", 1.0),
        }
        for key, scale in scales.items():
            if not isinstance(scale, int | float) or scale > 1:
                text = "guidance is learnt from the teacher (trainer.guidance_scale), the generator has none; write 1"
                yield (key, "trainer.algorithm"), text
        if self.guidance_scale != 1 and config.model.offload.text_encoders == "encode_then_free":
            text = "the teacher is also asked without a prompt, which is in no file and so not encoded ahead"
            yield ("model.offload.text_encoders", "trainer.guidance_scale"), f"{text}; write between, or 1"
        if config.model.lora is not None and config.model.lora.frozen:
            text = "the teacher is the model without adapters, and the assistant begins as it"
            yield ("model.lora.frozen", "trainer.algorithm"), f"{text}; name a distilled LoRA by model.lora.from"

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The assistant learning; both scores; the generator."""
        sampling, images = config.sampling, config.sampling.images_per_iteration
        guidance, teacher = guided(sampling.guidance_scale), 1 if self.guidance_scale == 1 else 2
        train = float(images * (self.assistant_steps + 1 + teacher + 1))
        backward = float(images * (self.assistant_steps + 1 + teacher + 1)) * guidance
        return Calls(float(images * sampling.num_inference_steps * guidance), train, backward, 1.0)

    def snapshots(self, config: Config) -> list[str]:
        return ["assistant", "assistant's first moment", "assistant's second moment"]
