"""The typed configuration of a run that trains a policy in simulation: a YAML file with the section `policy`.

As in `schema`, the text under each field is its description. Sources named there: pi_RL (arXiv 2510.25889), DPPO
(2409.00588), ReinFlow (2505.22094), SimpleVLA-RL (2509.09674).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from genrl.config.section import (
    Count,
    Flag,
    Fraction,
    Margin,
    NonNegative,
    Number,
    Positive,
    Section,
    Share,
    Text,
    Ways,
    Whole,
)
from genrl.config.sections import EMA, Checkpoint, Distributed, Monitor, Optimizer, Tracker
from genrl.config.vla_offline import FISOR, RL100, RLVLMF, Classifier, World
from genrl.config.vla_rules import refuse_impossible

Range = tuple[Number, Number]


class NewPolicy(Section):
    """A small policy with fresh weights, for supervised training."""

    type: Literal["tiny_flow_vla", "diffusion_mlp"] = "tiny_flow_vla"
    """Which: a flow policy of half a million parameters, or DPPO's diffusion MLP."""
    horizon: Count = 4
    """Actions in a chunk."""
    image_size: Whole = 32
    """Side of the picture it looks at, in pixels; 0 = it is told the state of the environment instead."""
    train_steps: Ways = 20
    """Noise levels of a diffusion policy (DPPO: 20 from states, 100 from pictures)."""


class Policy(Section):
    """Which policy is trained, and what of it."""

    path: Text | None = None
    """Folder of a policy as LeRobot saves it (config.json, model.safetensors), or of a run; null = `new`."""
    new: NewPolicy | None = None
    """A small policy with fresh weights; null = `path`."""
    rename: dict[Text, Text] = {}
    """Published policies: the environment's name -> the policy's (LeRobot's rename_map); other cameras stay empty."""
    freeze: Literal["nothing", "encoder"] = "encoder"
    """What of a loaded policy is not trained: nothing, or what sees and reads (a VLM, the embedded encoder)."""
    keep_features: Flag = True
    """With a frozen encoder: train on what it computed in the rollout, not anew (pi0, SmolVLA: anew, it is too big)."""

    @property
    def frozen(self) -> bool:
        """Whether the encoder is not trained; that of a new policy always is."""
        return self.path is not None and self.freeze == "encoder"


class Environment(Section):
    """Where the policy acts."""

    name: Text
    """minitable, metaworld, a gymnasium id, or path/file.py:function that makes an environment."""
    tasks: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Which tasks, by name; null = the environment's own choice."""
    num_envs: Count = 64
    """Environments that run side by side, over all processes."""
    group_size: Count = 1
    """Neighbouring environments that begin every episode from the same state (GRPO: 8)."""
    chunk: Count | None = None
    """Actions of a chunk that are executed before the policy is asked again; null = all of them."""
    max_steps: Count | None = None
    """Actions after which an episode is cut off; null = the environment's own limit."""
    workers: Whole | Literal["ray", "ray_simulators"] = 0
    """Processes that the simulators run in; 0 = this one; ray = Ray actors, which act with copies of the policy;
    ray_simulators = Ray actors, and the policy stays here."""
    timeout_s: Positive = 60.0
    """Seconds after which a worker that does not answer is restarted and its episodes are dropped."""
    reward: Literal["success", "environment"] = "success"
    """1 at success, or what the environment pays."""
    goals: Whole = 0
    """So many fixed starts of each task, drawn by evaluation.seed; 0 = a new one for every episode (not MiniTable)."""
    instruction: Text | None = None
    """gymnasium: the sentence that the policy is told, where the environment has no task_description of its own."""
    success_key: Text = "is_success"
    """gymnasium: the entry of info that says success."""
    proprioception: Whole = 0
    """gymnasium: how many of the first numbers of an observation are the robot's own state."""
    args: dict[str, Any] = {}
    """gymnasium: keyword arguments of gymnasium.make, or of the function."""


class Demonstrations(Section):
    """What supervised training imitates: exactly one source."""

    expert: Count | None = None
    """Episodes of the environment's scripted expert, on Meta-World of each task; null = `dataset`."""
    dataset: Text | None = None
    """Folder of a LeRobotDataset v3; null = `expert`."""
    camera: Text = "observation.image"
    """Column of the data set that is the picture of a policy with one camera."""


class FlowSDE(Section):
    """Flow-SDE of pi_RL: some denoising steps are drawn, each is a decision with a ratio of its own."""

    kind: Literal["flow_sde"] = "flow_sde"
    """Which sampler."""
    steps: Ways = 4
    """Denoising steps K (pi0: 4; pi0.5: 3 to 5)."""
    noise_level: Positive = 1.0
    """Noise a of the drawn step (pi_RL: 0.5; a small policy needs 1)."""
    anneal: tuple[Positive, Count] | None = None
    """[a, iterations]: the noise level goes linearly to this one in so many iterations; null = constant."""
    selection: Literal["all", "random_per_env", "random_per_batch", "last"] = "random_per_env"
    """Which steps are drawn: all, one at random per chunk, one for all chunks (pi_RL as released), or the last ones."""
    count: Count = 1
    """How many of the last steps, with selection last."""
    skip_last: Flag = False
    """Never draw the step that ends in the action."""


