"""Trainers of policies that learn from data instead of, or before, acting: sections of `vla.VLAConfig.trainer`.

Sources named there: RL-100 (arXiv 2510.14830), FISOR (2401.10700), IQL (2110.06169), RL-VLM-F (2402.03681). DiWA's
section is in `vla`, since it is PPO's with a world around it.
"""

from __future__ import annotations

from typing import Any, Literal

from genrl.config.section import Count, Flag, Margin, NonNegative, Positive, Section, Share, Text, Whole


class Critics(Section):
    """Two Q and a V, learned from data by implicit Q-learning."""

    gamma: Share = 0.98
    """Discount of one action: gamma^n over a chunk of n."""
    expectile: Share = 0.7
    """Which expectile of Q is V: above 0.5 it leans to the best actions of the data (RL-100: 0.7)."""
    width: Count = 128
    """Width of their layers."""
    lr: Positive = 1e-3
    """Learning rate."""
    batch_size: Count = 256
    """Transitions per step."""
    target_rate: Share = 0.01
    """How fast the slow copies follow in a step (FISOR: 0.005)."""


class RL100(Section):
    """RL-100: imitation, rounds of offline RL that offline evaluation gates, online RL, a one-step copy at the end."""

    algorithm: Literal["rl100"] = "rl100"
    """Which trainer."""
    imitation_steps: Count = 300
    """Steps of imitation that a new policy begins with."""
    imitation_batch: Count = 128
    """Frames per step of imitation."""
    imitation_lr: Positive = 1e-3
    """Learning rate of imitation."""
    rounds: Count = 4
    """Iterations of offline RL; those after them are online."""
    episodes: Count = 3072
    """Episodes that are collected before the first round and after each; a multiple of environment.num_envs."""
    critics: Critics = Critics()
    """What judges actions."""
    critic_steps: Count = 1500
    """Steps of the critics in a round."""
    dynamics_steps: Count = 800
    """Steps of the model in which policies are judged, new in every round."""
    updates: Count = 200
    """Batches of a round; each is a step for every drawn denoising step (RL-100: 8000 over all)."""
    batch_size: Count = 256
    """States of the data in a batch (RL-100: 128 to 512)."""
    clip_range: Margin = 0.25
    """Ratio of a denoising step kept in 1 - c .. 1 + c (RL-100: 0.25)."""
    clip_decay: Share = 0.99
    """Factor on it after each of the first 200 batches of a round (RL-100: 0.96)."""
    gate_every: Count = 50
    """Batches between two judgements of the candidate (RL-100: 50)."""
    gate_steps: Count = 20
    """Decisions that it is imagined for (RL-100: 20)."""
    gate_starts: Count = 256
    """States of the data from which it is."""
    union: Literal["all", "successes", "none"] = "successes"
    """What is imitated after a round: all data so far, the episodes that succeeded, or nothing."""
    union_steps: Count = 300
    """Steps of that."""
    union_lr: Positive = 1e-4
    """Learning rate of that."""
    online_clip: Margin = 0.2
    """Clip range online (RL-100: 0.2)."""
    online_epochs: Count = 2
    """Passes over the decisions of an online iteration (RL-100: 10)."""
    online_minibatch: Count = 512
    """Decisions of a batch online (RL-100: 128)."""
    lam: Share = 0.95
    """Lambda of generalised advantage estimation online."""
    distil_steps: Whole = 1500
    """Steps that make the one-step copy at the end; 0 = none."""


class FISOR(Section):
    """FISOR: safe offline learning on a table where other discs must be kept away from."""

    algorithm: Literal["fisor"] = "fisor"
    """Which trainer."""
    episodes: Count = 2000
    """Episodes of the behaviour that is learned from."""
    careful: Share = 0.4
    """Share of them in which it avoids the other discs."""
    noise: NonNegative = 0.35
    """Standard deviation of what is added to its moves."""
    critics: Critics = Critics(gamma=0.99, expectile=0.9, target_rate=0.05)
    """Of rewards and of violations (FISOR, for a million updates: 0.99, expectile 0.9, target 0.005, lr 3e-4)."""
    cost_expectile: Share = 0.9
    """Reversed expectile of V_h."""
    violation: Positive = 3.0
    """h of a transition with cost (FISOR: 25); without, -1. The larger it is, the more states are held infeasible."""
    reward_temperature: Positive = 20.0
    """How strongly better actions are preferred in feasible states (FISOR: 3; rewards here are a few hundredths)."""
    cost_temperature: Positive = 5.0
    """How strongly safer ones are in infeasible states (FISOR: 5)."""
    largest_cost_weight: Positive = 10.0
    """Bound of their weight (FISOR: 150)."""
    actor_batch: Count = 256
    """Transitions per step of the actor (FISOR: 1024)."""
    actor_rate: Share = 0.005
    """How fast the copy that acts follows in a step (FISOR: 0.001)."""
    candidates: Count = 16
    """Samples of which the one of least Q_h acts."""
    steps_per_iteration: Count = 250
    """Updates of critics and actor in an iteration."""
    cost_limit: NonNegative = 0.25
    """Mean cost of an episode that is allowed."""
    weighted: Flag = True
    """False: plain cloning of the data, acting by one sample, for comparison."""


