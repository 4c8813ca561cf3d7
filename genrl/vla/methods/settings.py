"""What the settings of several methods share: the keys of the clipped surrogate with what they refuse, and what methods
that learn from data refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from genrl.config.errors import Finding
from genrl.config.section import Count, Flag, Fraction, Margin, NonNegative, Positive, Range, Share
from genrl.vla.config.names import WORLDS
from genrl.vla.config.schema import Row, VLAMethod

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig


class Update(VLAMethod):
    """The clipped surrogate on the log-probabilities of chunks, after rollouts of the policy."""

    takes = frozenset({"older_samples", "actors"})
    trains: ClassVar[tuple[str, ...]] = ("velocity", "noise", "tokens")
    measured: ClassVar[tuple[str, ...]] = ()
    """Sums over decisions that its loss returns beside those of the surrogate, to be logged as means."""

    level: Literal["chunk", "action", "element"] = "chunk"
    """What has its own ratio: the executed chunk (pi_RL on LIBERO), each action, or each number of it."""
    reduction: Literal["sum", "mean"] = "sum"
    """Log-densities of the numbers of one ratio: sum (pi_RL), or mean (DPPO; divide the clip range likewise)."""
    clip_range: Margin | tuple[Margin, Positive] = 0.2
    """Ratio kept in 1 - c .. 1 + c (pi_RL: 0.2; DPPO: 0.01 with reduction mean), or [below, above] (SimpleVLA-RL: 0.2
    and 0.28)."""
    dual_clip: Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)] | None = None
    """Bound c of the loss where the advantage is negative, c |A| (RLinf's clip_ratio_c: 3); null = none."""
    epochs: Count = 4
    """Passes over the decisions of an iteration."""
    minibatch: Count = 512
    """Decisions per optimiser step, over all processes."""
    microbatch: Count | None = None
    """Decisions per pass of the policy, to save memory; null = the minibatch."""
    fit_batch: Flag = False
    """Where memory runs out in training, do the iteration again with half the microbatch."""
    kl_stop: Positive | None = 0.3
    """Leave an iteration's updates when the divergence of a minibatch exceeds this; null = never (DPPO: 1)."""
    entropy_weight: NonNegative = 0.0
    """Bonus for a learned noise (pi_RL with Flow-Noise: 0.005; ReinFlow: 0.01 to 0.03), or for that of tokens."""
    element_clip: Range | None = None
    """Log-density of one number is kept within [low, high] (DPPO: -5 and 2); null = free."""
    success_filter: tuple[Fraction, Share] | None = None
    """Groups count only where their mean return is within [low, high] (SimpleVLA-RL: 0.1 and 0.9); null = all."""

    importance: Literal["truncated", "none"] = "truncated"
    """Weight of a decision that older weights took (`environment.staleness`): min(p_old / p_drawn, 1), or 1."""

    @property
    def retries(self) -> bool:
        return self.fit_batch

    @property
    def rows_per_pass(self) -> int:
        return self.microbatch or self.minibatch

    @property
    def clip_below(self) -> float:
        """How far the ratio may fall below 1."""
        return self.clip_range[0] if isinstance(self.clip_range, tuple) else self.clip_range

    @property
    def first_episodes(self) -> bool:
        """Whether a rollout ends when the first episode of every environment has ended, and holds no others."""
        return True

    @property
    def rollout_decisions(self) -> int | None:
        """Decisions of a rollout; None = as many as the longest episode needs."""
        return None

    def problems(self, config: VLAConfig) -> Iterator[Finding]:
        """What the surrogate cannot do: bounds that fall, filters without groups, entropy that has no gradient."""
        sampler = config.sampler
        for key, bounds in (("success_filter", self.success_filter), ("element_clip", self.element_clip)):
            if bounds is not None and bounds[0] >= bounds[1]:
                yield (f"trainer.{key}",), f"must rise from low to high, found {list(bounds)}"
        if self.success_filter is not None and config.environment.group_size < 2:
            yield ("trainer.success_filter", "environment.group_size"), "the filter is one of groups; write 2 or more"
        if self.entropy_weight and sampler.kind not in ("flow_noise", "reinflow", "tokens"):
            text = f"the noise of {sampler.kind} is not learned, its entropy has no gradient; write 0"
            yield ("trainer.entropy_weight", "sampler.kind"), text

    def plan(self, config: VLAConfig, chunk: int | None) -> list[Row]:
        """Environments, decisions, denoising steps and epochs."""
        env = config.environment
        rows = [("environments", f"{env.num_envs:,}", f"in groups of {env.group_size}")]
        if env.max_steps is not None and chunk is not None:
            decisions = -(-env.max_steps // chunk)
            number = f"{decisions * env.num_envs:,} at most"
            rows.append(("decisions", number, f"{decisions} of each environment"))
        if config.sampler.predicts in ("velocity", "noise"):
            rows.append(("denoising steps", f"{config.sampler.steps:,}", f"of a decision, {config.sampler.kind}"))
        return [*rows, ("epochs", f"{self.epochs:,}", f"in minibatches of {self.minibatch:,} decisions")]


def from_a_loaded_policy(config: VLAConfig, algorithm: str) -> Iterator[Finding]:
    """Methods that reinforce what a policy can do: it has to be able to do something, else hours teach it nothing."""
    if config.policy.new is not None:
        text = "needs a policy that succeeds now and then; train it by sft and give its folder as policy.path"
        yield ("policy.new",), f"{algorithm} {text}"


FROM_DATA: Row = ("learns", "from data", "see docs/vla_offline.md")


def from_demonstrations(config: VLAConfig, algorithm: str) -> Iterator[Finding]:
    """Methods that imitate need exactly one source of demonstrations."""
    demonstrations = config.demonstrations
    if demonstrations is None or (demonstrations.expert is None) == (demonstrations.dataset is None):
        text = "imitates: write `expert: N`, or `dataset: FOLDER`, and not both (null takes one out)"
        yield ("demonstrations",), f"{algorithm} {text}"


def on_the_table(config: VLAConfig, algorithm: str, *, diffusion: bool = False) -> Iterator[Finding]:
    """Methods that make their own data on MiniTable, from states, for a new policy."""
    if config.environment.name not in WORLDS.built_in:
        yield ("environment.name",), f"{algorithm} makes its own data; write {' or '.join(WORLDS.built_in)}"
    yield from for_a_new_policy(config, algorithm, diffusion=diffusion)


def for_a_new_policy(config: VLAConfig, algorithm: str, *, diffusion: bool = False) -> Iterator[Finding]:
    """Methods that learn from data what a new policy of states does."""
    new = config.policy.new
    if new is None:
        yield ("policy.new",), f"{algorithm} begins with a new policy; write `new: {{...}}`"
    else:
        for key in ("image_size", "points"):
            if getattr(new, key):
                yield (f"policy.new.{key}",), f"{algorithm} works on states; write 0"
    if diffusion and new is not None and new.type != "diffusion_mlp":
        yield ("policy.new.type",), f"{algorithm} trains a diffusion policy; write diffusion_mlp"
