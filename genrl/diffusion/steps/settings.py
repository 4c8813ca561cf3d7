"""Settings that the policy gradients on denoising steps share: Flow-GRPO and what became of it. No torch.

`Layout` says which steps are noisy, branch and are trained; a method with a window or trees overrides `layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.section import Flag, NonNegative, Positive
from genrl.diffusion.config.kernels import Kernel, kernel_problem, noise_problem
from genrl.diffusion.config.schema import (
    AdvantageScale,
    Calls,
    DiffusionMethod,
    GuidanceInTraining,
    Guided,
    Updating,
    in_pieces,
    shared_out,
    too_few_steps,
)
from genrl.diffusion.steps.layout import (
    Layout,
    Round,
    Window,
    layout_problems,
    rounds_of,
)
from genrl.mdp.plan import describe, make_plan

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config

ReferenceKL = Literal["gaussian", "gaussian_dt", "mean_square", "velocity", "x_prediction", "k2"]

METRICS = {
    "loss/policy": MetricDoc("the policy term of `loss` alone", "As `loss`."),
    "ratio/mean": MetricDoc(
        "mean of exp(log-prob now - log-prob when sampled; with `sampling.staleness`: before the first update) over "
        "samples and trained steps",
        "Exactly 1 in the first update of an on-policy iteration, close to 1 afterwards.",
    ),
    "ratio/std": MetricDoc(
        "standard deviation of the same ratio over samples and trained steps",
        "How far the updates of one iteration went.",
    ),
    "ratio/max_abs_dev": MetricDoc(
        "max of |ratio - 1| over samples and trained steps",
        "Should be of the order of clip_range. Not 0 in the first update: training does not replay what sampling did.",
    ),
    "clip_frac_high": MetricDoc(
        "share of (sample, step) pairs with positive advantage and ratio > 1 + clip_high: no gradient",
        "0 always: updates are too timid for the clip to matter. Above 0.5: the learning rate or the number of "
        "updates per iteration is too high for the clip range.",
        "share 0..1",
    ),
    "clip_frac_low": MetricDoc(
        "share of (sample, step) pairs with negative advantage and ratio < 1 - clip_low: no gradient",
        "As `clip_frac_high`, for samples that are pushed away.",
        "share 0..1",
    ),
    "window/first": MetricDoc(
        "index of the first stochastic denoising step of this iteration", "Moves only with `trainer.window`.", "step"
    ),
    "window/size": MetricDoc("number of stochastic denoising steps that are trained on", "As configured.", "steps"),
}


class Stochastic(DiffusionMethod):
    """A method whose samples are drawn by a transition kernel with noise."""

    trains_on = "steps"

    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows. An
    installed one, or path/file.py:name, too."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        wrong = kernel_problem(self.kernel)
        if wrong is not None:
            yield ("trainer.kernel",), wrong
        elif (wrong := noise_problem(self.kernel, self.noise_level)) is not None:
            yield ("trainer.noise_level", "trainer.kernel"), wrong

    def misfit(self, scheduler: str, is_flow: bool) -> Finding | None:
        if (self.kernel == "ddim") != is_flow:
            return None
        if is_flow:
            text = f"ddim is for epsilon and v prediction, but this is a flow model ({scheduler}); use flow_sde or"
            return ("trainer.kernel",), f"{text} flow_cps"
        text = f"{self.kernel} is for flow models, but this one predicts for {scheduler}; use ddim with noise_level 1"
        return ("trainer.kernel",), text

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        trained = range(config.sampling.num_inference_steps - 1)
        noise = dict.fromkeys(trained, self.noise_level or 0.0)
        chains = make_plan(len(trained) + 1, noise=noise, roots=config.sampling.group_size)
        yield describe(chains, trained, calls_per_state=guidance).rsplit("\n", 1)[0]


class EveryStep(Stochastic):
    """A method that compares log-probabilities with the reference's at every step but the last, which has no noise."""

    @property
    def reference(self) -> Literal["begun"]:
        return "begun"

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        text = "the last step is never stochastic, so with 1 step nothing is trained; use 2 or more (D3PO: 20)"
        yield from too_few_steps(config, text)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy and the reference at each trained step. (PRDP: the reference once and the policy twice in an
        epoch, but for the first, whose values are recorded.)"""
        one = super().calls(config, guided)
        return one._replace(train=2.0 * one.backward)


class PolicyGradient(Stochastic, Updating):
    """A policy gradient on the steps of the sampler."""

    title: ClassVar[str] = "Policy gradients"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS

    kernel: Kernel = "flow_sde"
    """Transition density of a stochastic step; ddim is for epsilon- and v-prediction models, the others for flows. An
    installed one, or path/file.py:name, too."""
    noise_level: NonNegative | None = 0.7
    """Noise of the kernel (flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, (flow_)ddim eta 1); wan_sde: null."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (all peers: 5)."""
    clip_range: Positive | tuple[Positive, Positive] = 1e-4
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (Flow-GRPO 1e-4)."""
    kl_weight: NonNegative = 0.0
    """Weight of the divergence from the starting model (Flow-GRPO: 0 to 0.04)."""
    kl: ReferenceKL = "gaussian"
    """Which divergence: gaussian (exact), gaussian_dt (Flow-GRPO's, of SDE kernels), mean_square, velocity,
    x_prediction (of the predicted data), k2 (half the squared log-ratio)."""
    guidance_in_training: GuidanceInTraining = True
    """Use classifier-free guidance in training as in sampling; detached = without a gradient through its unconditional
    prediction (an early script of Flow-GRPO). An input of the model (FLUX.1-dev) always stays."""
    keep_graph: Flag = False
    """Keep the activations of the trained steps from sampling and backpropagate through them, instead of running these
    steps again: the same gradient, for one update per iteration and if they fit into memory together."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(low, high): the ratio is kept between 1 - low and 1 + high."""
        return self.clip_range if isinstance(self.clip_range, tuple) else (self.clip_range, self.clip_range)

    @property
    def layout(self) -> Layout:
        """Which steps are noisy, branch and are trained."""
        return Layout(self.noise_level)

    @property
    def reference(self) -> Literal["begun"] | None:
        return "begun" if self.kl_weight > 0 else None

    @property
    def branches(self) -> Literal["trees"] | None:
        return None if self.layout.tree is None else "trees"

    def rounds(self, config: Config) -> list[Round]:
        """The plans of a run, in the order in which they come. Raises ValueError for a plan that cannot be."""
        return rounds_of(config.sampling, self.layout, config.iterations)

    @property
    def other_guidance(self) -> tuple[float, ...]:
        return () if self.guidance_in_training else (1.0,)

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        text = "the last step is never stochastic, so with 1 step nothing is trained; use 2 or more (peers: 10)"
        yield from too_few_steps(config, text)
        yield from layout_problems(config, self.layout, self.kernel, lambda: self.rounds(config))
        low, _ = self.clip_bounds
        if low >= 1:
            text = f"the ratio would be kept above 1 - {low:g} <= 0, which clips nothing; use 1e-4"
            yield ("trainer.clip_range",), text
        yield from self._kept_graph(config)
        yield from self._divergence()
        if config.economy.keep is not None and (config.model.dtype != "float32" or config.model.autocast is not None):
            text = "the samples that are kept are replayed in smaller micro-batches, which round otherwise in a half"
            yield ("economy.keep", "model.dtype"), f"{text} precision: ratios would not begin at 1; use diffusion_nft"

    def _kept_graph(self, config: Config) -> Iterator[Finding]:
        if not self.keep_graph:
            return
        updates, lora = self.updates * self.epochs, config.model.lora
        if updates > 1:
            keys = ("trainer.keep_graph", "trainer.updates_per_iteration", "trainer.inner_epochs")
            text = f"activations of sampling serve one update, and there are {updates} per iteration; use 1, or false"
            yield keys, text
        for key, wrong, text in (
            ("trainer.guidance_in_training", not self.guidance_in_training, "training makes other model calls"),
            ("model.gradient_checkpointing", config.model.gradient_checkpointing, "activations are not kept at all"),
            ("distributed.fsdp", config.distributed.fsdp, "sharded weights are gathered for one pass at a time"),
            ("model.offload.denoiser", config.model.offload.denoiser, "weights come to the device for one pass"),
            (
                "sampling.fit_batch",
                config.sampling.fit_batch,
                "kept graphs are of all micro-batches, whatever their size",
            ),
            ("kernels.compile", config.kernels.compile == "cuda_graphs", "a recorded call writes over the one before"),
            ("distributed.context", config.distributed.context > 1, "was not tried with it"),
            (
                "model.lora.text_encoders",
                lora is not None and lora.text_encoders,
                "kept graphs begin behind these",
            ),
            ("engine", config.engine is not None, "the graphs of sampling stay in the process that drew"),
            ("sampling.staleness", config.sampling.staleness, "kept graphs are of the weights that drew"),
            ("economy.keep", config.economy.keep, "kept graphs are of all samples"),
        ):
            if wrong:
                yield ("trainer.keep_graph", key), f"{text}; write trainer.keep_graph: false"

    def _divergence(self) -> Iterator[Finding]:
        keys = ("trainer.kl", "trainer.kernel")
        if self.kl_weight > 0 and self.kl == "gaussian_dt" and self.kernel in ("ddim", "flow_cps"):
            # It takes the transition std s for b sqrt(dt), b the diffusion coefficient of an SDE. flow_ddim is a step
            # of such an SDE (b -> eta sqrt(2 sigma / (1 - sigma)) as dt -> 0); the s of flow_cps does not go with dt.
            reason = "its steps are alpha-bars" if self.kernel == "ddim" else "its noise does not shrink with the step"
            yield keys, f"{self.kernel} has no dt to weight by ({reason}); use gaussian"
        # Its formula takes the data out of a velocity, x0 = x - sigma v, which a noise prediction is not.
        if self.kl_weight > 0 and self.kl == "x_prediction" and self.kernel == "ddim":
            yield keys, "x_prediction is of a velocity; use mean_square or gaussian"

    def cut(self, config: Config, num_processes: int) -> list[list[int]]:
        """Sizes of the micro-batches of each optimiser step: of samples, or trees in an iteration with fewest."""
        if self.layout.tree is None:
            return super().cut(config, num_processes)
        sampling = config.sampling
        trees = min(one.plan.roots for one in self.rounds(config)) * sampling.prompts_per_iteration
        steps = pairwise(trees * k // self.updates for k in range(self.updates + 1))
        return [shared_out(in_pieces(last - first, sampling.batch_size), num_processes) for first, last in steps]

    def calls(self, config: Config, guided: Guided) -> Calls:
        """Model calls; of windows and trees that move the mean over the run's iterations, of random ones the
        expectation. What depends on the scores (pruned widths, contrasted samples) is counted as trained."""
        guidance = guided(config.sampling.guidance_scale)
        train_guidance = guidance if self.guidance_in_training else 1
        rounds = self.rounds(config)
        sampled = mean_of(config, rounds, lambda one: one.plan.calls) + self.further_samples(config)
        trained = mean_of(config, rounds, lambda one: len(one.trained)) / config.sampling.prompts_per_iteration
        replayed = mean_of(config, rounds, lambda one: one.plan.training_calls(one.trained))
        learned = replayed * self.replays_per_state(guidance)
        learned += self.further_replays(config, rounds, replayed) * train_guidance
        if config.sampling.staleness:  # log-probabilities before the first update
            learned += replayed * train_guidance
        kept = 0.0
        if self.keep_graph:
            most = max(one.plan.training_calls(one.trained) for one in rounds)
            kept = most * config.sampling.prompts_per_iteration / config.sampling.batch_size
        return Calls(sampled * guidance, learned, replayed * self.epochs * train_guidance, trained, kept=kept)

    def further_samples(self, config: Config) -> float:
        """States evaluated in sampling beside those of the rollouts, in an iteration, guidance aside."""
        return 0.0

    def further_replays(self, config: Config, rounds: Sequence[Round], replayed: float) -> float:
        """States evaluated in training beside the `replayed` ones, in an iteration, guidance aside."""
        return 0.0

    def replays_per_state(self, guidance: int) -> int:
        """Model calls of training, in an iteration, for each state whose transitions are trained. guidance: 1 or 2."""
        forwards = (not self.keep_graph) + (self.kl_weight > 0)  # the policy, and the reference for its KL
        if self.guidance_in_training:
            return self.epochs * forwards * guidance
        return self.epochs * forwards + 1  # log-probabilities without guidance, once before the first update

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        """How the samples of a group come about, for `genrl plan`: the first and the last shape of a run."""
        rounds, replays = self.rounds(config), self.replays_per_state(guidance)
        for shape in dict.fromkeys((rounds[0], rounds[-1])):
            if len(rounds) > 1:
                trained = ", ".join(map(str, shape.trained))
                yield f"steps {trained} trained, in {shape.share:.1%} of the iterations ({len(rounds)} shapes)"
            yield describe(shape.plan, shape.trained, calls_per_state=guidance, replays_per_state=replays)
        tree, prune = self.layout.tree, self.layout.prune
        if (tree is not None and tree.contrast) or (prune is not None and prune.width is not None):
            yield "which leaves are trained depends on their scores: training calls are at most these"


class GroupRelative(PolicyGradient):
    """A policy gradient that compares the samples of a prompt with each other."""

    advantage_scale: AdvantageScale = "group"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing."""


class Windowed(GroupRelative):
    """One that may train a stretch of the steps only."""

    window: Window | None = None
    """Train only a stretch of steps, placed once per iteration; null = all steps but the last."""

    @property
    def layout(self) -> Layout:
        return Layout(self.noise_level, self.window)


def mean_of(config: Config, rounds: Sequence[Round], count: Callable[[Round], int]) -> float:
    """Mean over the run's iterations of what is counted per prompt, for all prompts of one."""
    per_prompt = math.fsum(plan_round.share * count(plan_round) for plan_round in rounds)
    # The shares of the rounds add up to 1 only nearly; without rounding a count would read 79.99999999999999.
    return round(config.sampling.prompts_per_iteration * per_prompt, 6)


def plain_scores(config: Config, aggregate: str) -> Iterator[Finding]:
    """Refuse rewards that are normalised before they are aggregated."""
    for index, reward in enumerate(config.rewards):
        if reward.normalize != "none":
            text = f"{aggregate} judges and normalises the scores themselves; write none"
            yield (f"rewards.{index}.normalize", "trainer.aggregate"), text
