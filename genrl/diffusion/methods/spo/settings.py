"""Preferences between candidates for one next state (arXiv 2406.04314), judged by the configured rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Count, Fraction, Margin, Positive, Ways, Whole
from genrl.diffusion.config.schema import Calls, Guided, Refusable, Updating
from genrl.diffusion.steps.settings import Stochastic
from genrl.mdp.plan import SamplingPlan, caterpillar, describe

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config, Refusable
    from genrl.diffusion.config.sections import Sampling

METRICS = {
    "spo/valid_ratio": MetricDoc(
        "share of comparisons whose best and worst candidate clearly differ: tanh(gap / 2) > threshold",
        "Only these are trained on. Near 0: lower trainer.threshold, or raise the weights of the rewards.",
        "share 0..1",
    ),
    "spo/gap": MetricDoc(
        "mean over comparisons of the total reward of the best candidate minus that of the worst",
        "What `trainer.threshold` is to be chosen by.",
        "weighted sum",
    ),
    "spo/correct": MetricDoc(
        "share of the trained pairs whose better candidate the policy raised more against the reference than the other",
        "0 in the first update of a run, when both are equal; afterwards above 0.5 where the preferences of earlier "
        "iterations hold for new samples.",
        "share 0..1",
    ),
    "spo/clip_frac": MetricDoc(
        "share of ratios to the reference outside 1 +- clip_range: no gradient",
        "Rises with the distance from the model before training. Near 1: nothing is learnt any more.",
        "share 0..1",
    ),
}


class SPO(Stochastic, Updating):
    """Preferences between candidates for one next state (arXiv 2406.04314), judged by the configured rewards."""

    refuses: ClassVar[Mapping[Refusable, str]] = {
        "distributed.context": "decodes and scores the candidates of each step in every process",
        "sampling.buckets": "scores candidates of a whole iteration together",
    }
    title: ClassVar[str] = "SPO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    algorithm: Literal["spo"] = "spo"
    """Which trainer."""
    candidates: Ways = 4
    """Next states sampled at each compared step; the chain continues from one of them (SPO: 4 on SD 1.5, 2 on SDXL)."""
    first: Whole = 4
    """First step at which candidates are compared (SPO: 4 of 20)."""
    threshold: Fraction = 0.3
    """A comparison counts if tanh(half the difference of best and worst total reward) is above this (SPO: 0.3)."""
    beta: Positive = 10.0
    """Sharpness of the preference loss (SPO: 10)."""
    clip_range: Margin = 0.1
    """Ratio to the model before training kept in 1 - c .. 1 + c; outside there is no gradient (SPO: 0.1)."""
    inner_epochs: Count = 1
    """Passes over the pairs of one iteration."""

    @property
    def branches(self) -> Literal["candidates"]:
        return "candidates"

    @property
    def reference(self) -> Literal["begun"]:
        return "begun"

    @property
    def compares(self) -> None:
        """Candidates are compared, not samples."""

    def plan(self, sampling: Sampling, *, last: bool) -> SamplingPlan:
        """How one chain is sampled: the steps from `first` on split into candidates, of which one goes on.

        last: whether the last step is sampled and compared too, as DDIM's; otherwise it is deterministic.
        """
        steps = sampling.num_inference_steps
        noise = dict.fromkeys(range(steps if last else steps - 1), self.noise_level or 0.0)
        return caterpillar(steps, noise=noise, first=self.first, candidates=self.candidates)

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        steps = config.sampling.num_inference_steps
        if self.first > steps - 2:
            fix = f"use {steps - 2} or less" if steps > 1 else "use 2 steps or more"
            text = f"no step of {steps} is left at which candidates can always be compared; {fix}"
            yield ("trainer.first", "sampling.num_inference_steps"), text

    def calls(self, config: Config, guided: Guided) -> Calls:
        """At most, where every comparison counts: the policy and the reference at each compared state."""
        sampling, guidance = config.sampling, guided(config.sampling.guidance_scale)
        plan, images = self.plan(sampling, last=self.kernel == "ddim"), sampling.images_per_iteration
        trained = float(len(plan.splits))
        backward = images * trained * self.epochs * guidance
        return Calls(float(images * plan.calls * guidance), 2 * backward, backward, trained, ends=float(plan.leaves))

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        plan = self.plan(config.sampling, last=self.kernel == "ddim")
        replays = 2 * self.epochs * guidance
        yield describe(plan, plan.splits, calls_per_state=guidance, replays_per_state=replays)
        yield "states whose candidates score nearly alike are not trained: training calls are at most these"
