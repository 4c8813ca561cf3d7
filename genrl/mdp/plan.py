"""The sampling plan of a rollout tree and what it costs, in closed form, before anything is run. No torch.

A plan describes the rollouts of one prompt: from `roots` initial states, each node at depth i (a state x_i) gets
`branching[i]` children, each sampled from the transition of step i. The children of one node share its model call. The
systems of the field are plans (specs of the papers named):

- independent chains (Flow-GRPO 2505.05470, DanceGRPO 2505.07818): G roots, branching 1, every step stochastic;
- a window (MixGRPO 2507.21802, Flow-GRPO-Fast): the same with noise inside the window only;
- a split (B2-DiffuRL 2503.11240, BranchGRPO 2509.06040): K ways at chosen steps;
- a window tree (TreeGRPO 2512.08153, Dynamic-TreeRPO 2509.23352): k ways at every step of a window;
- a caterpillar (SPO 2406.04314): k candidates at every step, of which one goes on.

A window is a range of steps inside [low, high), the same on every process, and never empty. Those that move with the
iteration are here; those that are sampled (`window_steps`, `geometric_window` of `steps.plans`) need torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Tail(NamedTuple):
    """The last `steps` steps are taken by a multistep solver and stand for `replaces` steps of the schedule."""

    steps: int
    replaces: int


@dataclass(frozen=True)
class SamplingPlan:
    """How the rollouts of one prompt are sampled. Raises ValueError, naming the field, for a plan that cannot be.

    All counts are per prompt, and a model call is one evaluation of one state: guidance may double it.
    """

    roots: int
    """Initial states."""
    branching: tuple[int, ...]
    """Children of a node at depth i, for each step i."""
    noise_levels: tuple[float | None, ...]
    """Noise level of step i, of its transition and of its log-probability alike; None = a deterministic step. (0 is for
    wan_sde, whose noise has no level.)"""
    continue_one: bool = False
    """Of the candidates at a depth, one per root continues (chosen uniformly); the others end there."""
    spread: float | None = None
    """Where a node branches: siblings' noises have correlation 1 / (1 + spread^2); None = independent."""
    tail: Tail | None = None

    def __post_init__(self) -> None:
        if self.roots < 1:
            raise ValueError(f"roots: a plan without initial states has no leaves; use 1 or more, got {self.roots}")
        if not self.branching:
            raise ValueError("branching: a plan needs at least one step")
        if len(self.noise_levels) != len(self.branching):
            raise ValueError(
                f"noise_levels: {len(self.noise_levels)} levels for the {len(self.branching)} steps of branching; "
                "one per step is needed"
            )
        for step, (ways, level) in enumerate(zip(self.branching, self.noise_levels, strict=True)):
            if ways < 1:
                raise ValueError(f"branching: step {step} has {ways} children, so nothing is left; use 1 or more")
            if level is not None and not (math.isfinite(level) and level >= 0):
                raise ValueError(f"noise_levels: step {step} has {level}; use a finite number >= 0, or None")
            if ways > 1 and level is None:
                raise ValueError(
                    f"branching: step {step} branches {ways} ways but is deterministic, so its children would be "
                    "equal; give it a noise level, or branch at a stochastic step"
                )
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread > 0):
            raise ValueError(f"spread: must be above 0 (0 makes all siblings equal) and finite, got {self.spread}")
        if self.tail is not None and not 1 <= self.tail.steps <= min(self.tail.replaces, self.steps):
            raise ValueError(
                f"tail: {self.tail.steps} of {self.steps} steps standing for {self.tail.replaces} is not a "
                "compressed tail; it needs at least one step, and no more than it replaces"
            )
        if self.tail is not None and any(level is not None for level in self.noise_levels[-self.tail.steps :]):
            raise ValueError("tail: the steps of the solver are deterministic; move the noise before them")

    @property
    def steps(self) -> int:
        """Denoising steps of a rollout."""
        return len(self.branching)

    @property
    def full_steps(self) -> int:
        """Steps of the schedule, before its tail was compressed."""
        return self.steps if self.tail is None else self.steps - self.tail.steps + self.tail.replaces

    @property
    def stochastic(self) -> tuple[int, ...]:
        """Steps whose transitions are sampled, hence actions."""
        return tuple(step for step, level in enumerate(self.noise_levels) if level is not None)

    @property
    def splits(self) -> tuple[int, ...]:
        """Steps with more than one child."""
        return tuple(step for step, ways in enumerate(self.branching) if ways > 1)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes at each depth, steps + 1 numbers: n_0 = roots, n_{i+1} = n_i b_i (roots b_i with continue_one)."""
        # Depth by depth, as `calls`, `edges` and `leaves` are all sums over these.
        counts = [self.roots]
        for ways in self.branching:
            counts.append(self._parents(counts[-1]) * ways)
        return tuple(counts)

    def _parents(self, nodes: int) -> int:
        return self.roots if self.continue_one else nodes

    @property
    def leaves(self) -> int:
        """Finished samples."""
        return self.nodes[-1]

    @property
    def edges(self) -> int:
        """Transitions, one per node that is no root."""
        return sum(self.nodes[1:])

    @property
    def calls(self) -> int:
        """Model calls of sampling: one per node that is not finished; siblings share their parent's."""
        return sum(self.nodes[:-1])

    @property
    def independent_calls(self) -> int:
        """Model calls of independent rollouts, of the whole schedule, with as many leaves."""
        return self.leaves * self.full_steps

    def trained_edges(self, steps: Collection[int]) -> int:
        """Transitions of these steps. Raises ValueError where one of them is deterministic: it is not an action."""
        nodes = self.nodes
        return sum(nodes[step + 1] for step in self._actions(steps))

    def training_calls(self, steps: Collection[int]) -> int:
        """Model calls with gradient to train these steps once: one per parent, whose children share it."""
        nodes = self.nodes
        return sum(self._parents(nodes[step]) for step in self._actions(steps))

    def _actions(self, steps: Collection[int]) -> list[int]:
        wrong = sorted(set(steps) - set(self.stochastic))
        if wrong:
            raise ValueError(f"steps {wrong} are deterministic or outside the plan and cannot be trained")
        return sorted(set(steps))