class FlowCPS(FlowSDE):
    """Flow-CPS: as Flow-SDE, with a kernel that keeps the noise level; its last step is never drawn."""

    kind: Literal["flow_cps"] = "flow_cps"  # type: ignore[assignment]
    """Which sampler."""
    noise_level: Positive = 0.7
    """Noise of the drawn step (RL-100: 0.7)."""
    skip_last: Literal[True] = True
    """Always true: the last step has no noise."""


class FlowNoise(Section):
    """Flow-Noise of pi_RL: a head of the policy sets the noise of every step, and the chain is one decision."""

    kind: Literal["flow_noise"] = "flow_noise"
    """Which sampler."""
    steps: Count = 4
    """Denoising steps K."""
    low: Positive = 0.2
    """Least standard deviation (pi_RL: 0.08; a small policy needs 0.2)."""
    high: Positive = 0.6
    """Greatest standard deviation (pi_RL: 0.16; a small policy needs 0.6)."""
    reduction: Literal["mean", "sum"] = "mean"
    """Log-densities of the K + 1 terms: mean (pi_RL as released) or sum (its equation)."""


class ReinFlow(Section):
    """ReinFlow: as Flow-Noise, with a noise network of its own, clipped means and the sum over the chain."""

    kind: Literal["reinflow"] = "reinflow"
    """Which sampler."""
    steps: Count = 4
    """Denoising steps K (ReinFlow: 4 from states, 1 from pictures)."""
    low: Positive = 0.08
    """Least standard deviation (ReinFlow: 0.05 to 0.10)."""
    high: Positive = 0.24
    """Greatest standard deviation (ReinFlow: 0.10 to 0.24)."""
    reduction: Literal["mean", "sum"] = "sum"
    """Log-densities of the chain's terms."""
    noise_clip: Positive = 3.0
    """Noise is kept within so many standard deviations."""


class Diffusion(Section):
    """DPPO: a DDPM or DDIM chain whose last steps are trained, each a decision; a frozen copy does the first ones."""

    kind: Literal["diffusion"] = "diffusion"
    """Which sampler."""
    steps: Count = 20
    """Denoising steps; all of the policy's (DDPM), or fewer (DDIM)."""
    ft_denoising_steps: Count = 10
    """How many of the last ones are trained (DPPO: 10 of 20, or all 5 of DDIM)."""
    floor: Positive = 0.1
    """Least standard deviation of a step, to draw and to score (DPPO: 0.1)."""
    noise_clip: Positive = 3.0
    """Noise is kept within so many standard deviations."""


class Update(Section):
    """What PPO and GRPO share: the clipped surrogate on the log-probabilities of chunks."""

    level: Literal["chunk", "action", "element"] = "chunk"
    """What has a ratio of its own: the executed chunk (pi_RL on LIBERO), each action, or each number of it."""
    reduction: Literal["sum", "mean"] = "sum"
    """Log-densities of the numbers of one ratio: sum (pi_RL), or mean (DPPO; divide the clip range likewise)."""
    clip_range: Margin = 0.2
    """Ratio kept in 1 - c .. 1 + c (pi_RL: 0.2; DPPO: 0.01 with reduction mean)."""
    clip_range_high: Positive | None = None
    """Upper side, 1 + c; null = as the lower one (SimpleVLA-RL: 0.28)."""
    dual_clip: Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)] | None = None
    """Bound c of the loss where the advantage is negative, c |A|; null = none (3 is usual)."""
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
    """Bonus for a learned noise (pi_RL with Flow-Noise: 0.005; ReinFlow: 0.01 to 0.03)."""
    element_clip: Range | None = None
    """Log-density of one number is kept within [low, high] (DPPO: -5 and 2); null = free."""
    log_prob_clip: Range | None = None
    """Log-probability of one ratio is kept within [low, high] (ReinFlow: -1 and 1); null = free."""
    success_filter: tuple[Fraction, Share] | None = None
    """Groups count only where their mean return is within [low, high] (SimpleVLA-RL: 0.1 and 0.9); null = all."""


