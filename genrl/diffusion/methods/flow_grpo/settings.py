"""Policy gradient on the denoising steps (arXiv 2505.05470), with the kernels of its successors."""

from __future__ import annotations

from typing import Literal

from genrl.config.diffusion_method import Kernel, ReferenceKL, Updating
from genrl.config.section import Count, Flag, NonNegative, Number, Positive, Section, Share, Ways, Whole


class Window(Section):
    """The stretch of steps that is stochastic and trained; all others are deterministic."""

    size: Count = 2
    """Number of consecutive stochastic steps (Flow-GRPO-Fast: 2 or 3, MixGRPO: 4)."""
    low: Whole = 0
    """First step where the window may begin."""
    high: Count | None = None
    """The window ends before this step; null = before the last step, which is never stochastic."""
    schedule: Literal["random", "progressive", "decaying", "geometric", "backward"] = "random"
    """Its place in an iteration: uniform; down the schedule (MixGRPO), faster and faster; early starts likelier
    (TreeGRPO); or the last steps, more and more of them (B2-DiffuRL)."""
    every: Count = 25
    """Iterations that it stays in one place (progressive; decaying: at first)."""
    stride: Whole = 1
    """Steps that it moves by (progressive, decaying); 0 = never (MixGRPO's frozen window)."""
    decay_from: Whole = 13
    """Start from which on it stays exp(-0.1) times shorter per step (decaying; MixGRPO: 13 of 25)."""
    ratio: Share = 0.5
    """Likelihood of a start against the one before it (geometric; TreeGRPO: 0.5); 1 = uniform."""
    shortest: Count | None = None
    """Size at the beginning (backward); it grows to `size` over the run (B2-DiffuRL: 14 to 20 of 20 steps)."""


class Prune(Section):
    """Edges that are not trained (BranchGRPO, arXiv 2509.06040)."""

    depths: tuple[Count, ...] = ()
    """Leave out the edges into these depths (step + 1); consecutive ones."""
    slide_every: Count | None = None
    """Move `depths` up the tree by one every so many iterations, as far as the last split; null = never."""
    width: Literal["best_sibling", "extremes"] | None = None
    """Below the last split keep the better leaf of each parent, or the best and worst leaves; null = all."""
    keep: Share = 0.5
    """Share of the leaves that `extremes` keeps, half best and half worst."""
    until: Share = 1.0
    """Share of the iterations in which pruning is on, from the first."""


class Contrast(Section):
    """Train only the best and the worst leaf of each split, by scores over a prompt's history (B2-DiffuRL)."""

    high: Number = 0.5
    """The best is trained if its score is at least this."""
    low: Number = -0.5
    """The worst is trained if its score is below this."""
    history: Whole = 8
    """Earlier iterations of a prompt that its scores are measured against, besides the running one."""


class Tree(Section):
    """The samples of a group are leaves of trees: what they share is run once."""

    ways: Ways
    """Children of every state at a step that branches (TreeGRPO 3, BranchGRPO and Dynamic-TreeRPO 2)."""
    at: Literal["window", "window_start"] | tuple[Whole, ...] = "window_start"
    """Steps that branch: all of the window, its first one, or these. group_size is a multiple of the leaves."""
    spread: Positive | None = None
    """Noises of siblings have correlation 1 / (1 + spread^2) (BranchGRPO: 4); null = independent."""
    noise_growth: NonNegative = 0.0
    """The noise level grows from the first to the last branching step by this share (Dynamic-TreeRPO: 0.5)."""
    credit: Literal["mean", "path_softmax", "level_softmax"] = "mean"
    """Value of a shared edge: the mean of its leaves, or weighted by their likelihood along the path or level by
    level (TreeGRPO)."""
    sharpness: NonNegative = 1.0
    """Factor on the log-probabilities in the softmax weights; 0 = mean."""
    normalise: Literal["group", "depth"] = "group"
    """Advantages are those of the leaves, or of all values at one depth (BranchGRPO; four or more)."""
    weight: Literal["leaf_multiplicity", "per_edge"] = "leaf_multiplicity"
    """An edge counts as often as it has leaves (as if rollouts were separate), or once (BranchGRPO, TreeGRPO)."""
    prune: Prune | None = None
    """Edges that are not trained; null = all are."""
    contrast: Contrast | None = None
    """Train only the extremes of each split; null = all."""