def make_plan(
    steps: int,
    *,
    noise: Mapping[int, float],
    splits: Mapping[int, int] | None = None,
    roots: int = 1,
    spread: float | None = None,
) -> SamplingPlan:
    """A plan from its exceptions: step -> noise level (all others deterministic), step -> ways (all others 1).

    Raises ValueError for a step outside 0 .. steps - 1, naming `noise` or `splits`.
    """
    ways = splits or {}
    for name, by_step in (("noise", noise), ("splits", ways)):
        outside = sorted(step for step in by_step if not 0 <= step < steps)
        if outside:
            raise ValueError(f"{name}: steps {outside} are outside the schedule's 0 .. {steps - 1}")
    return SamplingPlan(
        roots=roots,
        branching=tuple(ways.get(step, 1) for step in range(steps)),
        noise_levels=tuple(noise.get(step) for step in range(steps)),
        spread=spread,
    )


def caterpillar(steps: int, *, noise: Mapping[int, float], first: int, candidates: int) -> SamplingPlan:
    """SPO's tree (arXiv 2406.04314): each stochastic step from `first` on has `candidates` next states, of which a
    random one goes on.

    All candidates but finished ones are evaluated, whether the last step is stochastic or not: the calls are
    `first + 1 + candidates (steps - first - 1)`.
    """
    splits = dict.fromkeys((step for step in noise if step >= first), candidates)
    return replace(make_plan(steps, noise=noise, splits=splits), continue_one=True)