class PPO(Update):
    """PPO with a critic and generalised advantage estimation over decisions."""

    algorithm: Literal["ppo"] = "ppo"
    """Which trainer."""
    gamma: Share = 0.99
    """Discount, per decision or per action (`discount`)."""
    lam: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.95
    """Lambda of generalised advantage estimation."""
    values: Literal["chunk", "action"] = "chunk"
    """What has a value and an advantage: the chunk, or every action of it (pi_RL's action level)."""
    discount: Literal["chunk", "smdp"] = "chunk"
    """Gamma per decision (pi_RL, DPPO), or gamma^n for its n executed actions (exact)."""
    episodes: Literal["first", "all"] = "first"
    """Train on the first episode of every environment, or on all that fit into `decisions`."""
    decisions: Count | None = None
    """Decisions of a rollout; null = as many as the longest episode needs."""
    critic_warmup: Whole = 2
    """First iterations, in which only the critic is trained."""
    value_clip: Positive | None = None
    """How far a value may move from that of the rollout before its gradient ends; null = free (pi_RL: 0.2)."""
    huber_delta: Positive | None = None
    """Value errors beyond this count linearly; null = squares (pi_RL: 10)."""
    value_weight: Positive = 1.0
    """Factor of the critic's loss (DPPO: 0.5)."""
    weighting: Literal["decisions", "episodes"] = "decisions"
    """Every decision counts the same, or every episode (pi_RL with a loss mask)."""
    denoising_gamma: Share = 1.0
    """Discount of the advantage per denoising step before the last trained one (DPPO: 0.99)."""
    clip_base: Margin | None = None
    """Clip range at the noisiest trained step, rising to `clip_range` at the last; null = the same at all (DPPO)."""


class DiWA(PPO):
    """DiWA: DPPO inside a frozen world model; the real environment is for evaluation only."""

    algorithm: Literal["diwa"] = "diwa"  # type: ignore[assignment]
    """Which trainer."""
    world: World = World()
    """The model of the world."""
    classifier: Classifier = Classifier()
    """The reward in it."""
    imitation_steps: Count = 1500
    """Steps of imitation, on demonstrations as the world model sees them."""
    imitation_batch: Count = 128
    """Frames per step of imitation."""
    imitation_lr: Positive = 1e-3
    """Learning rate of imitation."""


class GRPO(Update):
    """GRPO over groups of episodes that begin in the same state: no critic."""

    algorithm: Literal["grpo"] = "grpo"
    """Which trainer."""


class SFT(Section):
    """Supervised training on demonstrations: flow matching, or noise prediction."""

    algorithm: Literal["sft"] = "sft"
    """Which trainer."""
    steps_per_iteration: Count = 50
    """Optimiser steps of one iteration."""
    batch_size: Count = 128
    """Frames per optimiser step, over all processes."""


class PolicyOptimizer(Optimizer):
    """AdamW and its schedule; the critic has a rate of its own."""

    lr: Positive = 1e-4
    """Learning rate of the policy (small policies: 1e-4; pi_RL on pi0: 5e-6)."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critic (pi_RL: 1e-4; DPPO: 1e-3)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""


class Evaluation(Section):
    """Seeded episodes without exploration: the ODE, or DDIM, from fixed initial noise."""

    every: Whole = 5
    """Evaluate every so many iterations, and at the start and the end; 0 = never."""
    episodes: Count = 256
    """Episodes, always the same."""
    num_envs: Count | None = None
    """Environments side by side; null = environment.num_envs, or `episodes` where they are fewer."""
    seed: Whole = 1234
    """Seed of the episodes and of the initial noise."""
    videos: Whole = 4
    """Episodes that are filmed, successes and failures; 0 = none."""
    monitor: Monitor | None = None
    """End training when a held-out figure falls; null = never."""


class VLAConfig(Section):
    """One training run of a policy in simulation."""

    policy: Policy
    """Which policy is trained."""
    environment: Environment
    """Where it acts."""
    demonstrations: Demonstrations | None = None
    """What supervised training imitates."""
    sampler: Annotated[
        FlowSDE | FlowCPS | FlowNoise | ReinFlow | Diffusion,
        Field(discriminator="kind"),
    ] = FlowSDE()
    """How chunks are drawn: which steps of the denoising are random, and how much."""
    trainer: Annotated[PPO | GRPO | SFT | RL100 | DiWA | FISOR | RLVLMF, Field(discriminator="algorithm")]
    """Which algorithm, and its settings."""
    optimizer: PolicyOptimizer = PolicyOptimizer()
    """AdamW and its schedule."""
    ema: EMA | None = None
    """Moving average of the trained weights, for evaluation and the result; null = none."""
    evaluation: Evaluation = Evaluation()
    """When and how the policy is judged."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    distributed: Distributed = Distributed()
    """Several processes."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Where metrics go besides the run folder's metrics.jsonl: names of accelerate's trackers."""
    iterations: Count = 30
    """Rounds of acting and training."""
    seed: Whole = 0
    """Seed of everything random: episodes, noise, minibatches, new weights."""
    output: Text = "runs/genrl"
    """Run folder; default runs/<name of the YAML file>, with its folders below `configs`."""

    @model_validator(mode="after")
    def _possible(self) -> VLAConfig:
        refuse_impossible(self)
        return self