class LayerTuning(Section):
    """LayerTuning-RL of Dynamic-TreeRPO: clip bounds that follow the advantage, and a pull towards the best sample."""

    weight: NonNegative = 0.1
    """Weight of the squared distance to the target velocity."""
    target: Literal["best_path", "best_image"] = "best_path"
    """Velocity on the best leaf's path at the same step, or the one that leads to the best leaf's image."""
    sensitivity: NonNegative = 0.5
    """How much wider the clip range is for large advantages."""


class PromptHistory(Section):
    """What an advantage is measured against where it is not the group (DDPO's statistics per prompt)."""

    size: Count = 16
    """Last rewards of a prompt that are remembered, this iteration's included (DDPO: 16)."""
    min_count: Count = 8
    """With fewer, a prompt is measured against the whole iteration (DDPO: 8)."""


class FlowGRPO(Updating):
    """Policy gradient on the denoising steps (arXiv 2505.05470), with the kernels of its successors."""

    algorithm: Literal["flow_grpo"] = "flow_grpo"
    """Which trainer."""
    kernel: Kernel = "flow_sde"
    """Transition density of a stochastic step; ddim is for epsilon- and v-prediction models."""
    noise_level: NonNegative | None = 0.7
    """Noise of the kernel (flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, (flow_)ddim eta 1); wan_sde: null."""
    window: Window | None = None
    """Train only a stretch of steps, placed once per iteration; null = all steps but the last."""
    noise_outside_window: Flag = False
    """Draw the steps outside the window too, without training them (B2-DiffuRL); false = they are deterministic."""
    tree: Tree | None = None
    """Share the beginnings of a group's samples (docs/trees.md); null = independent samples."""
    tail_ratio: Share | None = None
    """Take the steps after the window by DPM-Solver++ in this share of them (MixGRPO-Flash: 0.4); null = all."""
    layer_tuning: LayerTuning | None = None
    """Supervised pull towards the best sample of a tree, and dynamic clip bounds; null = none."""
    advantage_scale: Literal["group", "global", "none", "prompt_history"] = "group"
    """Divide centred rewards by the group's spread, by that of the whole iteration, or by nothing; or measure them
    against the prompt's last rewards, in groups of any size (DDPO)."""
    history: PromptHistory = PromptHistory()
    """Of advantage_scale: prompt_history."""
    aggregate: Literal["sum", "gdpo", "log_tame", "log_tame_released"] = "sum"
    """Several rewards to one advantage: of their weighted sum; of each by itself, then summed and whitened (GDPO); of
    the sum in which those that vary most are log(1 + r) (PaCo-GRPO's paper), or that sum itself (its code)."""
    advantage_clip: Positive = 5.0
    """Largest absolute advantage (all peers: 5)."""
    objective: Literal["importance", "score_function"] = "importance"
    """Clipped importance ratios, or -A log p (DDPO's score function), for one update per iteration."""
    guard: Flag = False
    """GRPO-Guard (arXiv 2510.22319): ratios centred and scaled alike at all steps, losses divided by the step."""
    clip_range: Positive | tuple[Positive, Positive] = 1e-4
    """Ratio kept in 1 - low .. 1 + high: one distance or [low, high], both positive (Flow-GRPO 1e-4, guard 2e-6 to
    4e-6)."""
    kl_weight: NonNegative = 0.0
    """Weight of the divergence from the starting model (Flow-GRPO: 0 to 0.04)."""
    kl: ReferenceKL = "gaussian"
    """Which divergence: gaussian (exact), gaussian_dt (Flow-GRPO's, of SDE kernels), mean_square, velocity,
    x_prediction (of the predicted data), k2 (half the squared log-ratio)."""
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """Log-probability over the latent's numbers: mean (all peers; clip_range assumes it) or sum."""
    guidance_in_training: Flag = True
    """Use classifier-free guidance in training as in sampling. An input of the model (FLUX.1-dev) always stays."""
    updates_per_iteration: Count = 1
    """Optimiser steps per inner epoch (Flow-GRPO: 2); at most the number of micro-batches."""
    inner_epochs: Count = 1
    """Passes over the samples of one iteration (Flow-GRPO: 1)."""
    keep_graph: Flag = False
    """Keep the activations of the trained steps from sampling and go backward from there, instead of running these
    steps again: the same gradient, for one update per iteration and where they fit into memory together."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(low, high): the ratio is kept between 1 - low and 1 + high."""
        return self.clip_range if isinstance(self.clip_range, tuple) else (self.clip_range, self.clip_range)
