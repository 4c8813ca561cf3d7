"""Flow-GRPO for an editing model: the steps before an exit step, then a shortcut (Talk2Move, arXiv 2601.02356)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, NonNegative, Positive
from genrl.diffusion.config.schema import AdvantageScale, Refusable
from genrl.diffusion.steps.layout import Layout, Round, Window, rounds_of
from genrl.diffusion.steps.settings import GroupRelative

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


TRIED_PROMPTS, TRIED_SAMPLES = 4, 4
"""Instructions, and edits of each, by which the exit step is found (Talk2Move: 2 to 4 edits)."""


class Talk2Move(GroupRelative):
    """Flow-GRPO for an editing model (arXiv 2601.02356): the steps before an exit step are trained, then a shortcut."""

    refuses: ClassVar[Mapping[Refusable, str]] = {
        "distributed.context": "draws trial edits beside the samples, shared out by process",
        "sampling.buckets": "draws trial edits beside the samples, all of one size",
    }
    title: ClassVar[str] = "Talk2Move"
    metrics: ClassVar[Mapping[str, MetricDoc]] = {
        "exit/variance": MetricDoc(
            "variance of the total reward over samples that leave the chain at the exit step, mean over instructions, "
            "when the steps were last evaluated; not with a given `trainer.exit_step`",
            "What exploring up to that step is worth. The exit step itself is `window/size`.",
            "weighted sum, squared",
        ),
    }

    algorithm: Literal["talk2move"] = "talk2move"
    """Which trainer."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (Talk2Move: flow_sde at 1); wan_sde: null."""
    exit_step: Count | None = None
    """Stochastic steps, which are trained, counted from the first (Talk2Move: 4 of 10); null = found before the first
    iteration, of edits that leave the chain at every step: where their rewards differ most."""
    shortcut: Count = 2
    """Deterministic steps from there to the picture (Talk2Move: 2)."""
    advantage_scale: AdvantageScale = "global"
    """As flow_grpo's (Talk2Move: global)."""
    clip_range: Positive | tuple[Positive, Positive] = 2e-4
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (Talk2Move: 2e-4)."""

    @property
    def layout(self) -> Layout:
        """The steps before the exit are noisy and trained; all, while it is not found."""
        exit_at = self.exit_step
        return Layout(self.noise_level, None if exit_at is None else Window(size=exit_at, high=exit_at))

    def latest_exit(self, steps: int) -> int:
        """The exit step as configured; where it is found by the run, the last that it may find."""
        return min(self.exit_step or steps, steps - 1)

    def exit_calls(self, steps: int, exit_at: int) -> int:
        """Model evaluations per picture, guidance aside: the drawn steps and a shortcut, never more than `steps`."""
        return exit_at + min(self.shortcut, steps - exit_at)

    def rounds(self, config: Config) -> list[Round]:
        """One plan: a chain of the drawn steps and the shortcut."""
        steps = config.sampling.num_inference_steps
        exit_at = self.latest_exit(steps)
        chain = config.sampling.model_copy(update={"num_inference_steps": self.exit_calls(steps, exit_at)})
        return rounds_of(chain, self.model_copy(update={"exit_step": exit_at}).layout, config.iterations)

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from ((keys, text) for keys, text in super().problems(config) if "trainer.window.high" not in keys)
        steps = config.sampling.num_inference_steps
        if self.exit_step is not None and self.exit_step > steps - 1:
            text = f"the last of {steps} steps is never stochastic; use {steps - 1} or less, or null to have it found"
            yield ("trainer.exit_step", "sampling.num_inference_steps"), text
        if not config.sampling.inputs:
            text = "an editing model needs pictures to edit; name the argument of its call and the column of the files"
            yield ("sampling.inputs", "trainer.algorithm"), f"{text}, for example {{image: source_image}}"
        if self.kernel == "ddim":
            text = "the shortcut is for flow models, ddim for others; use flow_sde"
            yield ("trainer.kernel", "trainer.algorithm"), text
        if self.shortcut >= steps:
            text = f"{self.shortcut} steps are no shortcut of {steps}; use less (Talk2Move: 2 of 10)"
            yield ("trainer.shortcut", "sampling.num_inference_steps"), text

    def further_samples(self, config: Config) -> float:
        """The step evaluation of a run, per iteration: chains of steps - 1, left at every step."""
        if self.exit_step is not None:
            return 0.0
        steps = config.sampling.num_inference_steps
        ends = sum(self.exit_calls(steps, k) - k for k in range(1, steps))
        return TRIED_PROMPTS * TRIED_SAMPLES * (steps - 1 + ends) / config.iterations

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        """Say where the chain is left, and its first steps."""
        steps = config.sampling.num_inference_steps
        last = self.latest_exit(steps)
        remaining = self.exit_calls(steps, last) - last
        yield f"{steps} steps, of which the first {last} are run, with noise; then a shortcut of {remaining}"
        if self.exit_step is None:
            yield "the exit step is found by trial edits: all numbers are at most these"
        yield from super().rollout(config, guidance)