def compress_tail(plan: SamplingPlan, ratio: float) -> SamplingPlan:
    """The plan with the steps after its last stochastic one taken by a solver in ceil(ratio x as many) steps.

    MixGRPO-Flash (arXiv 2507.21802, section on its acceleration): T = l + w + ceil((T - w - l) ratio). Steps before the
    window stay as they are (the paper finds compressing both sides harmful).
    Raises ValueError unless 0 < ratio <= 1, or where no step is left after the last stochastic one.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio: the tail's ratio must be above 0 and at most 1, got {ratio}")
    head = max(plan.stochastic, default=-1) + 1
    replaces = plan.full_steps - head
    if replaces < 1:
        raise ValueError("ratio: the last step is stochastic, so there is no tail to compress")
    steps = math.ceil(round(replaces * ratio, 9))  # 10 x 0.7 is 7.000000000000001 in floating point
    return replace(
        plan,
        branching=plan.branching[:head] + (1,) * steps,
        noise_levels=plan.noise_levels[:head] + (None,) * steps,
        tail=Tail(steps, replaces),
    )


def unpruned_steps(trained: Collection[int], depths: Collection[int]) -> tuple[int, ...]:
    """The trained steps that depth pruning leaves: those whose edges do not lead to one of `depths` (step + 1).

    Raises ValueError where it leaves none.
    """
    remaining = tuple(sorted(step for step in set(trained) if step + 1 not in depths))
    if not remaining:
        raise ValueError(
            f"depths: pruning the edges into depths {sorted(depths)} leaves none of the trained steps "
            f"{sorted(trained)}; leave at least one out"
        )
    return remaining


def sliding_depths(base: Sequence[int], *, iteration: int, interval: int, stop: int) -> range:
    """The window of depths to prune: `base`, moved up the tree by one every `interval` iterations.

    It stops when its first depth reaches `stop` (released default: the last split). Raises ValueError for an empty
    base, or one with gaps.
    """
    first, last = min(base, default=0), max(base, default=-1)
    if sorted(base) != list(range(first, last + 1)) or not base or interval < 1:
        raise ValueError(f"depths: a sliding window needs consecutive depths and an interval >= 1, got {list(base)}")
    # A base that lies above `stop` already does not move at all.
    shift = min(iteration // interval, max(0, first - stop))
    return range(first - shift, last - shift + 1)


def describe(
    plan: SamplingPlan,
    trained: Collection[int],
    *,
    calls_per_state: int = 1,
    replays_per_state: int | None = None,
) -> str:
    """The plan as text, per prompt: depths, branching, noise, trained edges, calls and how they compare.

    trained: steps whose edges are trained (pruning may leave fewer). calls_per_state: 2 under guidance that evaluates
    the model twice. replays_per_state: model calls of training for a state whose edges are trained; None = as many.
    """
    nodes = plan.nodes
    lines = [
        f"per prompt: {_count(plan.roots, 'root')}, {_count(plan.leaves, 'leaf', 'leaves')}, {sum(nodes)} nodes, "
        f"{_count(plan.edges, 'edge')}",
        f"{'steps':>7}  {'states':>6}  {'ways':>4}  {'noise':>9}  {'edges':>6}  {'trained':>7}",
    ]
    for first, last in _runs(plan, set(trained)):
        ways, level = plan.branching[first], plan.noise_levels[first]
        noise = "none" if level is None else f"{level:.3g}"
        if plan.tail is not None and first >= plan.steps - plan.tail.steps:
            noise = "solver"
        edges = sum(nodes[first + 1 : last + 2])
        num_trained = edges if first in trained else 0
        name = str(first) if first == last else f"{first}-{last}"
        keeps = " (one goes on)" if plan.continue_one and ways > 1 else ""
        lines.append(f"{name:>7}  {nodes[first]:>6}  {ways:>4}  {noise:>9}  {edges:>6}  {num_trained:>7}{keeps}")
    if plan.spread is not None:
        lines.append(f"siblings' noises have correlation {1 / (1 + plan.spread**2):.3g}")
    if plan.tail is not None:
        lines.append(f"the last {_count(plan.tail.steps, 'step')} in place of {plan.tail.replaces} of the schedule's")
    calls, independent = plan.calls * calls_per_state, plan.independent_calls * calls_per_state
    replays = calls_per_state if replays_per_state is None else replays_per_state
    training = plan.training_calls(trained) * replays
    lines += [
        f"model calls in sampling: {calls}, {calls / plan.leaves:.2f} per image; independent rollouts with as many "
        f"leaves: {independent}, ratio {calls / independent:.3f}",
        f"model calls in training: {training}, {training / plan.leaves:.2f} per image, for "
        f"{_count(plan.trained_edges(trained), 'edge')}",
    ]
    return "\n".join(lines)


def _runs(plan: SamplingPlan, trained: set[int]) -> Iterator[tuple[int, int]]:
    """First and last step of each run of steps that look the same in the table."""
    tail = plan.steps - (plan.tail.steps if plan.tail else 0)
    looks = [
        (plan.nodes[step], plan.branching[step], plan.noise_levels[step], step in trained, step >= tail)
        for step in range(plan.steps)
    ]
    first = 0
    for step in range(1, plan.steps + 1):
        if step == plan.steps or looks[step] != looks[first]:
            yield first, step - 1
            first = step


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def moving_window(
    size: int,
    low: int,
    high: int,
    *,
    iteration: int,
    every: int,
    stride: int = 1,
) -> range:
    """`size` steps inside [low, high) that move down the schedule: MixGRPO's windows (arXiv 2507.21802, section 3).

    Starts are low, low + stride, ... and, last, high - size, where it stays for good; each is in force for `every`
    iterations (tau).
    A pure function of its arguments, for any iteration >= 0. Raises ValueError where the window does not fit.
    """
    check_window(size, low, high)
    start = min(low + stride * (iteration // every), high - size)
    return range(start, start + size)


def geometric_start_probabilities(starts: int, ratio: float) -> list[float]:
    """`(1 - r) r^i / (1 - r^n)`, i = 0 .. n - 1: TreeGRPO's law of the window's start (arXiv 2512.08153); r = .5 there.

    Smaller r favours early starts; r = 1 is uniform. Raises ValueError unless 0 < r <= 1 and n >= 1.
    """
    if starts < 1 or not 0 < ratio <= 1:
        raise ValueError(f"the law needs at least one start and a ratio above 0 and up to 1, got {starts} and {ratio}")
    weights = [ratio**i for i in range(starts)]
    return [weight / math.fsum(weights) for weight in weights]


def draw_start(probabilities: Sequence[float], uniform: float) -> int:
    """The first index whose cumulative probability is above `uniform` in [0, 1): inverse-CDF sampling."""
    total = 0.0
    for index, probability in enumerate(probabilities):
        total += probability
        if uniform < total:
            return index
    # The sum of the probabilities may round to just below 1, with `uniform` above it.
    return len(probabilities) - 1


def backward_interval(steps: int, *, shortest: int, longest: int, stages: int, stage: int) -> range:
    """The final steps that are branched and trained at a stage: B2-DiffuRL's backward progressive training.

    `s = shortest + floor(stage (longest - shortest + 1) / stages)` (arXiv 2503.11240 and its code; 14 to 20 of 20 steps
    over 100 stages): the interval grows from the picture's end backwards. After the last stage it stays the longest.
    Raises ValueError unless 1 <= shortest <= longest <= steps.
    """
    if not 1 <= shortest <= longest <= steps or stages < 1 or stage < 0:
        raise ValueError(
            f"window: an interval that grows from {shortest} to {longest} of {steps} steps over {stages} stages is "
            f"impossible (stage {stage}): it needs 1 <= shortest <= longest <= steps"
        )
    length = min(longest, shortest + stage * (longest - shortest + 1) // stages)
    return range(steps - length, steps)


def growing_noise(base: float, growth: float, depths: int) -> tuple[float, ...]:
    """`g_j = base (1 + growth j / (d - 1))`, j = 0 .. d - 1: the noise levels of a window tree of d branching steps.

    Dynamic-TreeRPO (arXiv 2509.23352) lets the noise grow linearly with the normalised depth; this formula is
    inferred from its abstract and reviews, as the full text was not available.
    """
    return tuple(base * (1.0 + growth * (j / (depths - 1) if depths > 1 else 0.0)) for j in range(depths))


def check_window(size: int, low: int, high: int) -> None:
    if low < 0 or size < 1 or size > high - low:
        raise ValueError(f"window: {size} steps do not fit between {low} and {high}; use fewer, or another low or high")