class Labels(Section):
    """Who says which of two pictures is nearer to the goal, and which pairs it is asked about."""

    judge: Text = "table_progress"
    """A reward by name, or path/file.py:Name; pairwise ones are asked in both orders."""
    args: dict[str, Any] = {}
    """Its options."""
    margin: NonNegative = 0.05
    """Scores nearer than this are no preference, and the pair is dropped."""
    image_size: Count = 32
    """Side of the pictures that it is shown."""
    rounds: Count = 4
    """Times that pairs are asked for and the reward networks are trained."""
    pairs: Count = 1000
    """Pairs of a round."""
    select: Literal["uniform", "entropy", "disagreement"] = "disagreement"
    """Which pairs of ten times as many: any, those the networks are unsure of, those they disagree on."""
    members: Count = 3
    """Networks of the ensemble."""
    steps: Count = 300
    """Steps of their training in a round."""
    batch_size: Count = 128
    """Pairs per step."""
    lr: Positive = 1e-3
    """Learning rate."""
    cache: Text | None = None
    """File with answers by the hash of what was shown; null = labels.jsonl of the run folder."""


class RLVLMF(Section):
    """Rewards by preferences over pictures for data without any, then implicit Q-learning on them."""

    algorithm: Literal["rl_vlm_f"] = "rl_vlm_f"
    """Which trainer."""
    episodes: Count = 2500
    """Episodes of the data: a player who often does something else than it is told."""
    right: Share = 0.35
    """Share of them in which it does what it is told."""
    noise: NonNegative = 0.3
    """Standard deviation of what is added to its moves."""
    labels: Labels = Labels()
    """The judge and the reward networks."""
    critics: Critics = Critics(gamma=0.97)
    """Of the learned rewards."""
    critic_steps: Count = 1500
    """Steps of the critics before the policy's."""
    temperature: NonNegative = 30.0
    """Weight of a data action in the policy's regression: exp of so many times its advantage; 0 = plain cloning."""
    largest_weight: Positive = 100.0
    """Bound of that weight (IQL: 100)."""
    steps_per_iteration: Count = 250
    """Steps of the policy in an iteration."""
    batch_size: Count = 256
    """Transitions per step."""


class World(Section):
    """A recurrent world model, trained once on play."""

    tables: Count = 1500
    """Episodes of play."""
    length: Count = 64
    """Actions of each."""
    steps: Count = 2500
    """Updates."""
    window: Count = 16
    """Actions of a training sequence."""
    batch_size: Count = 64
    """Sequences per update."""
    lr: Positive = 1e-3
    """Learning rate, falling linearly to a twentieth."""
    deterministic: Count = 128
    """Width of h."""
    stochastic: Count = 32
    """Width of z."""
    balance: Share = 0.8
    """How much more the prior moves than the posterior (DreamerV2: 0.8)."""
    kl_scale: Positive = 0.03
    """Weight of the divergence against half squares of normalised observations."""


class Classifier(Section):
    """Says of a latent whether the instruction is fulfilled; trained on demonstrations."""

    steps: Count = 1500
    """Updates (DiWA: 100 epochs)."""
    batch_size: Count = 256
    """Frames per update, half of them play, a quarter fulfilled ends of demonstrations (DiWA: 32)."""
    lr: Positive = 1e-3
    """Learning rate (DiWA: 1e-6)."""
    temperature: Positive = 0.5
    """Of the contrastive loss (DiWA: 0.5)."""
    weight: NonNegative = 0.5
    """Of the contrastive loss (DiWA: 0.5)."""
    still: Count = 3
    """Steps after the success of a demonstration that count as fulfilled, too."""
